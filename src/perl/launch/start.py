"""Starts a command as several processes on this machine, and says in one line what ended them.

arguments, number of processes -> processes with torchrun's variables -> exit code

It does what torchrun does, with torchrun's variables and its store, in two points otherwise: a signal is handed on and
then waited for however long a step takes, where torchrun kills after half a minute; and how the processes ended is one
line with the command's own exit code.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, in its documentation

from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_MISTAKE, InterruptedRunError, PerlError
from perl.launch.channel import GRACE_SECONDS, Hub
from perl.launch.together import goes_on
from perl.run.failure import IN_ORDER, Failure
from perl.run.folder import Run
from perl.run.host import handled
from perl.run.launched import HUB

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Which end a run in order."""
# Exit codes of a process that a signal has ended, with a checkpoint or without.
_BY_SIGNAL = (EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
_LOOK_EVERY_SECONDS = 0.1
# After a signal: by then most have ended, or have said that they will after the step.
_SAY_AFTER_SECONDS = 5.0
# After the first has failed the others have so long to end by themselves, then after SIGTERM, then they are killed.
_PATIENCE_SECONDS = GRACE_SECONDS + 4.0
_AFTER_SIGTERM_SECONDS = 8.0
# In which a process that was killed lets go of the run folder.
_LOCK_SECONDS = 5.0


class ProcessFailedError(PerlError):
    """A process of the run has failed, and with it the run; the same command goes on."""

    code = "PRL215"
    exit_code = EXIT_FAILED


@dataclass
class Signals:
    """Signals that this process has been sent: handed on to processes whose sessions are their own.

    Attributes:
        processes: By rank.
        came: The one that counts; 0: none.
        times: When the first one and the second came.
    """

    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    came: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def twice(self) -> bool:
        """Whether the step in hand is to be given up."""
        return len(self.times) > 1

    @property
    def seconds(self) -> float:
        """Since the one that counts; 0 before."""
        return time.monotonic() - self.times[-1] if self.times else 0.0

    def hand_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Takes a signal, as :func:`signal.signal` hands it over."""
        if self.twice or (self.came and number == signal.SIGHUP):
            return  # all has been asked for; a terminal that closes after Ctrl-C asks for no more
        self.came = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.times.append(time.monotonic())
        for process in self.processes:
            self._send(process)

    def add(self, process: "subprocess.Popen[bytes]") -> None:
        """One more, which has the signal too that came while it was started."""
        self.processes.append(process)
        if self.came:
            self._send(process)

    def explain(self, failed: Sequence[Failure]) -> bool:
        """Whether they alone have ended these processes, not an error of one of them."""
        if self.twice:
            return not any(end.kind in ("error", "mistake") for end in failed)
        return bool(self.came) and all(end.exit_code in _BY_SIGNAL for end in failed)

    def _send(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            process.send_signal(self.came)


def start(arguments: Sequence[str], processes: int, folder: Path, hint: Callable[[], str] | None = None) -> int:
    """Runs ``perl ARGUMENTS`` as several processes and waits for all of them.

    Ctrl-C and SIGTERM are handed on, and end them in order: after a step, with a checkpoint.

    Args:
        arguments: Of the command line, without the program's name.
        processes: How many.
        folder: The run's, in which a failure is recorded that no process could record.
        hint: What the same command does after a failure; None: it goes on with the run.

    Returns:
        The exit code of the command: 0, 2 or 130; one that failed raises.

    Raises:
        InterruptedRunError: Somebody has ended one process by SIGTERM; likewise.
        ProcessFailedError: A process has failed or was killed, or cannot be started; names it, and says how the same
            command goes on.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    hub, signals = Hub(local=True, names_killed=False), Signals()
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    # What torchrun tells a process; its store is kept here, so that it outlives each of them.
    variables = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
        HUB: f"127.0.0.1:{hub.port}:{hub.token}",
    }
    command = [sys.executable, "-m", "perl", *arguments]
    with contextlib.closing(hub), handled(SIGNALS, signals.hand_on):
        try:
            for rank in map(str, range(processes)):
                if signals.came:  # the others will not be needed
                    break
                own = {**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank}
                try:
                    signals.add(subprocess.Popen(command, env=own, start_new_session=True))  # noqa: S603 (ourselves)
                except OSError as error:
                    what = f"rank {rank} cannot be started: {error.strerror or error}"
                    raise ProcessFailedError(what, hint="limits of memory and of processes: ulimit -a") from None
            ends = _wait(signals, hub)
        finally:
            _end(signals.processes)
    return _outcome(signals, ends, folder, hint or partial(goes_on, folder))


def _wait(signals: Signals, hub: Hub) -> list[Failure]:
    """Until all have ended, or one has failed, or the second signal came, and the others do not end by themselves.

    Returns:
        Their ends, the first one first.
    """
    failed_at, told = 0.0, 0
    running = dict(enumerate(signals.processes))
    while running:
        time.sleep(_LOOK_EVERY_SECONDS)
        for rank, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[rank]
            hub.wait_until_left(rank)
            said, by_code = hub.ends.get(rank), Failure(rank, "killed", exit_code=process.returncode, pid=process.pid)
            if said is not None and said.kind == "done" and process.returncode:  # it failed after its last word
                hub.ends[rank] = by_code
            hub.add(by_code)  # of one that said nothing: a reward may call ``sys.exit(0)``
        if not failed_at and any(end.kind not in IN_ORDER for end in list(hub.ends.values())):
            failed_at = time.monotonic()
        if failed_at and time.monotonic() - failed_at > _PATIENCE_SECONDS:
            break
        if signals.twice and signals.seconds > _PATIENCE_SECONDS:
            break
        if running and signals.seconds > _SAY_AFTER_SECONDS and told < len(signals.times):
            told = len(signals.times)
            # A process that waits for another one's numbers handles no signal, and says nothing; so its parent does.
            ranks = f"rank{'s' if len(running) > 1 else ''} {', '.join(map(str, running))}"
            what = "they are ended" if signals.twice else "a step may be long (again: stop now and lose it)"
            print(f"waiting for {ranks} to end the step: {what}", file=sys.stderr, flush=True)  # noqa: T201
    return list(hub.ends.values())


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends those that still run: SIGTERM, then SIGKILL."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    end = time.monotonic() + _AFTER_SIGTERM_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
            continue
        process.kill()
        process.wait()


def _outcome(signals: Signals, ends: Sequence[Failure], folder: Path, hint: Callable[[], str]) -> int:
    """The command's exit code; an error of which no process has told is raised."""
    failed = [end for end in ends if end.kind != "done"]
    if ends and not failed and len(ends) == len(signals.processes):
        return EXIT_DONE
    main = next((end for end in ends if end.rank == 0), None)
    if signals.explain(failed):
        if not signals.twice or (main is not None and main.kind in ("stopped", "interrupted")):
            return EXIT_INTERRUPTED
        record_end(folder, "interrupted")
        raise InterruptedRunError("interrupted, the step in hand is lost", hint=hint())
    first = next((end for end in failed if end.kind != "lost" and not signals.explain([end])), failed[0])
    if first.kind in ("stopped", "interrupted"):
        if first.rank == 0 or (main is not None and main.kind == "stopped"):  # which has told it
            return EXIT_INTERRUPTED
        record_end(folder, "interrupted")
        raise InterruptedRunError(str(first), hint=hint())
    if first.kind == "mistake" and main is not None and main.tells_of(first):
        return main.exit_code or EXIT_FAILED
    if first.kind == "killed" and first.rank == 0 and first.exit_code == EXIT_USER_MISTAKE:
        return EXIT_USER_MISTAKE  # of the command line, which it has told
    error = ProcessFailedError(str(first), hint="" if first.kind == "mistake" else hint())
    if first.kind == "mistake":
        error.exit_code = first.exit_code or EXIT_FAILED
    if error.exit_code != EXIT_USER_MISTAKE:
        record_end(folder, "failed", str(error))
    raise error


def record_end(folder: Path, status: str, error: str | None = None) -> None:
    """Writes down how a run has ended, where its own processes could not; all of them have ended."""
    if not (folder / "run.json").is_file():
        return
    with contextlib.suppress(Timeout, PerlError), FileLock(folder / ".lock", timeout=_LOCK_SECONDS):
        run = Run.read(folder)
        if run.status in ("running", "failed"):
            run.facts.pop("error", None)
            run.record(status=status, **({"error": error} if error is not None else {}))
