"""Which runs are compared: folders, patterns, and folders of runs, as a study is; and in which settings they differ.

paths -> RunLogs, each once; a line for what was left out
"""

import contextlib
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perl.algorithms.train_fields import train_fields
from perl.errors import Mistake, PerlError, RunFolderError, did_you_mean, raise_all
from perl.evaluation.scoring.found_results import FoundResults, differing_settings, is_setting, naturally, settings_text
from perl.evaluation.scoring.results import RESULTS, read_results
from perl.hub.gate import without_secrets
from perl.methods.registry import METHODS
from perl.methods.settings import resolved_settings
from perl.recipe.sections import PeftSection
from perl.reports.comparison.measure import of_another
from perl.reports.run_log import METRICS, RunLog, mapping, read_run
from perl.run.facts import CARD_FACTS, RUN_FACTS
from perl.run.tables import NOTHING, as_text, flat

# Inside a run; whatever bears facts there is a part of it.
_INSIDE = {"adapter", "best", "checkpoints", "eval", "evals", "earlier", "plots", "model", "critic"}
_DEEPEST = 4
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


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """The run folders that are named, match a pattern, or lie below a folder that is named.

    Args:
        paths: Run folders, the output folders of scripts, patterns with ``*``, ``?`` or ``[]``, and folders of runs,
            which are searched four levels deep.

    Returns:
        Folders in the order given, those that were found by their paths with ``r2`` before ``r10``; and a line for each
        path that holds no run.

    Raises:
        RunFolderError: With a line for each path that is absent or matches nothing; or none of them holds a run.
    """
    mistakes: list[Mistake] = []
    found: dict[Path, Path] = {}
    without: list[str] = []
    for path in (os.path.expanduser(one) for one in paths):
        matched = [path] if os.path.exists(path) else sorted(glob.glob(path), key=naturally)
        if not matched:
            what, beside = "matches nothing" if glob.has_magic(path) else "no such folder", Path(path).parent
            names = [one.name for one in beside.iterdir() if one.is_dir()] if beside.is_dir() else []
            hint = did_you_mean(Path(path).name, names) if beside.is_dir() else f"there is no folder {beside}"
            mistakes.append(Mistake(what, path, hint))
        for place in matched:
            runs = _runs_at(Path(place))
            without += [] if runs else [place]
            for run in runs:
                found.setdefault(run.resolve(), run)
    raise_all(RunFolderError, mistakes)
    if not found:
        what = f"holds no run: no {RUN_FACTS}, {CARD_FACTS} or {METRICS} in it or below it"
        raise RunFolderError(what, without[0] if without else "")
    return list(found.values()), [f"Left out, it holds no run: {place}." for place in without]


def read_logs(folders: Sequence[Path]) -> tuple[list[RunLog], list[str]]:
    """Runs that can be read, and a line for each that cannot.

    Raises:
        RunFolderError: None can.
    """
    logs: list[RunLog] = []
    errors: list[RunFolderError] = []
    for folder in folders:
        try:
            log = read_run(folder, begun=False)
        except RunFolderError as error:
            errors.append(error)
            continue
        # One that was not scored at its end has the scores of ``perl eval``.
        files = [] if (folder / "eval" / RESULTS).exists() else sorted((folder / "evals").glob(f"*/{RESULTS}"))
        for file in files:
            with contextlib.suppress(PerlError):
                results = read_results(file)
                if of_another(log, results) is None:
                    log = replace(log, results=results)
                    break
        logs.append(log)
    if not logs:
        raise errors[0]
    return logs, [f"Left out: {error.mistakes[0]}." for error in errors]


def _is_run(folder: Path) -> bool:
    """Whether a folder is a recipe's run, or a script's."""
    return any((folder / name).is_file() for name in (RUN_FACTS, CARD_FACTS, METRICS))


def _runs_at(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    if place.name in _INSIDE and _is_run(place.parent):
        return [place.parent]
    if _is_run(place):
        return [place]
    if (place / "plan.json").is_file() and (place / "cells" / "score").is_dir():  # a study; what chose is not compared
        place = place / "cells" / "score"
    return sorted(_below(place, _DEEPEST), key=lambda folder: naturally(str(folder)))


def _below(place: Path, levels: int) -> Iterator[Path]:
    """Runs below a folder; inside a run there are none."""
    with contextlib.suppress(OSError):
        for folder in place.iterdir():
            if not folder.is_dir() or folder.name.startswith("."):
                continue
            if _is_run(folder):
                yield folder
            elif levels > 1 and folder.name not in _INSIDE:
                yield from _below(folder, levels - 1)


def settings_of(runs: Sequence[RunLog]) -> list[dict[str, str]]:
    """Every setting of each run, by the keys of recipes; those that a recipe leaves out as the trainer takes them."""
    columns = [_settings(run) for run in runs]
    keys = {key for column in columns for key in column if key.startswith("train.")}
    for run, column in zip(runs, columns, strict=True):
        method = METHODS.get(column.get("peft.method", ""))
        for key in keys - column.keys() if column and not run.is_script else ():
            field = train_fields().get(key.removeprefix("train."))
            if key == "train.learning_rate" and method is not None:
                column[key] = as_text(method.learning_rate)
            elif key != "train.learning_rate" and field is not None and not field.computed:
                column[key] = as_text(field.default)
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


def _settings(run: RunLog) -> dict[str, str]:
    """As they were saved; of a recipe the method with the numbers that it has where these are left out."""
    if run.is_script:
        known = {name: run.facts[name] for name in _FACTS if run.facts.get(name) is not None}
        known |= without_secrets(mapping(run.facts.get("settings")))
        found = {_KEYS.get(str(name), str(name)): _plain(as_text(value)) for name, value in known.items()}
        return found | {"train.seed": str(seed_of(run))} if found else {}
    if not run.settings:
        return {}
    sections: dict[str, Any] = dict(without_secrets(run.settings))
    with contextlib.suppress(PerlError, ValidationError, TypeError):
        peft: Any = sections.get("peft")
        usual = resolved_settings(PeftSection.model_validate(peft))
        sections["peft"] = {**peft, **{key: value for key, value in usual.items() if peft.get(key) is None}}
    settings = flat(sections).items()
    found = {key: _plain(text) for key, text in settings if is_setting(key) and not _NO_EFFECT.fullmatch(key)}
    return found | {"train.seed": str(seed_of(run))}


def _plain(text: str) -> str:
    """A list without brackets and quotes, as scripts write one."""
    return text[1:-1].replace("'", "") if text.startswith("[") and text.endswith("]") and text != "[]" else text
