"""What one process learns of a server's health the others of its machine read; a faulty file costs no more."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm import liveness, shared_health
from perl.rollouts.vllm.answers import ServerDownError
from perl.rollouts.vllm.dispatch import Place
from perl.rollouts.vllm.servers import ServerPool
from perl.rollouts.vllm.shared_health import SharedHealth
from tests.rollouts.fake_servers import fake_servers

URL, LONG = "http://one:8000", 1000.0


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The temporary folder of this machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


class Server:
    """Counts how often it is asked, and has read a token more each time."""

    def __init__(self):
        self.asked, self.fails = 0, False

    async def __call__(self):
        self.asked += 1
        if self.fails:
            raise ServerDownError("does not answer")
        return float(self.asked)


def tokens(health, server, interval=LONG, url=URL):
    return asyncio.run(health.of(url, server, interval)).tokens


def test_of_the_processes_of_a_run_one_asks_and_all_know():
    server, mine, others = Server(), SharedHealth("run"), [SharedHealth("run") for _ in range(7)]
    assert tokens(mine, server) == 1.0
    assert [tokens(other, server) for other in others] == [1.0] * 7
    assert tokens(SharedHealth("another run"), server) == 2.0
    assert tokens(SharedHealth(None), server) == 3.0
    assert tokens(mine, server, url="http://another:8000") == 4.0
    assert tokens(mine, server, interval=0.0) == 5.0  # the last one is too old
    assert tokens(others[0], server) == 5.0
    assert server.asked == 5


@pytest.mark.parametrize(
    "found",
    [
        "",
        "[]",
        "3",
        "{",
        '{"at": 1.0}',
        '{"at": "x", "tokens": 1.0}',
        '{"at": null, "tokens": 1.0}',
        '{"at": -1.0, "tokens": 99.0}',
        '{"at": 1e30, "tokens": 99.0}',
        '{"at": NaN, "tokens": 99.0}',
        json.dumps({"at": 0.0, "tokens": 99.0}),  # from before the machine was started
        b"\xff\xfe",
    ],
)
def test_a_malformed_or_old_reading_is_none(found):
    server, health = Server(), SharedHealth("run")
    assert tokens(health, server) == 1.0
    path = health._path(URL, "json")
    path.write_bytes(found.encode() if isinstance(found, str) else found)
    assert tokens(health, server, interval=time.monotonic() / 2) == 2.0
    assert tokens(SharedHealth("run"), server) == 2.0  # it is whole again


def test_a_folder_that_is_deleted_is_made_again_and_one_of_somebody_else_is_not_used(folder, monkeypatch):
    server, mine, other = Server(), SharedHealth("run"), SharedHealth("run")
    assert tokens(mine, server) == 1.0
    mine.close()
    assert list((folder / f"perl-{os.getuid()}").iterdir()) == []
    assert [tokens(other, server), tokens(other, server)] == [2.0, 2.0]
    (folder / f"perl-{os.getuid()}").chmod(0o777)
    open_to_all = SharedHealth("run")
    assert [tokens(open_to_all, server), tokens(open_to_all, server)] == [3.0, 4.0]
    monkeypatch.setenv("TMPDIR", str(folder / "absent"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder / "absent"))
    nowhere = SharedHealth("run")
    assert [tokens(nowhere, server), tokens(nowhere, server)] == [5.0, 6.0]


def test_what_killed_runs_left_is_cleared_after_a_day(folder):
    SharedHealth("old")
    (left,) = (folder / f"perl-{os.getuid()}").iterdir()
    os.utime(left, (time.time() - 2 * 86_400,) * 2)
    SharedHealth("new")
    (found,) = (folder / f"perl-{os.getuid()}").iterdir()
    assert found != left


def test_each_process_believes_in_a_fault_that_it_has_met_itself():
    server, mine, other = Server(), SharedHealth("run"), SharedHealth("run")
    assert tokens(mine, server) == 1.0
    server.fails = True
    with pytest.raises(ServerDownError):
        tokens(mine, server, interval=0.0)
    assert tokens(other, server) == 1.0  # nothing was written over it
    with pytest.raises(ServerDownError):
        tokens(other, server, interval=0.0)
    assert server.asked == 3


HOLDS = """
import asyncio, sys
from perl.rollouts.vllm.shared_health import SharedHealth
async def hangs():
    print("asks", flush=True)
    await asyncio.sleep(1000)
asyncio.run(SharedHealth("run").of("http://one:8000", hangs, 0.0))
"""


def test_a_process_that_hangs_while_it_asks_is_not_waited_for_and_one_that_dies_is_replaced(monkeypatch):
    monkeypatch.setattr(shared_health, "_PAUSE_SECONDS", 0.01)
    server, mine, other = Server(), SharedHealth("run"), SharedHealth("run")
    assert tokens(mine, server) == 1.0
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "asks\n"
            assert tokens(mine, server, interval=LONG / 1e6) == 2.0  # too old even for one who waits
            assert tokens(other, server) == 1.0  # what was asked without the lock is not shared
            assert server.asked == 2
        finally:
            holder.send_signal(signal.SIGKILL)
    assert tokens(mine, server, interval=0.0) == 3.0
    assert tokens(other, server) == 3.0
    assert server.asked == 3


def test_while_another_process_asks_its_answer_is_waited_for():
    mine, other = SharedHealth("run"), SharedHealth("run")

    async def both():
        asking, answer = asyncio.Event(), asyncio.Event()

        async def slow():
            asking.set()
            await answer.wait()
            return 7.0

        async def never():
            raise AssertionError("asked twice")

        first = asyncio.create_task(mine.of(URL, slow, LONG))
        await asking.wait()
        second = asyncio.create_task(other.of(URL, never, LONG))
        await asyncio.sleep(0)
        answer.set()
        return [(await first).tokens, (await second).tokens]

    assert asyncio.run(both()) == [7.0, 7.0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_busy_server_is_asked_as_often_by_many_processes_as_by_one(shared, monkeypatch):
    pools, interval = 6, 0.5
    monkeypatch.setattr(liveness, "_WATCH_SECONDS", interval)
    monkeypatch.setattr(shared_health, "_PAUSES", 1000)  # however busy this machine is
    with contextlib.ExitStack() as stack:
        fakes = stack.enter_context(fake_servers(1, answer_seconds=LONG))
        run = uuid.uuid4().hex if shared else None
        engines = []
        for rank in range(pools):
            place = Place(rank, pools, run)
            engines.append(ServerPool(fakes.urls, None, main=not rank, place=place))
            stack.callback(engines[-1].close)
        fakes.reset()
        began = time.monotonic()
        sampling = EngineSampling(1.0, 4, ())
        rollouts = [engine.start([Request((1, 2), 1)], sampling) for engine in engines]
        while fakes.stats()[0]["requests"].get("/health", 0) < (4 if shared else 4 * pools):
            assert time.monotonic() - began < 120
            time.sleep(0.05)
        passed, asked = time.monotonic() - began, fakes.stats()[0]["requests"]["/health"]
        fakes.set(answer_seconds=0.0)
        assert [len(rollout.result()) for rollout in rollouts] == [1] * pools
        assert [engine.counts["servers_lost"] for engine in engines] == [0] * pools
    most = passed / interval + 1
    assert asked <= (most if shared else most * pools)
