"""Completions that were drawn to be judged later: what says how, beside their samples.

Results without scores -> predictions.json; the folder -> Results without scores
"""

import json
from dataclasses import replace
from pathlib import Path

from perl.errors import PerlError
from perl.evaluation.earlier import set_file_aside
from perl.evaluation.results import RESULTS, Results, parse_results, read_results
from perl.run.files import write_text

PREDICTIONS = "predictions.json"


def write(drawn: Results, folder: Path) -> Results:
    """Keeps how completions were drawn, beside what is kept of other tasks drawn likewise.

    Args:
        drawn: Tasks without scores.
        folder: Has their samples.
    """
    earlier = _kept(folder)
    if earlier is not None and earlier.of_what()[:-1] != drawn.of_what()[:-1]:  # verdicts are not in it
        set_file_aside(folder / PREDICTIONS, earlier, folder)
    elif earlier is not None:
        names = {task.name for task in drawn.tasks}
        drawn = replace(drawn, tasks=(*drawn.tasks, *(task for task in earlier.tasks if task.name not in names)))
    _write(drawn, folder)
    return drawn


def read(folder: Path) -> Results:
    """What a folder says of its completions, judged or not; tasks that are not judged have no score.

    Raises:
        PerlError: It says nothing.
    """
    waiting = _kept(folder)
    if (folder / RESULTS).is_file():
        scored = read_results(folder / RESULTS)
        if waiting is None or waiting.of_what() != scored.of_what():
            return waiting or scored
        names = {task.name for task in waiting.tasks}
        return replace(waiting, tasks=(*waiting.tasks, *(task for task in scored.tasks if task.name not in names)))
    if waiting is None:
        hint = "perl eval --predict-only draws completions"
        raise PerlError(f"holds neither {RESULTS} nor {PREDICTIONS}", str(folder), hint)
    return waiting


def forget(scored: Results, folder: Path) -> None:
    """Takes away what is said of completions that are judged now."""
    waiting = _kept(folder)
    if waiting is None:
        return
    samples = {key for task in scored.tasks for key in task.samples.values()}
    left = tuple(task for task in waiting.tasks if not samples >= set(task.samples.values()))
    if left:
        _write(replace(waiting, tasks=left), folder)
    else:
        (folder / PREDICTIONS).unlink()


def _write(drawn: Results, folder: Path) -> None:
    write_text(folder / PREDICTIONS, json.dumps({"perl": drawn.facts()}, indent=2, ensure_ascii=False) + "\n")


def _kept(folder: Path) -> Results | None:
    file = folder / PREDICTIONS
    return parse_results(file.read_bytes(), str(file), scored=False) if file.is_file() else None
