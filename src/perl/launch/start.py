"""Starts a command as several processes on this machine, and says in one line what ended them.

arguments, number of processes -> processes with torchrun's variables -> exit code

It does what torchrun does, with torchrun's variables and its store, in two points otherwise: a signal is handed on and
then waited for however long a step takes, where torchrun kills after half a minute; and how the processes ended is one
line with the command's own exit code.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, in its documentation

from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_MISTAKE, InterruptedRunError, PerlError
from perl.launch.meeting import FIRST_MEETING, Meeting, check_machine, check_size
from perl.launch.together import goes_on
from perl.launch.watch import END, GRACE_SECONDS, IN_ORDER, End
from perl.recipe.recipe import launched
from perl.recipe.sections import EngineSection
from perl.run.folder import Run
from perl.run.host import handled
from perl.run.launched import STARTED_BY, who

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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


def check_processes(engine: EngineSection) -> None:
    """Refuses processes that cannot work here, before they are started; of a launcher's, another number.

    Raises:
        RecipeError: They are more than there are GPUs, or other than a launcher has started.
        MissingExtraError: Their strategy is not installed.
    """
    if launched():
        check_size(engine.processes)
    else:
        check_machine(engine, engine.processes or 1)


@dataclass
class _Rank:
    """A process that was started.

    Attributes:
        code: Its exit code, negative: the signal that killed it; None while it runs.
        ended: When that was noticed.
        end: What it said about its end, if it did.
    """

    number: int
    process: "subprocess.Popen[bytes]"
    code: int | None = None
    ended: float = 0.0
    end: End | None = None


@dataclass
class _Signals:
    """Signals that this process has been sent: handed on to the others, whose sessions are their own."""

    ranks: list[_Rank] = field(default_factory=list)
    came: int = 0
    times: list[float] = field(default_factory=list)  # of the first one and the second

    @property
    def twice(self) -> bool:
        """Whether the step in hand is to be given up."""
        return len(self.times) > 1

    @property
    def seconds(self) -> float:
        """Since the one that counts; 0 before."""
        return time.monotonic() - self.times[-1] if self.times else 0.0

    def hand_on(self, number: int, _frame: FrameType | None = None) -> None:
        if self.twice or (self.came and number == signal.SIGHUP):
            return  # all has been asked for; a terminal that closes after Ctrl-C asks for no more
        self.came = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.times.append(time.monotonic())
        for rank in self.ranks:
            self._send(rank)

    def add(self, rank: _Rank) -> None:
        """One more, which has the signal too that came while it was started."""
        self.ranks.append(rank)
        if self.came:
            self._send(rank)

    def _send(self, rank: _Rank) -> None:
        if rank.process.poll() is None:
            rank.process.send_signal(self.came)


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
    meeting = Meeting(store, 0, processes, FIRST_MEETING)
    signals = _Signals()
    with handled(_SIGNALS, signals.hand_on):
        try:
            for number in range(processes):
                if signals.came:  # the others will not be needed
                    break
                signals.add(_started(number, arguments, _variables(number, processes, store.port)))
            _wait(signals, meeting)
        finally:
            _end(signals.ranks)
    return _outcome(signals, folder, hint or partial(goes_on, folder))


def _started(number: int, arguments: Sequence[str], variables: Mapping[str, str]) -> _Rank:
    command = [sys.executable, "-m", "perl", *arguments]
    try:
        process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)  # noqa: S603 (ourselves)
    except OSError as error:
        hint = "limits of memory and of processes: ulimit -a"
        raise ProcessFailedError(f"rank {number} cannot be started: {error.strerror or error}", hint=hint) from None
    return _Rank(number, process)


def _variables(rank: int, processes: int, port: int) -> Mapping[str, str]:
    """What torchrun tells a process; its store is kept here, so that it outlives each of them."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
        STARTED_BY: str(os.getpid()),
    }


def _wait(signals: _Signals, meeting: Meeting) -> None:
    """Until all have ended, or one has failed, or the second signal came, and the others do not end by themselves."""
    ranks, told = signals.ranks, 0
    while any(rank.code is None for rank in ranks):
        time.sleep(_LOOK_EVERY_SECONDS)
        for rank in ranks:
            if rank.code is None and rank.process.poll() is not None:
                rank.code, rank.ended = rank.process.returncode, time.monotonic()
                rank.end = _said(meeting, rank.number)
        failed = [rank.ended for rank in ranks if _has_failed(rank)]
        if failed and time.monotonic() - min(failed) > _PATIENCE_SECONDS:
            return
        if signals.twice and signals.seconds > _PATIENCE_SECONDS:
            return
        running = [str(rank.number) for rank in ranks if rank.code is None]
        if running and signals.seconds > _SAY_AFTER_SECONDS and told < len(signals.times):
            told = len(signals.times)
            _say_who_runs(running, twice=signals.twice)


def _say_who_runs(running: list[str], *, twice: bool) -> None:
    """A process that waits for another one's numbers handles no signal, and says nothing; so its parent does."""
    who_runs = f"rank{'s' if len(running) > 1 else ''} {', '.join(running)}"
    what = "they are ended" if twice else "a step may be long (again: stop now and lose it)"
    print(f"waiting for {who_runs} to end the step: {what}", file=sys.stderr, flush=True)  # noqa: T201


def _has_failed(rank: _Rank) -> bool:
    """Whether the others must be ended; they end by themselves after what all of them do, as an orderly stop.

    Its exit code alone does not tell: a reward may call ``sys.exit(0)``.
    """
    return rank.code is not None and (rank.end is None or rank.end.kind not in IN_ORDER)


def _said(meeting: Meeting, rank: int) -> End | None:
    try:
        return End(**meeting.get(END, rank)) if meeting.has(END, rank) else None
    except (RuntimeError, json.JSONDecodeError, TypeError):
        return None


def _end(ranks: list[_Rank]) -> None:
    """Ends those that still run: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.process.terminate()
    end = time.monotonic() + _AFTER_SIGTERM_SECONDS
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, end - time.monotonic()))
            continue
        rank.process.kill()
        rank.process.wait()


def _outcome(signals: _Signals, folder: Path, hint: Callable[[], str]) -> int:
    """The command's exit code; an error of which no process has told is raised."""
    ended = sorted((rank for rank in signals.ranks if rank.code or _has_failed(rank)), key=lambda rank: rank.ended)
    if signals.ranks and not ended and all(rank.code == EXIT_DONE for rank in signals.ranks):
        return EXIT_DONE
    if signals.came and _asked_to_end(signals, ended):
        said = signals.ranks[0].end if signals.ranks else None
        if signals.twice and not (said and said.kind in ("stopped", "interrupted")):
            record_end(folder, "interrupted")
            raise InterruptedRunError("interrupted, the step in hand is lost", hint=hint())
        return EXIT_INTERRUPTED
    main = signals.ranks[0]
    first = next((rank for rank in ended if _is_a_cause(rank, signals)), main)
    end = first.end
    if end is not None and end.kind in ("stopped", "interrupted"):
        if first is not main and not (main.end is not None and main.end.kind == "stopped"):  # which has told it
            record_end(folder, "interrupted")
            raise InterruptedRunError(_what_became_of(first), hint=hint())
        return EXIT_INTERRUPTED
    if end is not None and end.kind == "mistake":
        if main.end is not None and main.end.tells_of(end):
            return main.end.code
        error: PerlError = ProcessFailedError(str(end))
        error.exit_code = end.code
        if end.code != EXIT_USER_MISTAKE:
            record_end(folder, "failed", str(error))
        raise error
    if end is None and first is main and first.code == EXIT_USER_MISTAKE:
        return EXIT_USER_MISTAKE  # of the command line, which it has told
    error = ProcessFailedError(_what_became_of(first), hint=hint())
    record_end(folder, "failed", str(error))
    raise error


def _asked_to_end(signals: _Signals, ended: Sequence[_Rank]) -> bool:
    """Whether the signals alone have ended the processes, not an error of one of them."""
    if signals.twice:
        return not any(rank.end is not None and rank.end.kind in ("error", "mistake") for rank in ended)
    return all(rank.code in _BY_SIGNAL for rank in ended) and (bool(ended) or not signals.ranks)


def _is_a_cause(rank: _Rank, signals: _Signals) -> bool:
    """Whether its end was not another one's, nor the signal's that was handed on to it."""
    if rank.end is None:
        return not (signals.came and rank.code in _BY_SIGNAL)
    return rank.end.kind != "lost"


def _what_became_of(rank: _Rank) -> str:
    """A process's end, as its parent sees it."""
    name = who(rank.number, rank.process.pid, "")
    if rank.end is not None and rank.end.kind == "interrupted":
        return f"{name} was interrupted"
    if rank.end is not None and rank.end.text:
        return f"{name} failed: {rank.end.text}"
    if rank.code is not None and rank.code < 0:
        return f"{name} was killed by {_signal_name(-rank.code)}"
    return f"{name} ended with exit code {rank.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def record_end(folder: Path, status: str, error: str | None = None) -> None:
    """Writes down how a run has ended, where its own processes could not; all of them have ended."""
    if not (folder / "run.json").is_file():
        return
    with contextlib.suppress(Timeout, PerlError), FileLock(folder / ".lock", timeout=_LOCK_SECONDS):
        run = Run.read(folder)
        if run.status in ("running", "failed"):
            run.facts.pop("error", None)
            run.record(status=status, **({"error": error} if error is not None else {}))
