"""What the processes of one machine know of their servers' health, so that each server is asked by one of them.

address -> Reading, of this process or of another one

A file for each server in a temporary folder of the user, which names the run. Who finds the last reading old takes
the lock of the server, asks it, and writes what it answered; who finds the lock taken reads. The lock of a process that
dies is free. Only what a healthy server answered is shared: a process believes in a fault that it has met itself.
Whatever is wrong with the folder (absent, not ours, malformed, old) costs requests and nothing else: then each asks for
itself.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# How many pauses, of how long, a process waits for what another one has begun to ask.
_PAUSES, _PAUSE_SECONDS = 10, 0.1
# Intervals after which a reading is too old even while another process asks: that one may hang.
_TOO_OLD = 3.0
# Servers that a process asks at a time, each with a lock that is an open file.
_AT_A_TIME = 64
# Folders of runs that were killed.
_LEFT_SECONDS = 86_400.0


@dataclass(frozen=True)
class Reading:
    """What a healthy server answered.

    Attributes:
        at: When it was asked, in seconds of this machine's monotonic clock.
        tokens: Read and written since it was started; None: it does not count.
    """

    at: float
    tokens: float | None


class SharedHealth:
    """The readings of one run's processes on this machine."""

    def __init__(self, run: str | None) -> None:
        """Makes the folder.

        Args:
            run: Its name, the same in all its processes; None: this process shares with none.
        """
        self._folder = None if run is None else _folder_of(run)
        self._asking = asyncio.Semaphore(_AT_A_TIME)

    async def of(self, url: str, ask: Callable[[], Awaitable[float | None]], interval_seconds: float) -> Reading:
        """How a server is: as it was read less than an interval ago, by whomever, or as it answers now.

        Args:
            url: Its address.
            ask: Asks it for its tokens; raises where it is not healthy.
            interval_seconds: For so long a reading is good.
        """
        kept = self._kept(url)
        if kept is not None and time.monotonic() - kept.at < interval_seconds:
            return kept
        async with self._asking:
            with self._locked(url) as taken:
                if not taken:
                    reading = Reading(time.monotonic(), await ask())
                    self._keep(url, reading)
                    return reading
        for _ in range(_PAUSES):
            await asyncio.sleep(_PAUSE_SECONDS)
            kept = self._kept(url)
            if kept is not None and time.monotonic() - kept.at < interval_seconds:
                return kept
        if kept is not None and time.monotonic() - kept.at < _TOO_OLD * interval_seconds:
            return kept
        return Reading(time.monotonic(), await ask())

    def close(self) -> None:
        """Deletes the folder; other processes that go on make it again."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, url: str, kind: str) -> Path | None:
        return self._folder and self._folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.{kind}"

    def _kept(self, url: str) -> Reading | None:
        """The last reading; None: there is none, or what is there is malformed or from another time."""
        path = self._path(url, "json")
        if path is None:
            return None
        try:
            fields = json.loads(path.read_text())
            reading = Reading(float(fields["at"]), None if fields["tokens"] is None else float(fields["tokens"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        known = reading.tokens is None or math.isfinite(reading.tokens)
        return reading if known and 0.0 <= reading.at <= time.monotonic() else None

    def _keep(self, url: str, reading: Reading) -> None:
        path = self._path(url, "json")
        if path is None:
            return
        staged = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            staged.write_text(json.dumps(asdict(reading)))
            staged.replace(path)

    @contextlib.contextmanager
    def _locked(self, url: str) -> Iterator[bool]:
        """Holds a server's lock; True: another process does. Without locks nobody does."""
        path, held = self._path(url, "lock"), None
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, exist_ok=True)  # one that ended may have deleted it
                held = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except BlockingIOError:
            taken = True
        except OSError:
            taken = False
        try:
            yield taken
        finally:
            if held is not None:
                if not taken:
                    with contextlib.suppress(OSError):
                        fcntl.flock(held, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file too
                os.close(held)


def _folder_of(run: str) -> Path | None:
    """The run's folder among those of this user on this machine, which no other user can write; None: there is none."""
    ours = Path(tempfile.gettempdir()) / f"perl-{os.getuid()}"
    try:
        ours.mkdir(mode=0o700, exist_ok=True)
        found = ours.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return None
        for left in ours.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        # A temporary folder may be shared by machines, whose clocks have nothing to do with each other.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        folder = ours / hashlib.sha256(f"{boot} {run}".encode()).hexdigest()[:16]
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder
