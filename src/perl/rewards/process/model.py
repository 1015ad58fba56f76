"""A process reward model: which one, how it is read, and the scores that it gives to steps.

prompt, steps -> a score a step

Imports torch only to look for a model.
"""

import inspect
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perl.errors import Mistake, ModelError, first_line
from perl.recipe.section import Section
from perl.rewards.answers import Completions

_KINDS = {"ForTokenClassification": "token", "ForCausalLM": "causal"}
_WHERE = "process_reward.model"


class ProcessRewardSetting(Section):
    """Which process reward model, how a completion is cut into steps, and how their scores become one number."""

    model: str = Field(min_length=1, description="Hub id, local folder or sandbox:base; weights as safetensors.")
    kind: Literal["auto", "token", "causal"] = Field(
        "auto",
        description="A class for each step, or the next token as in Math-Shepherd; auto: as the model was saved.",
    )
    split: str = Field("\n\n", min_length=1, description="Text between steps; between slashes a regular expression.")
    aggregation: Literal["min", "mean", "last", "product"] = Field("min", description="From step scores to the reward.")
    step_token: str | None = Field(None, min_length=1, description="Follows each step; None: split, or ки if causal.")
    positive: str | int | None = Field(None, description="Right: a class (number, label) or a token; None: 1, or +.")
    negative: str | None = Field(None, min_length=1, description="Wrong: a token, causal only; None: -.")
    device: str = Field("auto", description="As PyTorch names it (cuda:1); auto: an accelerator if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, the checkpoint's type elsewhere."
    )
    batch_size: int = Field(8, ge=1, description="Completions in a forward pass; changes no score.")
    max_length: int | None = Field(
        None, ge=1, description="Most tokens of prompt and steps; None: the model's context."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")


def pattern_of(split: str) -> re.Pattern[str] | None:
    """The regular expression between slashes; None for plain text."""
    return re.compile(split[1:-1]) if len(split) > 2 and split[0] == split[-1] == "/" else None


def read_process_config(setting: ProcessRewardSetting) -> tuple[Any, str]:
    """The model's config and kind, without its weights; one request to the Hub.

    Raises:
        ModelError: The model does not exist, the Hub is unreachable, or the model is of neither kind.
    """
    from transformers import AutoConfig

    from perl.policy.hub_files import look_up
    from perl.policy.model import resolve_model

    name = resolve_model(setting.model)
    answer = None if Path(name).is_dir() else look_up("model", name, setting.revision)
    if isinstance(answer, Mistake):
        raise ModelError(answer.message, _WHERE, answer.hint)
    try:
        config = AutoConfig.from_pretrained(name, revision=setting.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _cannot_load(setting, error) from error
    saved_as = ", ".join(config.architectures or ["no known class"])
    found = [kind for ending, kind in _KINDS.items() if saved_as.endswith(ending)]
    if setting.kind == "auto" and not found:
        message = f"{setting.model} was saved as {saved_as}, not as ...{' or ...'.join(_KINDS)}"
        raise ModelError(message, _WHERE, "set kind if it is one of them")
    return config, found[0] if setting.kind == "auto" else setting.kind


@dataclass(frozen=True)
class ProcessModel:
    """A loaded model; a step's score is the share of the first of ``classes`` in the logits at the tag's last token."""

    model: Any
    tokenizer: Any
    tag: str
    tag_ids: list[int]
    classes: list[int]
    max_length: float
    is_causal: bool

    def scores(self, prompts: Completions, steps: Sequence[Sequence[str]], batch_size: int) -> list[list[float] | None]:
        """A score for each step of each completion; None where a completion is too long."""
        rows = [self._row(prompt, row) if row else ([], []) for prompt, row in zip(prompts, steps, strict=True)]
        scores: list[list[float] | None] = [[] if len(ids) <= self.max_length else None for ids, _ in rows]
        fitting = [n for n, (ids, _) in enumerate(rows) if ids and scores[n] is not None]
        fitting.sort(key=lambda n: len(rows[n][0]))
        for start in range(0, len(fitting), batch_size):
            batch = fitting[start : start + batch_size]
            for n, found in zip(batch, self._read([rows[n] for n in batch]), strict=True):
                scores[n] = found
        return scores

    def _row(self, prompt: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:  # noqa: ANN401 (text, messages)
        """Token ids, and the position of each step's last tag token."""
        chat = not isinstance(prompt, str) and self.tokenizer.chat_template is not None
        if chat:  # a chat template writes the first token itself
            prompt = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
        elif not isinstance(prompt, str):
            prompt = "\n".join(str(message.get("content") or "") for message in prompt)
        if self.is_causal:  # as Math-Shepherd: "question step tag\nstep tag"
            space = "" if chat or not prompt or prompt[-1].isspace() else " "
            pieces = [_ids(self.tokenizer, prompt + space + steps[0], special=not chat)]
            for step in steps[1:]:  # as it is where a tag comes before: alone, SentencePiece would begin with a space
                piece = _ids(self.tokenizer, f"{self.tag}\n{step}")
                tagged = piece[:1] == self.tag_ids
                pieces.append(piece[1:] if tagged else _ids(self.tokenizer, f"\n{step}"))
            ids: list[int] = []
        else:  # as TRL's PRMTrainer: every part by itself, after a first token if there is one
            pieces = [_ids(self.tokenizer, step) for step in steps]
            first = self.tokenizer.bos_token_id
            ids = [] if chat or first is None else [first]
            ids += _ids(self.tokenizer, prompt)
        positions = []
        for piece in pieces:
            ids += piece + self.tag_ids
            positions.append(len(ids) - 1)
        return ids, positions

    def _read(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The scores of a batch, padded on the right."""
        import torch

        device = self.model.device
        longest = max(len(ids) for ids, _ in rows)
        token_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
        read = sorted({position for _, positions in rows for position in positions})
        column = {position: number for number, position in enumerate(read)}
        # The head of a causal model is as wide as its vocabulary: only where a step ends.
        few = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        kept = {"logits_to_keep": torch.tensor(read, device=device)} if few else {}
        with torch.no_grad():
            logits = self.model(input_ids=token_ids, attention_mask=mask, **kept).logits
            logits = (logits if few else logits[:, read])[..., self.classes]
            shares = logits.float().softmax(-1)[..., 0].tolist()
        return [[share[column[p]] for p in positions] for share, (_, positions) in zip(shares, rows, strict=True)]


def load_process_model(setting: ProcessRewardSetting) -> ProcessModel:
    """The model on its device, in evaluation mode, frozen."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

    from perl.policy.model import resolve_model

    config, kind = read_process_config(setting)
    device = _device(setting.device)
    name, options = resolve_model(setting.model), {"revision": setting.revision, "trust_remote_code": False}
    dtype = setting.dtype if setting.dtype != "auto" or device.type != "cpu" else "float32"
    loader = AutoModelForCausalLM if kind == "causal" else AutoModelForTokenClassification
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model, report = loader.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise _cannot_load(setting, error) from error
    if report["missing_keys"]:  # they would be random numbers
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelError(f"{setting.model} has no weights for {missing}", _WHERE, f"it is not a model of kind {kind}")
    model.config.use_cache = False
    tag, classes = _tag_and_classes(setting, kind, model.config, tokenizer)
    return ProcessModel(
        model=model.to(device).requires_grad_(False).eval(),
        tokenizer=tokenizer,
        tag=tag,
        tag_ids=_ids(tokenizer, tag),
        classes=classes,
        max_length=setting.max_length or getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf,
        is_causal=kind == "causal",
    )


def _tag_and_classes(setting: ProcessRewardSetting, kind: str, config: Any, tokenizer: Any) -> tuple[str, list[int]]:  # noqa: ANN401
    """What follows a step, and the logits to compare there, the one for right first."""
    if kind == "causal":
        right = "+" if setting.positive is None else str(setting.positive)
        words = (right, setting.negative or "-", setting.step_token or "ки")
        ids = [_ids(tokenizer, word) for word in words]
        for name, word, found in zip(("positive", "negative", "step_token"), words, ids, strict=True):
            if len(found) != 1 or found == [tokenizer.unk_token_id]:
                raise ModelError(f"{word!r} is not one token of {setting.model}", f"process_reward.{name}")
        return words[2], ids[0] + ids[1]
    tag = setting.step_token or ("\n" if pattern_of(setting.split) else setting.split)
    if not _ids(tokenizer, tag):
        raise ModelError(f"{tag!r} is not a token of {setting.model}", "process_reward.step_token")
    labels = list(range(config.num_labels))
    named = 1 if setting.positive is None else config.label2id.get(setting.positive, setting.positive)
    if named not in labels or len(labels) == 1:
        known = ", ".join(map(str, [*labels, *config.label2id]))
        raise ModelError(
            f"{named!r} is not a class of {setting.model}, or its only one", "process_reward.positive", known
        )
    return tag, [named, *(label for label in labels if label != named)]


def _device(name: str) -> Any:  # noqa: ANN401 (a torch.device)
    import torch

    from perl.run.devices import accelerator

    if name == "auto":  # not the current one, which is another in another thread
        here = accelerator()
        if here is None:
            return torch.device("cpu")
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        name = f"{here.type}:{number}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        raise ModelError(f"no device {name}: {first_line(error)}", "process_reward.device") from error


def _ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:  # noqa: ANN401
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _cannot_load(setting: ProcessRewardSetting, error: Exception) -> ModelError:
    reason = first_line(error)
    hint = "weights must be safetensors, others can run code" if "safetensors" in reason else ""
    return ModelError(f"{setting.model} cannot be loaded: {reason}", _WHERE, hint)
