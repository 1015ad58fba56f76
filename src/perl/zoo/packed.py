"""An adapter that a wheel ships: one compressed file, unpacked when it is asked for.

adapters/NAME.tar.xz -> a folder with its files, for as long as this process runs
"""

import atexit
import functools
import lzma
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from perl.errors import PerlError


@functools.cache
def unpacked(packed: Path) -> Path:
    """The files of an adapter, in a folder that goes with this process.

    Args:
        packed: What ``hatch_build.py`` has made of them.

    Raises:
        PerlError: It cannot be read, or there is no room.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="perl-rl-zoo-"))
        atexit.register(_remove, folder, os.getpid())
        with tarfile.open(packed, "r:xz") as archive:
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise PerlError(f"cannot be unpacked: {error}", str(packed), "install perl-rl again") from None
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked, and ends before this one
        shutil.rmtree(folder, ignore_errors=True)
