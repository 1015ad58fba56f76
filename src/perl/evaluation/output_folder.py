"""The folder of an evaluation's files: whether it can be written, and what lies where a table of several goes.

folder -> a line where something is wrong with it
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from perl.errors import RunFolderError
from perl.evaluation.earlier import EARLIER, free_place
from perl.run.files import write_text

logger = logging.getLogger("perl")


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


def write_beside(text: str, file: Path) -> None:
    """Writes a file; one that is there and says something else is kept in ``earlier/``, and a line says so.

    Args:
        text: What it shall say.
        file: In the folder of the evaluations.
    """
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") != text:
        place = free_place(file.parent / EARLIER / file.stem, file.suffix)
        place.parent.mkdir(exist_ok=True)
        os.replace(file, place)
        logger.info("%s: the table there is of another call; it is kept in %s", file.parent, place)
    write_text(file, text)
