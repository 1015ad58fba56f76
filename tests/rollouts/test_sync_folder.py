"""Servers of a run are found again elsewhere, and what a killed run leaves in the folder and on servers is cleared."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch
from fake_servers import fake_servers
from safetensors.torch import load

from perl.errors import RecipeError
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.server_address import ServerAddress
from perl.rollouts.engine import Update
from perl.rollouts.open_engine import check_servers
from perl.rollouts.vllm import sync_folder
from perl.rollouts.vllm.servers import ServerPool
from perl.rollouts.vllm.sync_folder import Owner, clear, dead_runs, is_dead
from perl.run.host import Fleet, Host, host, hosted_by
from tests.rollouts.loopback import FakeVllm
from tests.rollouts.test_many_servers import begun, sampled_from, until, update

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


class Movable(Fleet):
    """Keeps updates in memory; a server may move to another address."""

    def __init__(self, urls):
        self.urls, self.kept, self.brought, self.unreachable, self.forgotten = list(urls), {}, Counter(), set(), []

    def addresses(self):
        return [ServerAddress(url) for url in self.urls]

    async def address(self, index):
        return self.urls[index]

    def path(self, name):
        return f"/memory/{name}"

    def publish(self, name, files):
        self.kept[name] = files

    async def bring(self, index, name):
        if index in self.unreachable or name not in self.kept:
            raise OSError(f"nobody brings {name} to {index}")
        self.brought[name, index] += 1

    def forget(self, name):
        self.forgotten.append(name)


@pytest.fixture
def opened():
    """Three servers, a fleet of the first two, and a pool that has begun with them."""
    with fake_servers(3) as fakes:
        fleet = Movable(fakes.urls[:2])
        with contextlib.closing(ServerPool(fleet.addresses(), fleet, timeout_seconds=60.0)) as pool:
            yield fakes, fleet, begun(pool)


def test_each_server_is_brought_each_update_once_and_old_ones_are_forgotten(opened):
    fakes, fleet, pool = opened
    pool.load(Update("v1", "adapter", {"a.weight": torch.arange(4.0)}, {"r": 2}))
    assert fleet.brought == {(name, index): 1 for name in ("v0", "v1") for index in (0, 1)}
    torch.testing.assert_close(load(fleet.kept["v1"]["adapter_model.safetensors"])["a.weight"], torch.arange(4.0))
    assert json.loads(fleet.kept["v1"]["adapter_config.json"]) == {"r": 2}
    for number in range(2, 6):
        pool.load(update(f"v{number}"))
    until(lambda: fleet.forgotten == ["v0", "v1", "v2", "v3"])
    until(lambda: all(one["adapters"] == ["v4", "v5"] for one in fakes.stats()[:2]))
    assert sampled_from(pool, "v5") == 12


def test_a_server_that_was_started_again_elsewhere_is_found_and_proves_itself(opened):
    fakes, fleet, pool = opened
    fleet.urls[1] = fakes.urls[2]
    fakes.restart(1)
    fakes.reset()
    until(lambda: sampled_from(pool, "v0") and fakes.stats()[2]["completions"] > 0)
    assert (fleet.brought["v0", 1], fakes.stats()[2]["proofs"], pool.counts["servers_lost"]) == (2, 1, 1)


def test_servers_that_a_recipe_starts_are_those_of_the_host(opened):
    fakes, _, _ = opened
    section = RolloutSection(backend="vllm-server", servers={"count": 3})
    assert (section.server_count, host().fleet) == (3, None)
    with pytest.raises(RecipeError, match=r"started by perl train on a Ray cluster only"):
        check_servers(section, 8, "adapter")

    class Hosting(Host):
        fleet = Movable(fakes.urls)

    with hosted_by(Hosting()):
        assert [row["url"] for row in check_servers(section, 8, "adapter")] == fakes.urls
