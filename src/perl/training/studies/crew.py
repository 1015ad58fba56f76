"""What starts the cells of a study: a process that forks one for each.

Conduct -> Starter; it is started when the first cell is to begin, and ends with the study
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

from perl.errors import EXIT_DONE, PerlError
from perl.recipe.sections import ModelSection
from perl.run.warned import warn
from perl.training.studies.conduct import Conduct, last_error
from perl.training.studies.nursery import Job

# The program `perl`, which forks for each command instead of being started anew.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from perl.training.studies.nursery import main; "
    "from perl.cli.commands import run; main(run)"
)
_BASE = ".base-"
# Whether there is a GPU is asked of its driver's library, also by what is imported: torch's own way to ask uses the
# GPU, and then no fork can.
_NO_GPU_YET = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Starter(Protocol):
    """What starts cells, each in a process.

    Attributes:
        base: Folder with the base that they map; None: each loads its own.
    """

    base: Path | None

    def begin(self, job: Job) -> None:
        """Begins a cell."""
        ...

    def stop(self) -> None:
        """Asks all cells to stop after their step."""
        ...

    def end(self) -> None:
        """Ends all of them at once."""
        ...

    def next(self) -> dict[str, Any]:
        """The next cell that ends: name, code, cpu (core-seconds), peak (bytes), and whether it was lost, if known."""
        ...


class Nursery:
    """The process that forks one for each cell: see ``nursery.py``.

    Attributes:
        base: Folder with the base that its cells map; None: each loads its own.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        """Takes the process.

        Args:
            process: That says it is ready once it has imported.
            errors: File for what it prints.
        """
        self.process, self._errors = process, errors
        self.base: Path | None = None

    def begin(self, job: Job) -> None:
        """Begins a cell."""
        self._write(asdict(job))

    def stop(self) -> None:
        """Asks all cells to stop after their step."""
        self._write({"stop": True})

    def end(self) -> None:
        """Ends all of them at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def next(self) -> dict[str, Any]:
        """The next cell that ends.

        Raises:
            PerlError: The process is gone.
        """
        while True:
            line = self._pipe(self.process.stdout).readline()
            if not line:
                what = f"the process that starts cells has ended with exit code {self.process.wait()}"
                raise PerlError(what, str(self._errors), "see there; the same command goes on")
            report: dict[str, Any] = json.loads(line)
            if "name" in report:
                return report

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            pipe = self._pipe(self.process.stdin)
            pipe.write(json.dumps(line).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            return  # which the next look at it finds

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # noqa: S101 (it was asked for)
        return pipe


Hire = Callable[[], Starter]
"""Gives the process that starts cells, which is started when it is first asked for."""


@contextmanager
def crew(conduct: Conduct, check: Callable[[Path], None] = lambda _: None) -> Iterator[Hire]:
    """Inside, cells can be carried out; one process starts all of them, and ends with the block.

    Args:
        conduct: How.
        check: Given the study's folder before that process is started; refuses what cells share and cannot use.
    """
    with ExitStack() as opened:
        started: list[Starter] = []

        def hire() -> Starter:
            if not started:
                check(conduct.folder)
                started.append(opened.enter_context(_started(conduct)))
            return started[0]

        yield hire


@contextmanager
def _started(conduct: Conduct) -> Iterator[Nursery]:
    """Starts the process, which holds the base in a file where that can be."""
    for name in ("cells", "logs"):
        (conduct.folder / name).mkdir(exist_ok=True)
    for left in conduct.folder.glob(f"{_BASE}*"):  # of a study that was killed; cells of it that end still map it
        shutil.rmtree(left, ignore_errors=True)
    log = conduct.folder / "logs" / "starts.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(  # noqa: S603 (a fixed command)
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_NO_GPU_YET, "OMP_NUM_THREADS": str(conduct.threads)},
            start_new_session=True,
            bufsize=0,  # a signal may come amid a line, and writes one too
        )
    base = conduct.folder / f"{_BASE}{secrets.token_hex(4)}"
    nursery = Nursery(process, log)
    try:
        if conduct.model is not None:
            nursery.base = _held(nursery, base, conduct.model, log.with_name("base.log"))
        yield nursery
    finally:
        assert process.stdin is not None  # noqa: S101 (it was asked for)
        assert process.stdout is not None  # noqa: S101 (so was it)
        process.stdin.close()  # by which it knows
        process.wait()
        process.stdout.close()
        shutil.rmtree(base, ignore_errors=True)


def _held(nursery: Nursery, folder: Path, model: ModelSection, log: Path) -> Path | None:
    """Has the base written where cells map it; None where they have a copy each, on a GPU or since that failed."""
    nursery.begin(Job("base", (), str(log), str(folder), None, str(folder), model.model_dump()))
    code = nursery.next()["code"]
    if code != EXIT_DONE:
        why = last_error(log) or f"exit code {code}"
        warn("PRL346", "the base cannot be shared, each cell loads it: %s", why)
    return folder if code == EXIT_DONE and folder.is_dir() else None
