"""The files of an evaluation's folder: results beside those that belong to them, others set aside, nothing overwritten.

Results, folder -> results.json, or predictions.json of completions that are judged later; folder/earlier

Samples stay where they are: their file holds every policy's.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from perl.errors import PerlError, RunFolderError
from perl.evaluation.results import FIGURE, RESULTS, TABLE, Results, parse_results, read_results
from perl.run.files import write_text
from perl.run.warned import warn

logger = logging.getLogger("perl")

EARLIER = "earlier"
PREDICTIONS = "predictions.json"
"""Says how completions were drawn that are not judged yet."""
_DIGITS = 8
_PARTS = ("policy", "protocol", "engine", "verifier")


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """What the main process finds wrong with the output folder inside is told in a line.

    Raises:
        RunFolderError: It cannot be written, or another process evaluates there.
    """
    hint = "choose another with --output"
    try:
        yield
    except Timeout:
        raise RunFolderError("another process is evaluating here", str(folder), hint) from None
    except OSError as error:  # a file of that name, no permission, no such disk
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise RunFolderError(f"cannot be written: {reason}", str(folder), hint) from None


def beside_earlier(new: Results, folder: Path) -> Results:
    """Results with the other tasks that a folder has of the same policies, protocol, engine and verifier.

    What the folder has of others, or of these tasks asked otherwise, is set aside.

    Args:
        new: Will be written into the folder.
        folder: May hold results.
    """
    if not (folder / RESULTS).is_file():
        return new
    files = (RESULTS, TABLE, FIGURE)
    try:
        old = read_results(folder / RESULTS)
    except PerlError as error:
        warn("PRL303", "%s; it is kept in %s", error.mistakes[0], set_aside(folder, files, "unreadable"))
        return new
    hashes = {task.name: task.protocol_hash for task in new.tasks}
    otherwise = [t.name for t in old.tasks if hashes.get(t.name, t.protocol_hash) != t.protocol_hash]
    other = _other_parts(old, new)
    if other or otherwise:
        place = set_aside(folder, files, str(old.subject.get("policy"))[:_DIGITS])
        reason = f"of another {other[0]}" if other else f"those of {otherwise[0]} asked otherwise"
        logger.info("%s: the results there are %s; they are kept in %s", folder, reason, place)
    return new if other else new.with_tasks_of(old)


def set_aside(folder: Path, files: Sequence[str], name: str) -> Path:
    """Moves files of a folder into ``earlier/NAME-DIGITS`` there, the digits being of what the first one says.

    Args:
        folder: Has the first of them.
        files: Their names.
        name: Of what they are.
    """
    digest = hashlib.sha256((folder / files[0]).read_bytes()).hexdigest()[:_DIGITS]
    place = folder / EARLIER / f"{name}-{digest}"
    place.mkdir(parents=True, exist_ok=True)
    for file in files:
        if (folder / file).is_file():
            os.replace(folder / file, place / file)
    return place


def write_table(text: str, folder: Path) -> None:
    """Writes the table of several adapters; one that is there and says something else is set aside."""
    file = folder / TABLE
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") != text:
        place = set_aside(folder, [TABLE], "table")
        logger.info("%s: the table there is of another call; it is kept in %s", folder, place)
    write_text(file, text)


def write_predictions(drawn: Results, folder: Path) -> Results:
    """Keeps how completions were drawn, beside what is kept of other tasks drawn likewise.

    Args:
        drawn: Tasks without scores.
        folder: Has their samples.
    """
    old = _predictions(folder)
    if old is not None and _other_parts(old, drawn):
        place = set_aside(folder, [PREDICTIONS], str(old.subject.get("policy"))[:_DIGITS])
        logger.info("%s: %s there is of another evaluation; it is kept in %s", folder, PREDICTIONS, place)
    elif old is not None:
        drawn = drawn.with_tasks_of(old)
    write_text(folder / PREDICTIONS, json.dumps({"perl": drawn.facts()}, indent=2, ensure_ascii=False) + "\n")
    return drawn


def read_drawn(folder: Path) -> Results:
    """What a folder says of its completions: of those that are to be judged, else of those that are judged.

    Raises:
        PerlError: It says nothing.
    """
    waiting = _predictions(folder)
    if waiting is None and not (folder / RESULTS).is_file():
        hint = "perl eval --predict-only draws completions"
        raise PerlError(f"holds neither {RESULTS} nor {PREDICTIONS}", str(folder), hint)
    return waiting or read_results(folder / RESULTS)


def forget_predictions(scored: Results, folder: Path) -> None:
    """Takes away what is said of completions that are all judged now."""
    waiting = _predictions(folder)
    if waiting is not None and _sample_keys(waiting) <= _sample_keys(scored):
        (folder / PREDICTIONS).unlink()


def _sample_keys(results: Results) -> set[str]:
    return {key for task in results.tasks for key in task.samples.values()}


def _predictions(folder: Path) -> Results | None:
    file = folder / PREDICTIONS
    return parse_results(file.read_bytes(), str(file), scored=False) if file.is_file() else None


def _other_parts(old: Results, new: Results) -> list[str]:
    """In which of policy, protocol, engine and verifier two results differ; of those not judged yet not the last."""
    parts = _PARTS if all(task.base or task.adapter for task in (*old.tasks, *new.tasks)) else _PARTS[:-1]
    return [part for part, one, two in zip(parts, old.of_what(), new.of_what(), strict=False) if one != two]
