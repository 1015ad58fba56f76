"""What verl trained, put on the base as the recipe's adapter.

base, recipe, a step's checkpoint -> policy, or why it is not this recipe's on this base
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import PreTrainedModel

from perl.errors import ModelError, RunFolderError
from perl.launch.verl.found_job import FoundJob
from perl.launch.verl.shards import files_of, inside, read_shards
from perl.launch.verl.stored import Part
from perl.methods.names import name_in_base
from perl.methods.settings import adaptation, continued_adaptation
from perl.policy.attach import adapter_tensors, attach_adapter, continue_adapter, load_adapter_tensors, own_method
from perl.policy.model import base_parameters, is_the_base
from perl.policy.saved.adapter import CONFIG, WEIGHTS, find_adapter
from perl.run.files import parse_mapping, read_regular

_META = "lora_train_meta.json"
# Where Megatron's checkpoint has the adapter in PEFT's form, if the weights were saved for Hugging Face too.
_OF_MEGATRON = Path("model", "huggingface", "adapter")
_ADAPTERS = re.compile(r"\blora_")
_SECOND_FACTOR = re.compile(r"\blora_(embedding_)?B\b")
_NAME_OF_ADAPTER = ".default"


@dataclass(frozen=True)
class Trained:
    """A policy that verl trained.

    Attributes:
        policy: The base with the adapter, whose numbers are those of the checkpoint.
        processes: How many wrote the checkpoint; None: it does not say.
        compared: Tensors of the base that the checkpoint holds too, each the same as here.
    """

    policy: PeftModel
    processes: int | None
    compared: int


def check_present(job: FoundJob, actor: Path) -> int | None:
    """Refuses a checkpoint of which files are absent, before a model is loaded.

    Args:
        job: The job.
        actor: Folder of the step's policy.

    Returns:
        How many processes wrote it; None: it does not say.

    Raises:
        RunFolderError: A file is absent, or lies elsewhere.
    """
    _check_meta(job, actor)
    if job.sent.strategy != "megatron":
        return len(files_of(actor, job.path))
    folder = inside(actor / _OF_MEGATRON, job.path)
    if not all(inside(folder / name, job.path).is_file() for name in (CONFIG, WEIGHTS)):
        hint = "let verl save it: actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
        raise RunFolderError(f"holds no adapter that PEFT loads: {_OF_MEGATRON / CONFIG} is absent", str(actor), hint)
    return None


def load_trained(job: FoundJob, actor: Path, model: PreTrainedModel) -> Trained:
    """Puts what verl trained on the base.

    Args:
        job: The job.
        actor: Folder of the step's policy, of which :func:`check_present` has found all files.
        model: The base, in any type.

    Raises:
        ModelError: The base is another than the job's, or the checkpoint holds another adapter than the recipe makes,
            one that is not trained, or numbers that are none.
        RunFolderError: A file cannot be read.
    """
    check_base(job, model)
    policy = _as_begun(job, model)
    begun = adapter_tensors(policy)
    if job.sent.strategy == "megatron":
        found, compared = _of_megatron(job, inside(actor / _OF_MEGATRON, job.path), begun), 0
    else:
        look = _BaseComparison(dict(base_parameters(policy)), actor)
        found, compared = (
            read_shards(actor, job.path, lambda n: n in begun or bool(_ADAPTERS.search(n)), look),
            look.count,
        )
    _check_names(found, begun, actor)
    _check_numbers(found, begun, actor)
    _check_scale(job, policy, actor)
    load_adapter_tensors(policy, found)
    return Trained(policy.eval(), check_present(job, actor), compared)


def check_base(job: FoundJob, model: PreTrainedModel) -> None:
    """The base must be the one that the job was made for.

    Raises:
        ModelError: It has other weights.
    """
    sent = job.sent
    if sent.base_fingerprint is not None and not is_the_base(model, sent.base_fingerprint, sent.base_dtype):
        what = f"the job was made for other weights of {sent.base} (SHA-256 {sent.base_fingerprint[:12]})"
        raise ModelError(what, "model.name", "load the revision that the job's recipe names")


def _as_begun(job: FoundJob, model: PreTrainedModel) -> PeftModel:
    """The policy as the recipe begins it."""
    peft = job.recipe.peft
    if job.begins_from is None:
        return attach_adapter(model, adaptation(peft))
    saved = find_adapter(job.begins_from)
    return continue_adapter(model, saved, continued_adaptation(peft, saved.config, own_method(saved)))


class _BaseComparison:
    """Compares each of the base's tensors in a checkpoint with the base that is here.

    Attributes:
        count: Tensors, or parts of them, that were compared.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], actor: Path) -> None:
        """Takes the base's parameters by their names without an adapter."""
        self._base, self._actor, self._names = base, actor, set[str]()

    def __call__(self, name: str, part: Part) -> None:
        """Compares a part; one that this version of transformers calls otherwise is not looked at.

        Raises:
            ModelError: It differs.
        """
        ours = self._base.get(name_in_base(name))
        if ours is None:
            return
        shown = f"the checkpoint has another base: {name_in_base(name)}"
        if tuple(ours.shape) != part.shape:
            raise ModelError(f"{shown} is {_shape(part.shape)} there, {_shape(ours.shape)} here", str(self._actor))
        here = ours.detach()[tuple(slice(*bound) for bound in part.bounds)]
        # Each may be rounded from the other: numbers of float32 and the same ones in half precision.
        smaller = min((here.dtype, part.values.dtype), key=lambda dtype: dtype.itemsize)
        if not torch.equal(here.to(smaller), part.values.to(smaller)):
            raise ModelError(f"{shown} differs from that of the recipe's model", str(self._actor))
        self._names.add(name)

    @property
    def count(self) -> int:
        """Tensors that were compared."""
        return len(self._names)


def _of_megatron(job: FoundJob, folder: Path, begun: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter that Megatron's checkpoint holds in PEFT's form, by the names that the policy has for it."""
    saved = find_adapter(str(folder))
    config: Any = saved.config
    if type(config).__name__ != "LoraConfig" or config.use_dora:
        raise ModelError("is not a LoRA", str(folder / CONFIG))
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    if job.sent.verl_alpha is not None and not _same_scale(scale, job.sent.verl_alpha / job.sent.rank):
        what = f"lora_alpha {config.lora_alpha:g} of rank {config.r}, verl was to have {job.sent.verl_alpha:g} of rank"
        raise ModelError(f"{what} {job.sent.rank}", str(folder / CONFIG))
    tensors = load_file(saved.weights)
    own = {name.replace(_NAME_OF_ADAPTER, "", 1): name for name in begun}
    return {own.get(name, name): tensor for name, tensor in tensors.items()}


def _check_names(found: Mapping[str, torch.Tensor], begun: Mapping[str, torch.Tensor], actor: Path) -> None:
    """Names and shapes must be those of the recipe's adapter."""
    lacking = [name for name in begun if name not in found]
    if lacking:
        what = f"of {len(begun)} tensors of the recipe's adapter {len(lacking)} are absent: {lacking[0]}"
        raise ModelError(what, str(actor), "was verl to train other target modules, or no LoRA?")
    further = [name for name in found if name not in begun]
    if further:
        what = f"holds {len(further)} tensors that the recipe's adapter has not: {further[0]:.200}"
        raise ModelError(what, str(actor), "was verl to train other target modules?")
    for name, tensor in begun.items():
        if tensor.shape != found[name].shape:
            what = f"{name} is {_shape(found[name].shape)} there, the recipe makes it {_shape(tensor.shape)}"
            raise ModelError(what, str(actor), "another rank?")


def _check_numbers(found: Mapping[str, torch.Tensor], begun: Mapping[str, torch.Tensor], actor: Path) -> None:
    """Numbers must be finite, and some have moved."""
    for name, tensor in found.items():
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            what = f"{wrong:,} of {tensor.numel():,} numbers of {name} are non-finite"
            raise ModelError(what, str(actor), "import an earlier step")
    # The second factor of a new LoRA is 0, that of one that is continued what it was.
    moving = [name for name in begun if _SECOND_FACTOR.search(name)]
    if moving and all(torch.equal(begun[name], found[name].to(begun[name].dtype)) for name in moving):
        what = "nothing was trained: every lora_B is as it began"
        raise ModelError(what, str(actor), "look at the rewards in verl's log: were all of a group's alike?")


def _check_scale(job: FoundJob, policy: PeftModel, actor: Path) -> None:
    """The recipe's adapter must have the scale that verl trained with; of rsLoRA it is alpha / sqrt(rank)."""
    if job.sent.verl_alpha is None:
        return
    trained = job.sent.verl_alpha / job.sent.rank
    for layer in policy.modules():
        if isinstance(layer, LoraLayer) and not _same_scale(layer.scaling[policy.active_adapter], trained):
            here = layer.scaling[policy.active_adapter]
            raise ModelError(f"verl trained at the scale {trained:g}, the recipe's adapter has {here:g}", str(actor))


def _check_meta(job: FoundJob, actor: Path) -> None:
    """Rank and alpha that the checkpoint names, whose alpha verl cuts to a whole number."""
    file = inside(actor / _META, job.path)
    if not file.is_file():
        return
    try:
        said = parse_mapping(read_regular(file))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(file)) from None
    expected = {"r": job.sent.rank}
    if job.sent.verl_alpha is not None:
        expected["lora_alpha"] = int(job.sent.verl_alpha)
    for name, value in expected.items():
        if name in said and said[name] != value:
            raise ModelError(f"{name} is {said[name]!r:.40}, the job was sent with {value}", str(file))


def _same_scale(one: float, other: float) -> bool:
    """Whether two scales are the same number where they are used: in float32."""
    return bool(torch.tensor(one, dtype=torch.float32) == torch.tensor(other, dtype=torch.float32))


def _shape(shape: tuple[int, ...] | torch.Size) -> str:
    return " x ".join(str(size) for size in shape)
