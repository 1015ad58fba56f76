"""A recipe as a person would write it: every key with a comment.

Draft -> YAML
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from perl.errors import visible
from perl.recipe.engines import TRANSFORMERS, capabilities
from perl.recipe.plain_yaml import PlainDumper
from perl.recipe.quantisations import QUANTISATIONS
from perl.recipe.settings_list import shown_value
from perl.training.draft_sizes import GENERATIONS, Sizes
from perl.training.hardware import GIB, Hardware

_COLUMN = 32
_WIDTH = 118
_Line = tuple[int, str, Any, str]

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""Around the question, where answers are judged."""


@dataclass(frozen=True)
class Draft:
    """What is written.

    Attributes:
        model: The base.
        train: As ``data.train``: name, columns and what else is set.
        held_out: As ``data.eval``; None: there are no other problems than the sandbox's.
        rewards: Names; each counts 1.
        problems: How many there are to train on.
        scored: Whether held-out problems are there to be scored.
        template: As ``data.prompt_template``.
        length: Tokens of the longest completion.
        context: Tokens that the longest prompt leaves of the model's context; None: not known.
        rate: Learning rate.
        steps: Optimizer steps.
        device: That it is for.
        sizes: That fit there.
        plain_bytes: Of the base as it is published.
        rank: Of the LoRA.
    """

    model: str
    train: Mapping[str, Any]
    held_out: Mapping[str, Any] | None
    rewards: tuple[str, ...]
    problems: int
    scored: bool
    template: str | None
    length: int
    context: int | None
    rate: float
    steps: int
    device: Hardware
    sizes: Sizes
    plain_bytes: int
    rank: int


def size_shown(size: float) -> str:
    """Bytes as ``perl plan`` says them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def draft_text(draft: Draft) -> str:
    """The recipe."""
    lines = [line for text in _header(draft) for line in _comment(text)]
    for lines_of in (_model, _peft, _data, _rewards, _train, _rollout, _scores, _engine):
        lines += [_shown(*line) for line in lines_of(draft)]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(f"# {visible(text)}", _WIDTH, subsequent_indent="# ", break_on_hyphens=False)


def _header(draft: Draft) -> Iterator[str]:
    where = "a CPU" if draft.device.on_cpu else f"one {draft.device.name} of {size_shown(draft.device.memory)}"
    yield f"{draft.model} on {draft.train['name']} with LoRA and GRPO, for {where}; begun by `perl new`."
    yield ""
    memory = draft.sizes.memory
    if memory is None:
        yield "What it needs is not estimated for models of this kind; a first step shows it."
    else:
        parts = {"base": memory.weights, "adapter with its optimizer": memory.adapter}
        parts |= {"vLLM": memory.engine, "rollouts": memory.cache}
        shown = ", ".join(f"{name} {size_shown(size)}" for name, size in parts.items() if size)
        yield f"Derived from the model's config: {size_shown(memory.least)} at least ({shown})."
    yield "What it costs elsewhere: `perl plan FILE --gpu NAME`. Every other setting: `perl recipes --settings`."


def _model(draft: Draft) -> Iterator[_Line]:
    yield 0, "model", None, ""
    yield 1, "name", draft.model, "Hub id or folder; loaded once, never written"
    if not draft.device.on_cpu:
        half = "bfloat16" if draft.device.bfloat16 else "float16"
        yield 1, "dtype", half, "of the base; the adapter is float32"
    if draft.sizes.quantization is not None:
        row = QUANTISATIONS[draft.sizes.quantization]
        bits = f"linear layers in {row.bits} bits{', as in QLoRA' if row.bits == 4 else ''}"
        why = f"{bits}, by {row.package.pip}: as published the base takes {size_shown(draft.plain_bytes)}"
        yield 1, "quantization", draft.sizes.quantization, why


def _peft(draft: Draft) -> Iterator[_Line]:
    yield 0, "peft", None, ""
    yield 1, "method", "lora", "`perl methods` lists the others"
    yield 1, "rank", draft.rank, "of the update B A of each linear layer"
    yield 1, "alpha", 2 * draft.rank, "the update is multiplied by alpha / rank"


def _data(draft: Draft) -> Iterator[_Line]:
    yield 0, "data", None, ""
    yield 1, "train", None, ""
    yield from _source(draft.train, f"{draft.problems:,} problems")
    if draft.held_out is not None:
        yield 1, "eval", None, ""
        yield from _source(draft.held_out, "held out: base and adapter are scored on them")
        yield 1, "drop_overlap", True, "what is held out is not trained on"
    elif not draft.scored:
        yield 1, "# eval", "FILE", "problems that are held out, to score base and adapter on"
    if draft.template is not None:
        yield 1, "prompt_template", draft.template, "around each question"


_OF_SOURCE = {
    "subset": "of the data set's configurations",
    "split": "of the data set",
    "revision": "commit, tag or branch",
    "limit": "the first rows only",
}


def _source(source: Mapping[str, Any], what: str) -> Iterator[_Line]:
    yield 2, "name", source["name"], what
    for key, comment in _OF_SOURCE.items():
        if source.get(key) is not None:
            yield 2, key, source[key], comment
    columns = source.get("columns")
    if columns:
        yield 2, "columns", None, ""
        yield 3, "prompt", columns["prompt"], "holds the question"
        gold = columns["answer"]
        yield 3, "answer", gold, "holds the gold answer" if gold else "no gold answers; your reward judges without"


def _rewards(draft: Draft) -> Iterator[_Line]:
    yield 0, "rewards", None, ""
    for name in draft.rewards:
        what = "1 for the gold answer, 0 for another; weight in the sum" if name == "accuracy" else "weight in the sum"
        yield 1, name, 1.0, f"{what}{'; your function' if ':' in name else ''}"


def _train(draft: Draft) -> Iterator[_Line]:
    completions = draft.sizes.prompts * GENERATIONS
    epochs = draft.steps * draft.sizes.prompts / draft.problems
    yield 0, "train", None, ""
    yield 1, "prompts_per_step", draft.sizes.prompts, f"x num_generations = {completions} completions a step"
    yield 1, "num_generations", GENERATIONS, "of each prompt; they are compared with each other"
    yield 1, "max_steps", draft.steps, f"{epochs:.2g} times through the {draft.problems:,} problems"
    yield 1, "learning_rate", draft.rate, "usual for a LoRA on a model of this width"
    yield 1, "lr_scheduler_type", "constant", "or linear, cosine, ..."
    yield 1, "beta", 0.0, "weight of the KL divergence to the base; 0.01 keeps it close"
    if not draft.device.on_cpu and not draft.device.bfloat16:
        yield 1, "fp16", True, f"a {draft.device.name} has no bfloat16; the loss is scaled"
        yield 1, "bf16", False, "see fp16"
    yield 1, "save_steps", max(draft.steps // 10, 1), "between two checkpoints; the same command goes on from one"


def _rollout(draft: Draft) -> Iterator[_Line]:
    yield 0, "rollout", None, ""
    by_vllm = capabilities(draft.sizes.backend).takes_updates
    other = TRANSFORMERS.name if by_vllm else "vllm, where it is installed, is faster for long answers"
    if not draft.device.on_cpu:
        yield 1, "backend", draft.sizes.backend, f"or {other}"
    room = f"; the context has room for {draft.context:,}" if draft.context is not None else ""
    yield 1, "max_completion_length", draft.length, f"tokens; longer ones are cut off{room}"


def _scores(draft: Draft) -> Iterator[_Line]:
    if not draft.scored:
        return
    yield 0, "eval", None, ""
    yield 1, "k", 1, "completions of each held-out problem, by base and adapter"
    yield 1, "limit", 256, "the first held-out problems; null: all"
    yield 1, "batch_size", draft.sizes.prompts * GENERATIONS, "completions written at a time"


def _engine(draft: Draft) -> Iterator[_Line]:
    if draft.device.on_cpu:
        yield 0, "engine", None, ""
        yield 1, "device", "cpu", "auto takes a GPU if there is one"


def _shown(depth: int, key: str, value: object, comment: str) -> str:
    begin = "  " * depth + (f"{key}:" if not comment else f"{key}: {_plain(value)}")
    if not comment:
        return begin
    line = f"{begin.ljust(_COLUMN)}  # {comment}"
    return line if len(line) <= _WIDTH else f"{'  ' * depth}# {comment[0].upper()}{comment[1:]}:\n{begin}"


def _plain(value: object) -> str:
    if isinstance(value, str) and ("\n" in value or "\\" in value or not value.isascii()):
        text = yaml.dump(value, Dumper=PlainDumper, default_style='"', allow_unicode=True, width=float("inf"))
        return text.strip()
    if isinstance(value, float) and 0 < value < 0.01:
        return f"{value:.0e}".replace("e-0", "e-")
    return shown_value(value)
