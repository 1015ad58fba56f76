"""A job for verl as a child of this process, followed by the log that verl writes.

job, Python that has verl -> checkpoints, a line of progress; or what ended it

The child has a session of its own: signals reach it once, from here. It holds a lock as long as it lives, so that a job
whose parent was killed is not started beside itself.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType

from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE, InterruptedRunError, Mistake, RecipeError, raise_all
from perl.launch.start import ProcessFailedError
from perl.run.folder import in_use
from perl.run.host import handled
from perl.run.progress import Progress, progress
from perl.verl.import_job import logged_in
from perl.verl.job_folder import EARLIER, LOG, RUN, Job

OUTPUT = "verl.log"
"""What verl and the check before it print, of all starts."""
_LOCK = ".verl.lock"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_SECONDS = 0.2
_AFTER_SIGTERM_SECONDS = 8.0
# Of the output: more is not looked at for why the child has ended.
_LAST_BYTES = 65_536
_REFUSED = re.compile(r"^error: (.*) \[PRL\d+\]$", re.MULTILINE)
# Hydra ends with it whatever has happened.
_NO_REASON = "Set the environment variable HYDRA_FULL_ERROR"


def run_job(job: Job, python: str, steps: int) -> None:
    """Starts a job and waits for its end; it goes on from its newest checkpoint.

    Args:
        job: In whose folder nothing trains.
        python: Path of the Python that has verl.
        steps: Of verl, in all.

    Raises:
        RecipeError: The check before the start refuses the job; all that it says.
        RunFolderError: An earlier start still trains there.
        InterruptedRunError: A signal has ended it, which was handed on; the second one kills it.
        ProcessFailedError: It has failed.
    """
    came: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _frame: FrameType | None = None) -> None:
        came.append(number)
        for process in child:
            first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            _send(process.pid, first if len(came) == 1 else signal.SIGKILL)

    listening = threading.current_thread() is threading.main_thread()
    with (
        handled(_SIGNALS, hand_on) if listening else nullcontext(),
        (job.path / _LOCK).open("w") as lock,
        (job.path / OUTPUT).open("ab") as output,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(job.path) from None
        begin = output.tell()
        if (job.path / LOG).is_file():  # kept where run.sh would, so that the one that is followed is new
            with (job.path / EARLIER).open("ab") as earlier:
                earlier.write((job.path / LOG).read_bytes())
            (job.path / LOG).unlink()
        process = subprocess.Popen(  # noqa: S603 (the job's own script)
            [shutil.which("bash") or "bash", str(job.path / RUN)],
            env={**os.environ, "PYTHON": python},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
        child.append(process)
        if came:  # before there was a child to hear of it
            _send(process.pid, signal.SIGTERM)
        try:
            with progress(steps, "training with verl", job.newest_step, "steps") as shown:
                follower = LogFollower(job.path / LOG, shown)
                while _runs(process):
                    follower.look()
                    time.sleep(_LOOK_EVERY_SECONDS)
                follower.look()
        finally:
            _end(process)
    if process.returncode != EXIT_DONE:
        _raise(job, process.returncode, begin, steps, stopped=bool(came))


class LogFollower:
    """Shows each step as verl logs it."""

    def __init__(self, log: Path, shown: Progress) -> None:
        """Follows a log from its beginning.

        Args:
            log: verl's, of this start; it may not be there yet.
            shown: The line of progress.
        """
        self._log, self._shown, self._read = log, shown, 0
        self._text = "waiting for the first step"
        shown.note = lambda: self._text

    def look(self) -> None:
        """Reads the whole lines that are new."""
        with suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            for step, data in logged_in(whole.decode("utf-8", errors="replace")):
                parts = (("critic/score/mean", "reward {:.3f}"), ("response_length/mean", "length {:.1f}"))
                self._text = "  ".join(form.format(data[name]) for name, form in parts if name in data)
                self._shown.update(max(0, step - self._shown.done))


def _runs(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it has not ended; one that has keeps its number, which is its group's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends it if it runs, and whatever it has left in its group."""
    if _runs(process):
        _send(process.pid, signal.SIGTERM)
        end = time.monotonic() + _AFTER_SIGTERM_SECONDS
        while _runs(process) and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_SECONDS)
    _send(process.pid, signal.SIGKILL)
    process.wait()


def _send(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _raise(job: Job, code: int, begin: int, steps: int, *, stopped: bool) -> None:
    """Says why it has ended."""
    if stopped:
        what = f"verl was stopped, its newest checkpoint is of step {job.newest_step} of {steps}"
        raise InterruptedRunError(what, str(job.path), "the same command goes on")
    output = job.path / OUTPUT
    with output.open("rb") as file:
        file.seek(max(begin, output.stat().st_size - _LAST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    if code == EXIT_USER_MISTAKE:
        raise_all(RecipeError, [Mistake(line) for line in _REFUSED.findall(text)])
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip() and _NO_REASON not in line]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    last = f": {lines[-1]:.300}" if lines else ""
    raise ProcessFailedError(f"verl {how}{last}", str(output), "the same command goes on")
