"""In which settings runs differ, those that a recipe leaves out included.

RunLogs -> key -> text of each run; the keys that are not the same in all

A script has no recipe. What its ``perl_run.json`` says is compared by the names that recipes have for it.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from perl.errors import PerlError
from perl.evaluation.found_results import FoundResults, differing_settings, is_setting, settings_text
from perl.hub.gate.secrets import without_secrets
from perl.methods.registry import METHODS
from perl.methods.settings import resolved_settings
from perl.recipe.sections import PeftSection
from perl.recipe.train_fields import train_fields
from perl.reports.run_log import RunLog, mapping
from perl.run.tables import NOTHING, as_text, flat

SEEDS = ("train.seed", "train.data_seed")
_SEED = 42
"""What the trainer takes where nobody says."""
# Settings of the trainer that change nothing of what is trained.
_NO_EFFECT = re.compile(
    r"train\.(.*_dir|.*_path|hub_.*|run_name|project|report_to|trackio_.*|logging_.*|log_.*|save_.*|disable_tqdm)"
)
# Facts and settings of a script, as recipes call them.
_KEYS = {
    "method": "peft.method",
    "base": "model.name",
    "quantization": "model.quantization",
    "loss": "train.loss_type",
    "ratio_level": "train.importance_sampling_level",
    **{"rank": "peft.rank", "r": "peft.rank", "alpha": "peft.alpha", "lora_alpha": "peft.alpha"},
    **{"dropout": "peft.dropout", "lora_dropout": "peft.dropout", "target_modules": "peft.target_modules"},
    "learning rate": "train.learning_rate",
    "KL coefficient (beta)": "train.beta",
    "completions a prompt": "train.num_generations",
    "optimizer": "train.optim",
}
_FACTS = ("method", "base", "quantization", "algorithm", "loss", "ratio_level")


def settings_of(runs: Sequence[RunLog]) -> list[dict[str, str]]:
    """Every setting of each run, by the keys of recipes; those that a recipe leaves out as the trainer takes them."""
    columns = [_script(run) if run.is_script else _recipe(run) for run in runs]
    keys = {key for column in columns for key in column if key.startswith("train.")}
    for run, column in zip(runs, columns, strict=True):
        if not run.is_script and column:
            column |= {key: text for key in keys - column.keys() if (text := _usual(key, column)) is not None}
    return columns


def seed_of(run: RunLog) -> int:
    """The seed of a run's training."""
    known = run.facts.get("seed", mapping(run.settings.get("train")).get("seed"))
    return known if isinstance(known, int) else _SEED


def differing_of(runs: Sequence[RunLog], columns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of each run the settings that are not the same in all, the most telling ones first.

    Of recipes beside scripts those are compared that both know.

    Args:
        runs: Finished or not.
        columns: As of :func:`settings_of`.
    """
    known = [column for column in columns if column]
    if len({run.is_script for run in runs}) > 1:
        common = set.intersection(*(set(column) for column in known)) if known else set()
        columns = [{key: text for key, text in column.items() if key in common} for column in columns]
    return differing_settings([FoundResults(run.path, settings=c) for run, c in zip(runs, columns, strict=True)])


def identity_of(column: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What two runs have in common that differ in nothing but their seeds; a setting at nothing is none."""
    return tuple(sorted((key, text) for key, text in column.items() if key not in SEEDS and text not in NOTHING))


def what_differs(settings: Mapping[str, str], *, seed: bool = True) -> str:
    """``dora lr 1e-3 seed 1``: settings by short names.

    Args:
        settings: As of :func:`differing_of`.
        seed: Whether to name seeds.
    """
    return settings_text({key: text for key, text in settings.items() if seed or key not in SEEDS})


def _recipe(run: RunLog) -> dict[str, str]:
    """As it was saved."""
    if not run.settings:
        return {}
    sections: dict[str, Any] = dict(without_secrets(run.settings))
    sections["peft"] = _resolved(sections.get("peft"))
    settings = flat(sections).items()
    found = {key: _plain(text) for key, text in settings if is_setting(key) and not _NO_EFFECT.fullmatch(key)}
    return found | {"train.seed": str(seed_of(run))}


def _resolved(peft: Any) -> Any:  # noqa: ANN401 (YAML)
    """The method with the numbers that it has where a recipe leaves them out."""
    with contextlib.suppress(PerlError, ValidationError, TypeError):
        usual = resolved_settings(PeftSection.model_validate(peft))
        return {**peft, **{key: value for key, value in usual.items() if peft.get(key) is None}}
    return peft


def _script(run: RunLog) -> dict[str, str]:
    known = {name: run.facts[name] for name in _FACTS if run.facts.get(name) is not None}
    known |= without_secrets(mapping(run.facts.get("settings")))
    found = {_KEYS.get(str(name), str(name)): _plain(as_text(value)) for name, value in known.items()}
    return found | {"train.seed": str(seed_of(run))} if found else {}


def _usual(key: str, column: Mapping[str, str]) -> str | None:
    """What the trainer takes for a key of ``train`` that a recipe leaves out; None: it depends, or is unknown."""
    if key == "train.learning_rate":
        method = METHODS.get(column.get("peft.method", ""))
        return as_text(method.learning_rate) if method is not None else None
    field = train_fields().get(key.removeprefix("train."))
    return None if field is None or field.computed else as_text(field.default)


def _plain(text: str) -> str:
    """A list without brackets and quotes, as scripts write one."""
    return text[1:-1].replace("'", "") if text.startswith("[") and text.endswith("]") and text != "[]" else text
