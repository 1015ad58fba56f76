"""Runs on Ray clusters of this machine, whose processes tests find and kill.

arguments -> `perl train` as a driver -> the pids of what Ray has started for it
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

MARK = "PERL_RL_TEST_RUN"
WORKER, SERVER = "RayTrainWorker", "RolloutServer"
QUIET_VLLM = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class RayRun:
    """``perl train`` as a driver, in a process of its own.

    Attributes:
        out: The run folder.
        log: What the driver printed.
    """

    def __init__(self, folder: Path, recipe: dict, *overrides: str, out: str = "run") -> None:
        """Starts it."""
        self.out, self.log = folder / out, folder / f"{out}.log"
        (folder / f"{out}.yaml").write_text(yaml.safe_dump(recipe))
        self._mark = uuid.uuid4().hex
        environment = os.environ | QUIET_VLLM | {MARK: self._mark, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "perl", "train", f"{out}.yaml", *overrides, "-o", out]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def pids(self, kind: str) -> list[int]:
        """Of the actors of a kind."""
        return sorted(pid for pid, name in self._marked() if kind in name)

    def left(self) -> list[str]:
        """Names of the processes that it has started and that still run."""
        return [name for pid, name in self._marked() if pid != self.process.pid]

    def _marked(self) -> Iterator[tuple[int, str]]:
        for place in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(place.name)
                if f"{MARK}={self._mark}".encode() in (place / "environ").read_bytes():
                    yield pid, (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def until(self, seen: Callable[[], bool], what: str) -> None:
        """Waits for something, as long as the driver runs."""
        end = time.monotonic() + 1200.0
        while not seen():
            assert time.monotonic() < end, f"{what} did not come: {self.log.read_text()[-3000:]}"
            assert self.process.poll() is None, f"ended before {what}: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def steps(self) -> int:
        """That were logged in the run folder."""
        log = self.out / "metrics.jsonl"
        return log.read_text().count("\n") if log.is_file() else 0

    def kill(self, kind: str, index: int = -1) -> int:
        """Kills one of the actors of a kind, or the last one if there are not so many; its pid."""
        self.until(lambda: bool(self.pids(kind)), kind)
        pids = self.pids(kind)
        pid = pids[min(index, len(pids) - 1)]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, seconds: float = 1200.0) -> int:
        """The driver's exit code."""
        return self.process.wait(seconds)

    def gone(self, seconds: float = 120.0) -> bool:
        """Whether all that it has started ends too."""
        end = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.5)
        return not left

    def end(self) -> None:
        """Kills what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for pid, _ in self._marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
