"""Which runs are meant: folders, patterns, and folders of runs, as a study is.

paths -> run folders, each once; a line for what was left out
"""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from perl.errors import Mistake, RunFolderError, did_you_mean, raise_all
from perl.evaluation.found_results import naturally
from perl.run.facts import CARD_FACTS, RUN_FACTS

METRICS = "metrics.jsonl"
# Inside a run; whatever bears facts there is a part of it.
_INSIDE = {"adapter", "best", "checkpoints", "eval", "evals", "earlier", "plots", "model", "critic"}
_DEEPEST = 4
_MOST_NAMED = 3


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """The run folders that are named, match a pattern, or lie below a folder that is named.

    Args:
        paths: Run folders, the output folders of scripts, patterns with ``*``, ``?`` or ``[]``, and folders of runs,
            which are searched four levels deep.

    Returns:
        Folders in the order given, those that were found by their paths with ``r2`` before ``r10``; and a line if
        others of those named are no runs.

    Raises:
        RunFolderError: With a line for each path that is absent or matches nothing; or none of them holds a run.
    """
    if not paths:
        raise RunFolderError("no run is given", hint="name run folders, or a folder of them")
    mistakes: list[Mistake] = []
    found: dict[Path, Path] = {}
    without: list[str] = []
    for path in paths:
        places, mistake = _places(os.fspath(path))
        mistakes += [mistake] if mistake is not None else []
        for place in places:
            runs = _runs_at(place)
            without += [] if runs else [str(place)]
            for run in runs:
                found.setdefault(run.resolve(), run)
    raise_all(RunFolderError, mistakes)
    if not found:
        raise RunFolderError(f"holds no run: no {RUN_FACTS}, {CARD_FACTS} or {METRICS} in it or below it", without[0])
    return list(found.values()), _left_out(without)


def is_any_run(folder: Path) -> bool:
    """Whether a folder is a recipe's run, or a script's."""
    return any((folder / name).is_file() for name in (RUN_FACTS, CARD_FACTS, METRICS))


def _places(text: str) -> tuple[list[Path], Mistake | None]:
    """What a path, or a pattern, stands for; or that it stands for nothing."""
    path = Path(text).expanduser()
    if path.exists():
        return [path], None
    if glob.has_magic(text):
        matched = sorted(glob.glob(str(path)), key=naturally)
        return [Path(one) for one in matched], None if matched else Mistake("matches nothing", text, _nearest(path))
    return [], Mistake("no such folder", text, _nearest(path))


def _nearest(path: Path) -> str:
    """The nearest name beside a path that is absent, or that its folder is."""
    parent = path.parent
    if not parent.is_dir():
        return f"there is no folder {parent}"
    names = sorted(one.name for one in parent.iterdir() if one.is_dir() and not one.name.startswith("."))
    if glob.has_magic(path.name):
        return f"in {parent} are {', '.join(names[:_MOST_NAMED])}" if names else f"{parent} is empty"
    return did_you_mean(path.name, names)


def _runs_at(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    if place.name in _INSIDE and is_any_run(place.parent):
        return [place.parent]
    if is_any_run(place):
        return [place]
    if (place / "plan.json").is_file() and (place / "cells" / "score").is_dir():  # a study; what chose is not compared
        place = place / "cells" / "score"
    return sorted(_below(place, _DEEPEST), key=lambda folder: naturally(str(folder)))


def _below(place: Path, levels: int) -> Iterator[Path]:
    """Runs below a folder; inside a run there are none."""
    try:
        folders = [one for one in place.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        return
    for folder in folders:
        if is_any_run(folder):
            yield folder
        elif levels > 1 and folder.name not in _INSIDE:
            yield from _below(folder, levels - 1)


def _left_out(without: Sequence[str]) -> list[str]:
    if not without:
        return []
    more = f" and {len(without) - _MOST_NAMED} more" if len(without) > _MOST_NAMED else ""
    return [f"Left out, since they hold no run: {', '.join(without[:_MOST_NAMED])}{more}."]
