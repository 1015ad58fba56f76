"""A recipe as a person would write it: a comment for each key.

values, comments -> YAML
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from perl.errors import visible
from perl.recipe.plain_yaml import PlainDumper
from perl.recipe.settings_list import shown_value

_COLUMN, _WIDTH = 32, 118
_COMMENTS = {
    "model.name": "Hub id or folder; loaded once, never written",
    "model.dtype": "of the base; the adapter is float32",
    "peft.method": "`perl methods` lists the others",
    "peft.rank": "of the update B A of each linear layer",
    "peft.alpha": "the update is multiplied by alpha / rank",
    "data.eval.name": "held out: base and adapter are scored on them",
    "data.drop_overlap": "what is held out is not trained on",
    "data.prompt_template": "around each question",
    "subset": "of the data set's configurations",
    "split": "of the data set",
    "revision": "commit, tag or branch",
    "limit": "the first rows only",
    "prompt": "holds the question",
    "answer": "holds the gold answer; null: your reward judges without",
    "rewards": "weight in the sum",
    "train.num_generations": "of each prompt; they are compared with each other",
    "train.learning_rate": "usual for a LoRA on a model of this width",
    "train.lr_scheduler_type": "or linear, cosine, ...",
    "train.beta": "weight of the KL divergence to the base; 0.01 keeps it close",
    "train.fp16": "this GPU has no bfloat16; the loss is scaled",
    "train.bf16": "see fp16",
    "train.save_steps": "between two checkpoints; the same command goes on from one",
    "rollout.backend": "transformers, or vllm where it is installed: faster for long answers",
    "eval.enabled": "there are no gold answers to score with",
    "eval.k": "completions of each held-out problem, by base and adapter",
    "eval.limit": "the first held-out problems; null: all",
    "eval.batch_size": "completions written at a time",
    "engine.device": "auto takes a GPU if there is one",
}


def recipe_text(values: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """The file.

    Args:
        values: The recipe.
        notes: What is said of keys in this recipe, by ``section.key``; of "" the head.
    """
    lines = []
    for paragraph in notes[""].splitlines():
        lines += textwrap.wrap(f"# {visible(paragraph)}", _WIDTH, subsequent_indent="# ") or ["#"]
    for section, inside in values.items():
        lines += ["", f"{section}:", *_lines(inside, (section,), {**_COMMENTS, **notes})]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], above: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(above)
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, (*above, key), comments)
            continue
        names = (".".join((*above, key)), *((key,) if above[0] == "data" else above[:1]))
        comment = next((comments[name] for name in names if name in comments), "")
        begin = f"{indent}{key}: {_plain(value)}"
        line = f"{begin.ljust(_COLUMN)}  # {comment}"
        if comment and len(line) > _WIDTH:
            yield f"{indent}# {comment}:"
        yield line if comment and len(line) <= _WIDTH else begin


def _plain(value: object) -> str:
    if isinstance(value, str) and ("\n" in value or "\\" in value or not value.isascii()):
        text = yaml.dump(value, Dumper=PlainDumper, default_style='"', allow_unicode=True, width=float("inf"))
        return text.strip()
    if isinstance(value, float) and 0 < value < 0.01:
        return f"{value:.0e}".replace("e-0", "e-")
    return shown_value(value)
