"""What is looked at before anything of a Ray cluster is reserved, with clusters and nodes that are given."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perl.errors import RecipeError, RolloutError, RunFolderError
from perl.recipe import Recipe
from perl.recipe.rollout_section import StartedServers
from perl.recipe.sections import EngineSection
from perl.run.failure import Failure, LostProcessError, first_cause

pytest.importorskip("ray")

import ray

from perl.launch.on_ray import cluster, driver, owned_process
from perl.launch.on_ray.cluster import Cluster, check_room, connected, gpus_of_server
from perl.launch.start import ProcessFailedError
from perl.rollouts.vllm.answers import AccessError
from perl.run.folder import name_in_storage
from perl.training.on_ray import _beside, _take_name

NICENESS = "RAY_worker_niceness"


def refused(found, processes, servers):
    """The one mistake of a run that a cluster cannot hold; None: it can."""
    started = None if servers is None else StartedServers(**servers)
    try:
        check_room(found, EngineSection(name="ray", processes=processes), started)
    except RecipeError as error:
        (mistake,) = error.mistakes
        return mistake
    return None


@pytest.mark.parametrize(
    ("gpus", "processes", "servers", "each", "needed"),
    [(64, 8, 56, 1, 64), (63, 8, 56, 1, 64), (8, 4, 2, 2, 8), (8, 4, 3, 2, 10), (8, 8, 0, 1, 8)],
)
def test_gpus_that_are_asked_for_are_counted(gpus, processes, servers, each, needed):
    cluster = Cluster("head:6379", gpus, 1000)
    found = refused(cluster, processes, {"count": servers, "gpus_each": each} if servers else None)
    assert (found is None) == (needed <= gpus)
    if found is not None:
        assert found.message.startswith(f"{needed} GPUs are asked for")
        assert found.where == "rollout.servers"


def test_without_gpus_servers_take_none_and_processes_take_cores_and_with_them_each_server_needs_a_node():
    cluster = Cluster("head:6379", 0, 4)
    assert gpus_of_server(cluster, StartedServers(count=3)) == 0
    assert gpus_of_server(Cluster("head:6379", 8, 4), StartedServers(count=3)) == 1
    assert refused(cluster, 4, {"count": 4}) is None
    assert refused(cluster, 4, {"count": 30}).where == "rollout.servers.count"
    assert refused(cluster, 5, None).message == "5 processes, and head:6379 has 4 cores"
    for sizes, count, each, places in (((6, 6), 2, 4, 2), ((6, 6), 3, 4, 2), ((3, 3, 2), 2, 3, 2), ((2,) * 8, 1, 4, 0)):
        found = refused(Cluster("head:6379", sum(sizes) + 1, 8, sizes), 1, {"count": count, "gpus_each": each})
        assert (found is None) == (count <= places)
        assert found is None or f"have room for {places}" in found.message


def test_an_address_where_no_cluster_is_takes_one_line():
    with pytest.raises(RecipeError) as caught, connected(EngineSection(name="ray", address="127.0.0.1:1")):
        pass
    (mistake,) = caught.value.mistakes
    assert mistake.message.startswith("127.0.0.1:1: no Ray cluster answers there")
    assert mistake.where == "engine.address"


def test_processes_of_a_cluster_that_starts_here_have_the_priority_of_who_starts_it(monkeypatch):
    """Beside two busy processes on two cores Ray's own 15 leaves them a thirtieth of a core each."""
    seen = []
    monkeypatch.setattr(ray, "init", lambda **how: seen.append((how["address"], os.environ.get(NICENESS))))
    monkeypatch.setattr(cluster, "_seen", lambda name: Cluster(name, 0, 1))
    for chosen, expected in ((None, "0"), ("5", "5")):
        monkeypatch.delenv(NICENESS, raising=False)
        if chosen is not None:
            monkeypatch.setenv(NICENESS, chosen)
        with connected(EngineSection(name="ray", address="local")):
            assert seen.pop() == ("local", expected)


@pytest.mark.parametrize(("late", "restarts"), [(2, 2), (3, 2), (4, None)])
def test_a_cluster_that_starts_late_is_started_again_and_one_line_says_that_it_never_did(
    monkeypatch, caplog, late, restarts
):
    """Ray raises a bare Exception, and leaves what it has started of the node."""
    node, tries, ended = object.__new__(cluster.Node), [], []
    words = "The current node timed out during startup. This could happen because some of the raylet failed to startup"

    def start(self):  # noqa: ARG001 (the frame is looked at)
        raise Exception(words)

    def init(**_):
        tries.append(1)
        if len(tries) <= late:
            start(node)

    monkeypatch.setattr(cluster.Node, "kill_all_processes", lambda *_, **__: ended.append(1))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "_seen", lambda name: Cluster(name, 0, 1))
    engine, allowed = EngineSection(name="ray", address="local", restarts=restarts), 3 if restarts is None else restarts
    with caplog.at_level("INFO", "perl"):
        if late <= allowed:
            with connected(engine):
                pass
        else:
            with pytest.raises(ProcessFailedError, match="did not start within 30 s") as caught, connected(engine):
                pass
            assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (1, 1)
    assert len(tries) == min(late, allowed) + 1
    assert len(ended) == late if late <= allowed else allowed + 1
    assert caplog.text.count("they are started again") == min(late, allowed)


@pytest.mark.parametrize(("killed", "restarts", "tries"), [(2, 2, 3), (3, 2, 3), (0, 2, 1)])
def test_what_watches_over_a_run_is_started_again_so_often(killed, restarts, tries):
    """Ray's actor, which a node that is short of memory may kill; what the training itself raises is its end."""
    ended, asked = [], []

    def fit():
        asked.append(1)
        if len(asked) <= killed:
            raise ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")
        raise ZeroDivisionError

    driver._fit(SimpleNamespace(fit=fit), restarts, ended)
    assert len(asked) == tries
    assert isinstance(ended[0], ZeroDivisionError if killed <= restarts else ray.exceptions.OutOfMemoryError)


def test_a_run_in_rays_storage_is_taken_over_by_its_name(tmp_path):
    (tmp_path / "kept" / "mine-1").mkdir(parents=True)
    (tmp_path / "kept" / "mine-1" / "checkpoint_manager_snapshot.json").touch()
    storage, folder = str(tmp_path / "kept"), tmp_path / "runs" / "here"
    _take_name(f"{storage}/mine-1", storage, folder)
    assert name_in_storage(folder) == "mine-1"
    for wrong in ("mine-2", "", "deep/mine-1"):
        with pytest.raises(RunFolderError, match="holds no checkpoint of a run on Ray"):
            _take_name(f"{storage}/{wrong}", storage, tmp_path / "runs" / "other")
    assert not (tmp_path / "runs" / "other").exists()
    (tmp_path / "kept" / "mine-1").rename(tmp_path / "kept" / "mine-3")
    with pytest.raises(RunFolderError, match="holds another run than mine-3"):
        _take_name(f"{storage}/mine-3", storage, folder)


def test_the_end_of_a_run_is_that_of_the_process_that_has_caused_it():
    """Its rank, its code and its exit code; a class that the driver has not keeps its code."""
    lost = Failure.of(LostProcessError("rank 1 (pid 7) failed"), 0)
    wrong = Failure.of(AccessError("401 from http://a:1", "rollout.servers", "its key"), 1)
    assert (lost.kind, wrong.kind, wrong.error_class) == ("lost", "mistake", "RolloutError")
    found = first_cause({0: lost, 1: wrong}).error()
    assert isinstance(found, RolloutError)
    assert str(found).startswith("rollout.servers: rank 1 (pid ")
    assert str(found).endswith(": 401 from http://a:1 (its key)")
    there = found.moved(lambda where: f"r.yaml:3: {where}")
    assert (there.code, there.exit_code, there.mistakes[0].where) == (AccessError.code, 1, "r.yaml:3: rollout.servers")
    assert first_cause({0: lost}) is None
    assert lost.error().code == LostProcessError.code


def test_modules_beside_a_recipe_that_was_loaded_are_where_the_processes_find_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "r.yaml").write_text('extends: quickstart\nrewards: {"beside_ray:good": 1}\n')
    recipe = Recipe.load("deep/r.yaml")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path / "deep")])
    assert _beside(recipe, in_job=False) == [str(tmp_path / "deep")]
    assert _beside(recipe, in_job=True) == ["deep"]  # of the copy that a job has of this folder
    assert _beside("deep/r.yaml", in_job=False) == []


def lives(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except FileNotFoundError:
        return False


def until(seen, seconds=120.0):
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_a_killed_owner_has_started_ends_and_the_last_one_clears_the_nodes_memory(tmp_path):
    """None is a child of its owner: Ray kills an actor's children before they could end what they have started."""
    memory = tmp_path / "memory"
    files = [tmp_path / str(number) for number in range(2)]
    owners = []
    for file in files:  # each owns a shell with a child, as an actor owns a server
        command = ["/bin/sh", "-c", f"sleep 1000 & echo $! > {file}; wait $!"]
        watched = [sys.executable, owned_process.__file__, str(memory), file.name, *command]
        code = f"import subprocess, time; subprocess.Popen({watched!r}, stdin=subprocess.PIPE); time.sleep(1000)"
        owners.append(subprocess.Popen([sys.executable, "-c", code]))
    until(lambda: all(file.exists() and file.read_text().strip() for file in files))
    pids = [int(file.read_text()) for file in files]
    children = Path(f"/proc/{owners[0].pid}/task/{owners[0].pid}/children").read_text().split()
    until(lambda: not any(lives(int(child)) for child in children))
    (memory / "v0").mkdir()
    os.kill(pids[1], 9)
    until(lambda: (memory / f"1{owned_process.ENDED}").exists())
    assert int((memory / f"1{owned_process.ENDED}").read_text()) == 128 + 9
    for owner in owners:
        assert memory.is_dir()
        os.kill(owner.pid, 9)
        owner.wait()
        until(lambda: not lives(pids[0]))
    until(lambda: not memory.exists())
