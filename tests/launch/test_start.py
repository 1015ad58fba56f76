"""What the launcher makes of its processes: simulated ones, whose signals, exit codes and last words are given."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from perl.errors import InterruptedRunError, Mistake
from perl.launch import start as launcher
from perl.launch.channel import Link
from perl.launch.start import ProcessFailedError, start
from perl.run.failure import Failure
from perl.run.folder import Run
from perl.run.launched import HUB

DONE = Failure(0, "done", exit_code=0)
Started = list["subprocess.Popen[bytes]"]


@pytest.fixture
def simulated(monkeypatch) -> Callable[..., Started]:
    """Has each rank be a shell command that has said how it ends; the processes that were started."""

    def simulate(*ranks: tuple[str | Exception | Callable[[], str], Failure | None]) -> Started:
        started: Started = []
        popen = subprocess.Popen

        def instead(_, env, start_new_session):
            rank = int(env["RANK"])
            command, end = ranks[rank]
            if isinstance(command, Exception):
                raise command
            if end is not None:
                host, port, token = env[HUB].split(":")
                link = Link(rank, (host, int(port)), token, None)
                link.say(end)
                link.close()
            text = command if isinstance(command, str) else command()
            started.append(popen(["/bin/sh", "-c", text], start_new_session=start_new_session))
            return started[-1]

        monkeypatch.setattr(launcher.subprocess, "Popen", instead)
        return started

    return simulate


@contextlib.contextmanager
def ignored(*numbers: int):
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_that_were_ignored_at_the_start_stay_ignored(simulated):
    """As ``nohup perl train R --processes 8 &`` has them when the user logs out."""
    started = simulated(("kill -HUP $PPID; kill -INT $PPID; sleep 0.5", DONE))
    with ignored(signal.SIGHUP, signal.SIGINT):
        assert start(["train"], 1, Path("run")) == 0
    assert started[0].returncode == 0


def test_processes_that_handle_no_signal_are_named_and_ended_by_the_second_one(simulated, monkeypatch, capfd):
    """As one does that waits in a collective for another, whose reward hangs."""
    for name in ("_SAY_AFTER_SECONDS", "_PATIENCE_SECONDS", "_AFTER_SIGTERM_SECONDS"):
        monkeypatch.setattr(f"perl.launch.start.{name}", 0.2)
    (folder := Path("run")).mkdir()
    Run(folder).record(status="running")
    deaf = "trap '' INT TERM; "
    both = (
        "touch deaf; sleep 60",
        "until [ -e deaf ]; do sleep 0.1; done; kill -INT $PPID; sleep 1; kill -INT $PPID; sleep 60",
    )
    started = simulated(*((f"{deaf}{command}", None) for command in both))
    with pytest.raises(InterruptedRunError, match="the step in hand is lost"):
        start(["train"], 2, folder)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    first, *_ = capfd.readouterr().err.splitlines()
    assert "waiting for ranks 0, 1" in first
    assert "again: stop now" in first
    assert Run.read(folder).status == "interrupted"


def test_two_signals_do_not_hide_an_error_of_before(simulated, monkeypatch):
    monkeypatch.setattr("perl.launch.start._PATIENCE_SECONDS", 1.0)
    twice = "trap '' TERM; sleep 0.5; kill -TERM $PPID; sleep 0.3; kill -TERM $PPID; exit 1"
    simulated((twice, Failure(0, "error", (Mistake("OutOfMemoryError: none left"),))), ("sleep 60", None))
    with pytest.raises(ProcessFailedError, match="OutOfMemoryError"):
        start(["train"], 2, Path("run"))


def test_a_signal_while_processes_are_started_reaches_the_one_that_is_being_started(simulated):
    def interrupted() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "sleep 60"

    started = simulated((interrupted, None), ("sleep 60", None))
    assert start(["train"], 2, Path("run")) == 130
    assert [process.returncode for process in started] == [-signal.SIGTERM]


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (Failure(0, "error", (Mistake("SystemExit: 0"),)), r"rank 0 \(pid \d+\) failed: SystemExit: 0"),
        (None, r"rank 0 \(pid \d+\) ended with exit code 0"),
    ],
    ids=["sys.exit(0) in a reward", "os._exit(0) in a reward"],
)
def test_an_exit_code_of_0_is_not_taken_for_the_runs_end(simulated, end, says):
    simulated(("exit 0", end), ("sleep 0.2; exit 0", end and Failure(1, "error", (Mistake("SystemExit: 0"),))))
    with pytest.raises(ProcessFailedError, match=says) as found:
        start(["train"], 2, Path("run"))
    assert found.value.exit_code == 1


def test_sigterm_to_one_process_interrupts_the_run_and_names_it(simulated):
    (folder := Path("run")).mkdir()
    Run(folder).record(status="failed", error="LostProcessError: rank 1 was interrupted")
    lost = Failure(0, "lost", (Mistake("rank 1 was interrupted"),), exit_code=130)
    simulated(("sleep 0.5; exit 130", lost), ("exit 130", Failure(1, "interrupted", exit_code=130)))
    with pytest.raises(InterruptedRunError, match=r"rank 1 \(pid \d+\) was interrupted .*the same command") as found:
        start(["train"], 2, folder)
    assert found.value.exit_code == 130
    written = Run.read(folder)
    assert (written.status, "error" in written.facts) == ("interrupted", False)


def test_of_two_that_fail_at_once_the_first_that_said_so_is_named_whichever_ends_first(simulated):
    errors = [Failure(rank, "error", (Mistake(f"ValueError: of rank {rank}"),)) for rank in range(2)]
    simulated(("sleep 0.5; exit 1", errors[0]), ("exit 1", errors[1]))
    with pytest.raises(ProcessFailedError, match=r"rank 0 \(pid \d+\) failed: ValueError: of rank 0"):
        start(["train"], 2, Path("run"))
