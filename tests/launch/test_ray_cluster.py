"""What is looked at before anything of a Ray cluster is reserved, with clusters and nodes that are given."""

import importlib.metadata as metadata
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from perl.errors import RecipeError, RolloutError
from perl.launch.agreement import statement
from perl.launch.watch import LostProcessError
from perl.recipe import Recipe
from perl.recipe.rollout_section import StartedServers
from perl.recipe.sections import EngineSection

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from perl.launch.on_ray import cluster as looked_at
from perl.launch.on_ray import own_cluster, owned_process
from perl.launch.on_ray.cluster import Cluster, check_nodes
from perl.launch.on_ray.driver import _cause
from perl.launch.on_ray.room import check_room, gpus_of_server
from perl.launch.on_ray.worker import Outcome, decided
from perl.rollouts.vllm.answers import AccessError
from perl.rollouts.vllm.version import check_version
from perl.training import on_ray
from perl.training.on_ray import _beside

NODES = {"id-a": "10.0.0.1", "id-b": "10.0.0.2"}


@pytest.mark.parametrize(
    ("gpus", "processes", "servers", "each", "needed"),
    [(64, 8, 56, 1, 64), (63, 8, 56, 1, 64), (8, 4, 2, 2, 8), (8, 4, 3, 2, 10), (7, 8, 0, 1, 8), (8, 8, 0, 1, 8)],
)
def test_gpus_that_are_asked_for_are_counted(gpus, processes, servers, each, needed):
    engine = EngineSection(name="ray", processes=processes)
    started = StartedServers(count=servers, gpus_each=each) if servers else None
    cluster = Cluster("head:6379", NODES, gpus, 1000)
    assert processes + servers * gpus_of_server(cluster, started) == needed
    if needed <= gpus:
        check_room(cluster, engine, started)
        return
    with pytest.raises(RecipeError) as caught:
        check_room(cluster, engine, started)
    (mistake,) = caught.value.mistakes
    assert mistake.message.startswith(f"{needed} GPUs are asked for")
    assert mistake.message.endswith(f"head:6379 has {gpus}")
    assert mistake.where == ("engine.processes" if processes > gpus else "rollout.servers")


def test_without_gpus_servers_take_none_and_processes_take_cores():
    cluster = Cluster("head:6379", NODES, 0, 4)
    assert gpus_of_server(cluster, StartedServers(count=3)) == 0
    assert gpus_of_server(Cluster("head:6379", NODES, 8, 4), StartedServers(count=3)) == 1
    check_room(cluster, EngineSection(name="ray", processes=4), StartedServers(count=4))
    with pytest.raises(RecipeError, match="30 servers without GPUs, and head:6379 has 4 cores") as caught:
        check_room(cluster, EngineSection(name="ray", processes=4), StartedServers(count=30))
    assert (caught.value.mistakes[0].where, caught.value.mistakes[0].hint) == ("rollout.servers.count", "at most 4")
    with pytest.raises(RecipeError, match="5 processes, and head:6379 has 4 cores"):
        check_room(cluster, EngineSection(name="ray", processes=5), None)


@pytest.fixture
def nodes(monkeypatch):
    """What each node answers, by its id: changes of the versions, and what it does not have."""
    answers = {"id-a": ({}, lambda _: []), "id-b": ({}, lambda _: []), "vllm": "0.32.0"}

    def asked(node, seen, servers, token):
        python = [servers.python] if servers is not None and servers.python else []
        return node, [*map(str, seen), *python, *([str(token)] if token else [])]

    def answer(question, _):
        node, paths = question
        found = statement({})
        versions, absent = answers[node]
        versions = {**found["versions"], **versions}
        return {**found, "versions": versions, "absent": absent(paths), "vllm": answers["vllm"]}

    monkeypatch.setattr(looked_at, "_asked", asked)
    monkeypatch.setattr(looked_at, "_answer", answer)
    return answers


def check(tmp_path, *, storage=None, python=None, shared=True):
    cluster = Cluster("head:6379", NODES, 0, 4)
    run = tmp_path / "run" if shared else None
    servers = StartedServers(count=1, python=python) if python else None
    how = {"storage": storage, "shared": run, "servers": servers, "check_vllm": check_version}
    check_nodes(cluster, [tmp_path / "recipe.yaml"], **how)


@pytest.mark.usefixtures("nodes")
def test_nodes_alike_pass_and_nothing_is_left_behind(tmp_path):
    check(tmp_path)
    check(tmp_path, storage=str(tmp_path / "storage"), shared=False)
    check(tmp_path, storage="s3://bucket/perl", shared=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_another_version_on_a_node_is_one_line(nodes, tmp_path):
    nodes["id-b"] = ({"torch": "2.11.0"}, lambda _: [])
    with pytest.raises(RecipeError, match=r"node 10.0.0.2 has other versions than this one: torch"):
        check(tmp_path)


def test_a_storage_that_a_node_does_not_see_is_one_line(nodes, tmp_path):
    nodes["id-b"] = ({}, lambda paths: [path for path in paths if ".seen-" in path])
    with pytest.raises(RecipeError) as caught:
        check(tmp_path, storage=str(tmp_path / "storage"), shared=False)
    assert caught.value.mistakes[0].where == "engine.storage"
    assert "node 10.0.0.2 does not see" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        check(tmp_path)
    assert caught.value.mistakes[0].where == "train.output_dir"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("storage", ["s3x://bucket", "s3://", "https://host/place"])
def test_a_storage_that_is_none_is_refused_before_a_node_is_asked(tmp_path, storage):
    with pytest.raises(RecipeError, match="is no place that Ray can keep files in") as caught:
        check(tmp_path, storage=storage, shared=False)
    assert caught.value.mistakes[0].where == "engine.storage"


def test_a_node_without_the_recipe_or_the_servers_python_is_one_line(nodes, tmp_path):
    nodes["id-a"] = ({}, lambda paths: [path for path in paths if path.endswith(("recipe.yaml", "python"))])
    with pytest.raises(RecipeError, match=r"node 10.0.0.1 does not have .*recipe.yaml"):
        check(tmp_path)
    nodes["id-a"] = ({}, lambda paths: [path for path in paths if path.endswith("python")])
    with pytest.raises(RecipeError, match=r"node 10.0.0.1 does not have /opt/vllm/bin/python") as caught:
        check(tmp_path, python="/opt/vllm/bin/python")
    assert caught.value.mistakes[0].where == "rollout.servers.python"


@pytest.mark.parametrize(
    ("vllm", "says"),
    [("", "has no vLLM for servers by /opt/vllm/bin/python"), ("0.9.1", "vLLM 0.9.1 is not supported"), ("0.32.3", "")],
)
def test_servers_without_a_tested_vllm_are_one_line_that_names_the_node(nodes, tmp_path, vllm, says):
    nodes["vllm"] = vllm
    if not says:
        check(tmp_path, python="/opt/vllm/bin/python")
        return
    with pytest.raises(RecipeError, match=says) as caught:
        check(tmp_path, python="/opt/vllm/bin/python")
    (mistake,) = caught.value.mistakes
    assert "node 10.0.0.1" in mistake.message
    assert mistake.where == "rollout.servers.python"


def test_what_a_node_is_asked_is_what_its_python_has(tmp_path):
    """Two Pythons: this one, which need not have vLLM, and one that does not run."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    try:
        own = version(metadata.packages_distributions()["vllm"][0])
    except KeyError:
        own = ""
    assert looked_at._vllm_of(None) == own
    assert looked_at._vllm_of(str(broken)) == looked_at._vllm_of(str(tmp_path / "absent")) == ""


@pytest.mark.parametrize(
    ("sizes", "count", "each", "places"),
    [([2] * 8, 1, 4, 0), ([4, 4], 2, 4, 2), ([6, 6], 3, 4, 2), ([3, 3, 2], 2, 3, 2), ([7], 2, 3, 2)],
)
def test_servers_are_placed_node_by_node(sizes, count, each, places):
    by_node = {f"id-{number}": (gpus, 8) for number, gpus in enumerate(sizes)}
    cluster = Cluster("head:6379", {node: "10.0.0.1" for node in by_node}, sum(sizes), 8 * len(sizes), by_node)
    engine, servers = EngineSection(name="ray", processes=1, device="cpu"), StartedServers(count=count, gpus_each=each)
    assert sum(gpus // each for gpus in sizes) == places
    if count <= places:
        check_room(cluster, engine, servers)
        return
    with pytest.raises(RecipeError) as caught:
        check_room(cluster, engine, servers)
    (mistake,) = caught.value.mistakes
    if places:
        assert (
            mistake.message == f"{count} servers of {each} GPUs each, and the nodes of head:6379 have room for {places}"
        )
    else:
        assert mistake.message.endswith(f"the largest has {max(sizes)}")


def test_the_end_of_a_run_is_that_of_the_process_that_has_caused_it():
    """Its rank, its code and its exit code; a class that the driver has not keeps its code."""
    lost = Outcome.of(LostProcessError("rank 1 (pid 7) failed"))
    wrong = Outcome.of(AccessError("401 from http://a:1", "rollout.servers", "its key"))
    assert (lost.lost, wrong.lost, wrong.kind) == (True, False, "RolloutError")
    by_one = decided({0: lost, 1: replace(wrong, who="rank 1 (pid 7 on b)")}).error()
    assert isinstance(by_one, RolloutError)
    assert str(by_one) == "rollout.servers: rank 1 (pid 7 on b): 401 from http://a:1 (its key)"
    assert (by_one.code, by_one.exit_code) == (AccessError.code, 1)
    there = by_one.moved(lambda where: f"r.yaml:3: {where}")
    assert (there.code, there.exit_code, there.mistakes[0].where) == (AccessError.code, 1, "r.yaml:3: rollout.servers")
    by_all = decided({1: wrong, 0: Outcome.of(RecipeError("no such model", "model.name"))}).error()
    assert (type(by_all), str(by_all), by_all.exit_code) == (RecipeError, "model.name: no such model", 2)
    alone = decided({0: lost}).error()
    assert (alone.code, alone.exit_code) == (LostProcessError.code, 1)


@pytest.mark.parametrize(("address", "cores"), [("127.0.0.1:1", 2), ("local", 3), ("local", 2)])
def test_a_dry_run_says_in_a_line_what_the_cluster_is_and_starts_none(monkeypatch, address, cores):
    monkeypatch.setattr(on_ray, "accelerator", lambda: None)
    monkeypatch.setattr(on_ray.os, "cpu_count", lambda: cores)
    settings = [f"engine.address={address}", "engine.name=ray", "engine.processes=3", "train.prompts_per_step=3"]
    recipe = Recipe.load("quickstart", settings)
    if address != "local":
        line = on_ray.look_at_cluster(recipe, "quickstart")
        assert line.startswith(f"Ray: not reached from here, {address}: no Ray cluster answers there")
    elif cores == 3:
        line = "Ray: a cluster of this machine alone, which has 0 GPUs and 3 cores"
        assert on_ray.look_at_cluster(recipe, "quickstart") == line
    else:
        with pytest.raises(RecipeError, match="3 processes, and this machine's Ray cluster has 2 cores"):
            on_ray.look_at_cluster(recipe, "quickstart")
    assert not ray.is_initialized()


def test_processes_that_were_lost_are_named_in_our_words():
    """Not those that fail for want of them; where none was lost, each error by its last line."""
    gone = WorkerHealthCheckFailedError(
        "A worker health check failed.", failure=RayActorError(error_msg="Worker exit: X")
    )
    other = RuntimeError("Traceback\n  ...\nRuntimeError: rank 1 is gone")
    assert _cause(WorkerGroupError("", {0: other, 1: gone})).startswith(
        "rank 1 ended without a word, as a process does"
    )
    assert _cause(WorkerGroupError("", {0: other})) == "rank 0: RuntimeError: rank 1 is gone"
    short = WorkerHealthCheckFailedError("", failure=RayActorError(error_msg="NODE_OUT_OF_MEMORY"))
    assert _cause(ControllerError(RuntimeError("3 were killed\nfor want of memory"))) == "3 were killed"
    assert _cause(WorkerGroupError("", {3: short})).startswith("rank 3 was ended by Ray, since its node had too little")


def test_what_a_killed_run_left_of_its_own_cluster_goes_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(own_cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    code = "import sys, time; from perl.launch.on_ray import own_cluster as own; own.tempfile.tempdir = sys.argv[1]\n"
    code += "with own.own_folder() as folder: print(folder, flush=True); time.sleep(1000)"
    strange = tmp_path / "perl-ray-strange"
    strange.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        left = Path(other.stdout.readline().strip())
        for runs in (True, False):
            with own_cluster.own_folder() as own:
                assert own.parent == tmp_path
                assert left.is_dir() == runs
                (own / "session").mkdir()
            assert sorted(tmp_path.iterdir()) == sorted([strange, *([left] if runs else [])])
            other.kill()
            other.wait()


def test_the_ends_of_long_logs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(own_cluster, "_KEPT_BYTES", 4)
    (tmp_path / "logs").mkdir()
    for name, text in (("worker-1.err", "Traceback"), ("raylet.out", ""), ("gcs.out", "up"), ("socket", "x")):
        (tmp_path / "logs" / name).write_text(text)
    kept = own_cluster.keep_logs(tmp_path / "logs", tmp_path / "run" / "ray-logs")
    assert {file.name: file.read_text() for file in kept.iterdir()} == {"worker-1.err": "back", "gcs.out": "up"}


def test_modules_beside_a_recipe_that_was_loaded_are_looked_for_on_every_node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "r.yaml").write_text('extends: quickstart\nrewards: {"beside_ray:good": 1}\n')
    recipe = Recipe.load("deep/r.yaml")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path / "deep")])
    seen = [tmp_path]
    assert _beside(recipe, seen) == [str(tmp_path / "deep")]
    assert seen == [tmp_path, tmp_path / "deep"]
    assert _beside(recipe, []) == ["deep"]  # of the copy that a job has of this folder
    assert _beside("deep/r.yaml", []) == _beside(recipe.as_dict(), []) == []


def owner_of_a_sleeper(folder: Path, pid_file: Path) -> "subprocess.Popen[bytes]":
    """A process that owns a shell with a child, as an actor owns a server."""
    command = ["/bin/sh", "-c", f"sleep 1000 & echo $! > {pid_file}; wait $!"]
    watched = [sys.executable, owned_process.__file__, str(folder), pid_file.name, *command]
    code = f"import subprocess, time; subprocess.Popen({watched!r}, stdin=subprocess.PIPE); time.sleep(1000)"
    return subprocess.Popen([sys.executable, "-c", code])


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
    memory = tmp_path / "memory"
    files = [tmp_path / str(number) for number in range(2)]
    owners = [owner_of_a_sleeper(memory, file) for file in files]
    until(lambda: all(file.exists() and file.read_text().strip() for file in files))
    pids = [int(file.read_text()) for file in files]
    (memory / "v0").mkdir()
    for number, owner in enumerate(owners):
        assert [lives(pid) for pid in pids] == [other >= number for other in range(2)]
        assert memory.is_dir()
        os.kill(owner.pid, 9)
        owner.wait()
        until(lambda: not lives(pids[number]))  # noqa: B023
    until(lambda: not memory.exists())


def test_no_child_of_the_owner_is_left_that_could_be_killed_before_it_ends_what_it_has_started(tmp_path):
    """Ray kills an actor's children as it ends; and who asks is told that the command has ended, and how."""
    memory, file = tmp_path / "memory", tmp_path / "0"
    owner = owner_of_a_sleeper(memory, file)
    until(lambda: file.exists() and file.read_text().strip())
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    until(lambda: not any(lives(int(child)) for child in children))
    pid = int(file.read_text())
    assert lives(pid)
    os.kill(pid, 9)
    until(lambda: (memory / f"{file.name}{owned_process.ENDED}").exists())
    assert int((memory / f"{file.name}{owned_process.ENDED}").read_text()) == 128 + 9
    os.kill(owner.pid, 9)
    owner.wait()
    until(lambda: not memory.exists())
