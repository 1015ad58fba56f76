"""Which runs are compared: folders, patterns, and folders of runs, as a study is.

paths -> RunLogs, each once; a line for what was left out
"""

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from perl.errors import Mistake, PerlError, RunFolderError, did_you_mean, raise_all
from perl.evaluation.found_results import naturally
from perl.evaluation.results import RESULTS, read_results
from perl.reports.comparison.measure import of_another
from perl.reports.run_log import METRICS, RunLog, read_run
from perl.run.facts import CARD_FACTS, RUN_FACTS

# Inside a run; whatever bears facts there is a part of it.
_INSIDE = {"adapter", "best", "checkpoints", "eval", "evals", "earlier", "plots", "model", "critic"}
_DEEPEST = 4


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
            what = "matches nothing" if glob.has_magic(path) else "no such folder"
            mistakes.append(Mistake(what, path, _nearest(Path(path))))
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
            logs.append(_read(folder))
        except RunFolderError as error:
            errors.append(error)
    if not logs:
        raise errors[0]
    return logs, [f"Left out: {error.mistakes[0]}." for error in errors]


def _read(folder: Path) -> RunLog:
    """A run, begun or not; one that was not scored at its end with the scores of ``perl eval``."""
    log = read_run(folder, begun=False)
    if not (folder / "eval" / RESULTS).exists():
        for file in sorted((folder / "evals").glob(f"*/{RESULTS}")):
            with contextlib.suppress(PerlError):
                results = read_results(file)
                if of_another(log, results) is None:
                    return replace(log, results=results)
    return log


def _is_run(folder: Path) -> bool:
    """Whether a folder is a recipe's run, or a script's."""
    return any((folder / name).is_file() for name in (RUN_FACTS, CARD_FACTS, METRICS))


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return did_you_mean(path.name, [one.name for one in path.parent.iterdir() if one.is_dir()])


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
