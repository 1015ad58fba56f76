"""The files of a published adapter that its card is made of, each read as what it is and no more.

name in the repository -> bytes -> config, recipe, results, log, remarks of the weights

The files are untrusted.
"""

import io
import json
import math
import tempfile
from collections.abc import Mapping
from enum import EnumType
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from peft import PeftConfig
from transformers import TrainingArguments

from perl.algorithms.registry import loss_mistakes
from perl.errors import Mistake, PerlError, RecipeError, first_line
from perl.evaluation.scoring.results import RESULTS, Results, parse_results
from perl.methods.settings import method_mistakes
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.config import read_config
from perl.recipe import Recipe, load_recipe
from perl.recipe.plain_yaml import plain_value, refuse_tags
from perl.rewards import NAMED_REWARDS, reward_mistakes
from perl.run.logs import log_rows

CARD, PUBLIC_RECIPE, METRICS, SCORES = "README.md", "perl_recipe.yaml", "metrics.jsonl", f"eval/{RESULTS}"
"""What files of a published adapter are called."""
_LARGEST_HEADER = 32_000_000  # bytes, of weights

Row = TypeVar("Row")
Files = Mapping[str, bytes | Path | None]
"""Name in the repository -> its content, or the file that holds it; None: it is there and was not read."""


def content_of(files: Files, name: str) -> bytes | None:
    """A file's bytes; None: it is not there, or was not read."""
    held = files.get(name)
    return held.read_bytes() if isinstance(held, Path) else held


def config_in(files: Files) -> PeftConfig | None:
    """The adapter's config; None: there is none.

    Raises:
        PerlError: It is not a config of PEFT.
    """
    content = content_of(files, CONFIG)
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_bytes(content)
        try:
            return read_config(Path(folder))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)[:100]}"
            raise PerlError(f"is not a config of PEFT: {reason}", CONFIG) from None


def public_recipe_in(files: Files) -> Recipe | None:
    """The recipe; None: there is none.

    Raises:
        PerlError: It does not stand alone.
    """
    content = content_of(files, PUBLIC_RECIPE)
    if content is None:
        return None
    try:
        text = content.decode("utf-8")
        refuse_tags(text, PUBLIC_RECIPE)
        values = plain_value(text)
        if not isinstance(values, dict) or "extends" in values or not all(isinstance(key, str) for key in values):
            raise PerlError("is not a recipe that stands alone", PUBLIC_RECIPE, "perl push writes one")
        return load_recipe(values, checks=(loss_mistakes, method_mistakes, _word_mistakes, _named_reward_mistakes))
    except RecipeError as error:
        problem = error.mistakes[0]
        raise PerlError(f"{problem.where}: {problem.message}", PUBLIC_RECIPE, problem.hint) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)[:100]}"
        raise PerlError(f"is not plain YAML: {reason}", PUBLIC_RECIPE) from None


def _word_mistakes(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mistake]]:
    """Arguments that are one of transformers' words, and are another."""
    kinds = {name: next(iter(get_args(kind)), kind) for name, kind in get_type_hints(TrainingArguments).items()}
    asked = {name: value for name, value in sections.get("train", {}).items() if isinstance(kinds.get(name), EnumType)}
    wrong = [name for name, value in asked.items() if value not in {word.value for word in kinds[name]}]
    return [(("train", name), Mistake(f"{asked[name]!r:.80} is none of transformers' words")) for name in wrong]


def _named_reward_mistakes(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mistake]]:
    """Of rewards that come with this package; others are code, which is not imported."""
    named = {name: setting for name, setting in sections.get("rewards", {}).items() if name in NAMED_REWARDS}
    return reward_mistakes({**sections, "rewards": named, "train": {}})


def results_in(files: Files) -> Results | None:
    """The scores; None: there are none.

    Raises:
        PerlError: They were not written by ``perl eval``.
    """
    content = content_of(files, SCORES)
    return parse_results(content, SCORES) if content is not None else None


def log_in(files: Files, step: int | None = None) -> list[dict[str, Any]]:
    """What was logged, up to a step; what is no row of a log is left out."""
    rows = log_rows((content_of(files, METRICS) or b"").decode("utf-8", errors="replace"))
    return [row for row in rows if step is None or (row.get("step") or 0) <= step]


def header_in(files: Files) -> tuple[dict[str, Any], int | None]:
    """The remarks in the header of the weights and how many numbers they are; nothing where they were not read.

    Raises:
        PerlError: They are not safetensors.
    """
    held = files.get(WEIGHTS)
    if held is None:
        return {}, None
    try:
        with io.BytesIO(held) if isinstance(held, bytes) else held.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _LARGEST_HEADER:
                raise ValueError(f"its header has {size:,} bytes")
            header = json.loads(file.read(size))
        remarks = dict(header.pop("__metadata__", None) or {})
        return remarks, sum(math.prod(tensor["shape"]) for tensor in header.values())
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise PerlError(f"is not safetensors: {type(error).__name__}", WEIGHTS) from None


def evenly(rows: list[Row], most: int) -> list[Row]:
    """At most so many rows, evenly apart, the first and the last among them."""
    return rows if len(rows) <= most else [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]
