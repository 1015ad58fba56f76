"""What a killed run leaves in the folder and on servers is cleared by the next one, and nothing of one that lives."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from perl.rollouts.vllm import sync_folder
from perl.rollouts.vllm.servers import ServerPool
from perl.rollouts.vllm.sync_folder import Owner, clear, dead_runs, is_dead
from tests.rollouts.loopback import FakeVllm

DEAD, ALIVE = "perl-00000001", "perl-00000002"
# A run that has loaded two updates and is told nothing more.
_RUN = """
import sys, time, torch
from perl.rollouts.engine import Update
from perl.rollouts.vllm.servers import ServerPool
url, folder, run = sys.argv[1:]
engine = ServerPool([url], folder)
engine.take_folder(run)
for number in range(2):
    engine.load(Update(f"{run}-v{number}", "adapter", {"x": torch.zeros(1)}))
print("loaded", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def running(url, folder, run):
    process = subprocess.Popen([sys.executable, "-c", _RUN, url, str(folder), run], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "loaded\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.nightly
def test_the_next_run_clears_after_one_that_was_killed_and_not_after_one_that_lives(tmp_path, caplog):
    server = FakeVllm()
    server.adapters["someone"] = "/elsewhere/someone"
    server.adapters["perl-00000009-v1"] = "/not/seen/from/here/perl-00000009-v1"
    here, own = tmp_path / "shared", tmp_path / "own"
    with server() as url, running(url, here, ALIVE):
        with running(url, here, DEAD) as one, running(url, own, "perl-00000003") as other:
            for process in (one, other):
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        left = {name for name in server.adapters if name.startswith("perl-")}
        assert len(left) == 7
        engine = ServerPool([url], here)
        engine.take_folder("perl-00000004")
        assert set(server.adapters) == {"someone", "perl-00000009-v1", f"{ALIVE}-v0", f"{ALIVE}-v1"}
        assert sorted(path.name for path in here.iterdir()) == [
            f"{ALIVE}-v0",
            f"{ALIVE}-v1",
            f"{ALIVE}.owner",
            "perl-00000004.owner",
        ]
        assert list(own.iterdir()) == []  # known by the path that the server has
        assert "cleared what ended runs had left (perl-00000001, perl-00000003)" in caplog.text
        engine.close()
        assert not (here / "perl-00000004.owner").exists()


def test_an_owner_on_another_machine_lives_while_its_file_is_touched(tmp_path, monkeypatch):
    path = tmp_path / f"{DEAD}.owner"
    path.write_text(json.dumps({"machine": "another", "process": 1}))
    assert dead_runs(tmp_path) == []
    monkeypatch.setattr(sync_folder, "TOUCH_SECONDS", 0.05)
    os.utime(path, (1, 1))
    assert dead_runs(tmp_path) == [DEAD]
    owner = Owner(tmp_path, ALIVE)
    try:
        monkeypatch.setattr(sync_folder, "_machine", lambda: "this one, seen from another")
        assert dead_runs(tmp_path) == [DEAD]
    finally:
        owner.release(forgotten=True)
    clear(tmp_path, DEAD)
    assert list(tmp_path.iterdir()) == []


def test_a_run_lives_as_long_as_it_holds_its_lock_also_while_another_looks_at_it(tmp_path):
    path = tmp_path / f"{ALIVE}.owner"
    path.write_text("{}")
    looking = path.open("r+")
    fcntl.flock(looking, fcntl.LOCK_EX)
    threading.Timer(0.3, looking.close).start()
    owner = Owner(tmp_path, ALIVE)
    assert not is_dead(tmp_path, ALIVE)  # nor is this process a dead owner of its own
    assert dead_runs(tmp_path) == []
    owner.release(forgotten=False)  # a server that hung at the end still knows it
    assert is_dead(tmp_path, ALIVE)
    assert dead_runs(tmp_path) == [ALIVE]
