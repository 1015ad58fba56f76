"""The files of an evaluation's folder: results beside those that belong to them, others set aside, nothing overwritten.

Results, folder -> Results with those that belong to them; folder/earlier

Samples stay where they are: their file holds every policy's.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from perl.errors import PerlError, RunFolderError
from perl.evaluation.results import FIGURE, RESULTS, TABLE, Results, read_results
from perl.run.warned import warn

logger = logging.getLogger("perl")

EARLIER = "earlier"
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
        old = read_results(folder / RESULTS, scored=False)
    except PerlError as error:
        warn("PRL303", "%s; it is kept in %s", error.mistakes[0], _set_aside(folder, files, "unreadable"))
        return new
    hashes = {task.name: task.protocol_hash for task in new.tasks}
    otherwise = [t.name for t in old.tasks if hashes.get(t.name, t.protocol_hash) != t.protocol_hash]
    other = [part for part, one, two in zip(_PARTS, old.of_what(), new.of_what(), strict=True) if one != two]
    if other or otherwise:
        place = _set_aside(folder, files, str(old.subject.get("policy"))[:_DIGITS])
        reason = f"of another {other[0]}" if other else f"those of {otherwise[0]} asked otherwise"
        logger.info("%s: the results there are %s; they are kept in %s", folder, reason, place)
    return new if other else new.with_tasks_of(old)


def _set_aside(folder: Path, files: Sequence[str], name: str) -> Path:
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
