"""A teacher on the policy's own base: that base, or it with another adapter, for no further copy of its weights.

name -> SavedAdapter; policy, SavedAdapter -> teacher

The teacher is a second tree of modules over the base's tensors, which nothing writes to; the policy's adapter is not in
it. So it is exact whatever the methods of both adapters are, and no pass of it touches the policy.
"""

import contextlib
import hashlib
import json
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from perl.errors import ModelError, PerlError
from perl.methods.base_checks import check_on_quantised
from perl.methods.settings import Adaptation, starts_as_base
from perl.policy.attach import continue_adapter, own_method
from perl.policy.model import base_of, base_parameters, clean_base
from perl.policy.quantised import quantisation_of
from perl.policy.saved.adapter import CONFIG, SavedAdapter, find_adapter, public_adapter
from perl.recipe.sections import TeacherSection
from perl.run.files import sha256_of
from perl.run.shards import is_sharded
from perl.sandbox import model_name

WHERE = "teacher.adapter"
"""Where a recipe names the teacher's adapter."""
ADAPTER_NAME = "teacher adapter"
"""What the name of the teacher's adapter is called among the settings of a run."""
# Of an adapter's config: what the base is called, who wrote the file, what it is used for.
_DO_NOT_ACT = ("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "task_type")
_LARGEST_VOCABULARY = 64_000_000  # bytes; those of the largest public tokenizers have 20 to 35 million


def find_teacher(name: str, base: str | None, tokenizer: Any) -> SavedAdapter:  # noqa: ANN401 (any tokenizer)
    """The adapter of a teacher, looked at before a model is loaded.

    Args:
        name: A run, a folder, a Hub id with an optional ``@revision``, or ``zoo:NAME``.
        base: Public name of the base of the run, or its folder; None: do not compare.
        tokenizer: Of the run, or a processor; one without a vocabulary is not compared.

    Raises:
        ModelError: It is absent or malformed, or was made for another base or tokenizer, or acts on a row as a whole.
    """
    try:
        saved = find_adapter(name, None if base is None else model_name(base))
    except PerlError as error:
        raise error.moved(lambda _: WHERE) from error
    if saved.config.is_prompt_learning:
        what = f"{name} puts {saved.config.peft_type.value} before each row, which is not proven for a teacher"
        raise ModelError(what, WHERE, "an adapter of the layers, as LoRA is")
    _check_vocabulary(saved, tokenizer)
    return saved


def make_teacher(policy: nn.Module, saved: SavedAdapter | None) -> nn.Module:
    """The teacher, in evaluation mode and without gradients.

    Args:
        policy: With its adapter, on its device, without the wrappers of distributed training.
        saved: The teacher's adapter; None: the teacher is the base.

    Raises:
        ModelError: The policy has no adapter or trains the base's own tensors, so that no base would be left; an
            adapter is on the head, which both share; or the teacher's adapter does not fit.
    """
    check_base_is_kept(policy)
    device = next(policy.parameters()).device
    try:
        # PEFT draws an adapter before the saved one takes its place.
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device.index or 0]):
            quantization = quantisation_of(base_of(policy))
            if saved is not None and quantization is not None:
                check_on_quantised(Adaptation(own_method(saved), saved.config), quantization)
            base = clean_base(policy)
            teacher: nn.Module = base if saved is None else continue_adapter(base, saved)
    except PerlError as error:
        raise error.moved(lambda where: WHERE if where.startswith("peft.") else where) from error
    teacher.requires_grad_(False)  # the base's are frozen as it is
    check_head(teacher, "the teacher's adapter", WHERE)
    return teacher.eval()


def check_base_is_kept(policy: nn.Module) -> None:
    """Refuses a policy beside which its base is not there any more, or whose head is not the base's.

    Raises:
        ModelError: Says which.
    """
    if not isinstance(policy, PeftModel):
        raise ModelError("without an adapter the base itself is trained, and no teacher is left", "teacher")
    if any(parameter.requires_grad for _, parameter in base_parameters(policy)):
        raise ModelError("the adapter trains tensors of the base itself, and no teacher is left", "teacher")
    if is_sharded(policy):
        raise ModelError("a base in shards has no teacher", "teacher", "engine.strategy: ddp")
    check_head(policy, "the adapter", "peft")


def teacher_identity(section: TeacherSection, saved: SavedAdapter | None) -> str:
    """SHA-256 of what makes a teacher another one on the same base: its adapter, its hint, its system prompt."""
    facts = ("" if saved is None else adapter_identity(saved), section.hint or "", section.system_prompt or "")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def teacher_settings(section: TeacherSection, saved: SavedAdapter | None) -> dict[str, str]:
    """Who teaches, as a run and its card say it: how, and of an adapter its public name and the SHA-256 of its weights.

    The adapter of another run has that SHA-256 as ``fingerprint.adapter`` in its ``run.json``.
    """
    if saved is None:
        return {"teacher": section.shown}
    digest = sha256_of(saved.weights)
    return {"teacher": section.shown, ADAPTER_NAME: public_adapter(saved.name), "teacher adapter SHA-256": digest}


def adapter_identity(saved: SavedAdapter) -> str:
    """SHA-256 of what makes an adapter another one on the same base: its numbers and the settings that act with them.

    Settings are taken as the file has them, so that a newer PEFT with more of them finds the same.
    """
    written = json.loads((saved.folder / CONFIG).read_text(encoding="utf-8"))
    acting = {key: value for key, value in written.items() if key not in _DO_NOT_ACT}
    for key, value in acting.items():
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            acting[key] = sorted(value)  # names of modules, which PEFT keeps in a set
    return hashlib.sha256(json.dumps((sha256_of(saved.weights), acting), sort_keys=True).encode()).hexdigest()


def is_same(how: Adaptation, policy: SavedAdapter | None, teacher: SavedAdapter | None) -> bool:
    """Whether a policy begins as the teacher is.

    Args:
        how: The policy is adapted.
        policy: The adapter that is continued; None: a new one.
        teacher: The teacher's; None: the base.
    """
    if policy is None or teacher is None:
        return policy is teacher and starts_as_base(how)
    return adapter_identity(policy) == adapter_identity(teacher)


def check_head(model: nn.Module, what: str, where: str) -> None:
    """Refuses an adapter on the head.

    Args:
        model: With the adapter, and perhaps without weights.
        what: The adapter, in words.
        where: Which setting named it.

    Raises:
        ModelError: It is on the head.
    """
    head = base_of(model).get_output_embeddings()
    if isinstance(head, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise ModelError(f"{what} is on the head, which policy and teacher share", where, "leave the head out of it")


def _check_vocabulary(saved: SavedAdapter, tokenizer: Any) -> None:  # noqa: ANN401 (any tokenizer)
    """A tokenizer beside the adapter must give tokens the same numbers."""
    path = saved.folder / "tokenizer.json"
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if tokenizer is None or not path.is_file():
        return
    theirs: dict[str, int] = {}
    # Read as untrusted data; files of some kinds list no tokens so.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if path.stat().st_size <= _LARGEST_VOCABULARY:
            found = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
            theirs = {str(token): int(number) for token, number in found.items()}
    ours = tokenizer.get_vocab()
    differing = sorted(token for token, number in theirs.items() if ours.get(token) != number)
    if differing:
        what = f"{saved.name} was made with another tokenizer: {differing[0]!r} is token {theirs[differing[0]]} there"
        here = ours.get(differing[0])
        raise ModelError(f"{what}, {'none' if here is None else here} here", WHERE, "an adapter of the same base")
