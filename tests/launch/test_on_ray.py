"""A recipe on a Ray cluster: real clusters of this machine, whose workers, servers and drivers are killed."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from perl.policy.checkpoint import latest_step
from tests.launch.ray_runs import SERVER, WORKER, RayRun
from tests.servers import ENVIRONMENT, absent

pytest.importorskip("ray")
pytestmark = pytest.mark.nightly

STEPS = 8
TWO = {
    "extends": "quickstart",
    "train": {
        **{"max_steps": STEPS, "save_steps": 1, "save_total_limit": 2},
        **{"prompts_per_step": 4, "num_generations": 4, "per_device_train_batch_size": 8},
    },
    "rollout": {"max_completion_length": 32},
    "eval": {"enabled": False},
    "engine": {"processes": 2},
}
ON_RAY = {**TWO, "engine": {"processes": 2, "name": "ray", "address": "local", "restarts": 20}}
SERVED = {
    **ON_RAY,
    "rollout": {
        "max_completion_length": 32,
        "backend": "vllm-server",
        "servers": {"count": 1, "gpus_each": 0, "python": str(ENVIRONMENT / "bin" / "python")},
    },
}


@pytest.fixture
def ray_run(tmp_path):
    """Starts runs, of which nothing is left after the test."""
    started = []

    def start(recipe, *overrides, out="run"):
        started.append(RayRun(tmp_path, recipe, *overrides, out=out))
        return started[-1]

    yield start
    for run in started:
        run.end()


@pytest.fixture(scope="module")
def by_perl(tmp_path_factory):
    """The adapter of the same recipe by two processes of this machine, without Ray."""
    run = RayRun(tmp_path_factory.mktemp("local"), TWO)
    assert run.wait() == 0, run.log.read_text()
    return load_file(run.out / "adapter" / "adapter_model.safetensors")


def assert_same_adapter(run, expected):
    found = load_file(run.out / "adapter" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) == 0.0


def kept_by_ray(storage):
    """Whether Ray's list of checkpoints has one; a folder that was just written is not on it yet."""
    return any("checkpoint_2" in file.read_text() for file in storage.glob("run-*/checkpoint_manager_snapshot.json"))


def test_a_killed_worker_of_a_cluster_without_a_shared_folder_changes_no_bit(ray_run, by_perl, tmp_path):
    """Each process has a folder of its own; checkpoints come from Ray's storage."""
    storage = tmp_path / "storage"
    run = ray_run(ON_RAY, f"engine.storage={storage}")
    run.until(lambda: kept_by_ray(storage), "a checkpoint that Ray would go on from")
    run.kill(WORKER)
    assert run.wait() == 0, run.log.read_text()
    assert_same_adapter(run, by_perl)
    facts = json.loads((run.out / "run.json").read_text())
    assert (facts["status"], facts["steps"], facts["hardware"]["count"]) == ("done", STEPS, 2)
    steps = [json.loads(line)["step"] for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    log = run.log.read_text()
    assert "Ray has started all of them again, time 1: they go on from step" in log
    assert run.gone()


def served_from_the_policy(run):
    """The engines' log-probabilities of every sampled token are the trainer's, at every step."""
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 2e-3
    assert {row["rollout/steps_behind"] for row in rows} == {0.0}


@pytest.mark.skipif(bool(absent()), reason=absent() or "")
def test_a_killed_server_comes_back_and_every_token_is_the_policys(ray_run):
    """The only one, killed with its actor: Ray starts it again, at another address, where the run finds it."""
    run = ray_run(SERVED)
    run.until(lambda: run.steps() >= 1, "a step")
    killed = run.kill(SERVER)
    assert run.wait() == 0, run.log.read_text()
    served_from_the_policy(run)
    log = run.log.read_text()
    assert "Traceback" not in log
    lost, serves = (set(re.findall(rf"rollouts: (http\S+) {word}", log)) for word in ("is lost", "serves"))
    assert len(lost) == 1
    assert len(serves - lost) == 1
    assert run.gone()
    assert not list(Path("/dev/shm").glob(f"perl-rl-{os.getuid()}-*/server-{killed}*"))  # noqa: S108


@pytest.mark.skipif(bool(absent()), reason=absent() or "")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_servers_of_a_driver_that_ends_early_end_too(ray_run, signal_number):
    """Killed; or asked twice, so that the step in hand is given up."""
    run = ray_run(SERVED, "train.max_steps=1000")
    run.until(lambda: run.steps() >= 1, "a step")
    folders = {path.parent for path in Path("/dev/shm").glob(f"perl-rl-{os.getuid()}-*/server-*.log")}  # noqa: S108
    assert folders
    run.process.send_signal(signal_number)
    if signal_number == signal.SIGINT:
        run.until(lambda: "stopping after this step" in run.log.read_text(), "the first signal was heard")
        run.process.send_signal(signal_number)
    assert run.wait() == (130 if signal_number == signal.SIGINT else -signal.SIGKILL)
    assert run.gone()
    assert not [folder for folder in folders if folder.exists()]


@pytest.mark.parametrize("stored", [False, True])
def test_a_killed_driver_leaves_nothing_and_the_same_command_goes_on(ray_run, by_perl, tmp_path, stored):
    overrides = [f"engine.storage={tmp_path / 'storage'}"] if stored else []
    first = ray_run(ON_RAY, *overrides)
    checkpoints = (lambda: len(list((tmp_path / "storage").glob("run-*/checkpoint_*")))) if stored else first.steps
    first.until(lambda: checkpoints() >= 2, "two checkpoints")
    first.process.kill()
    first.process.wait()
    again = ray_run(ON_RAY, *overrides)
    assert again.wait() == 0, again.log.read_text()
    assert_same_adapter(again, by_perl)
    assert first.gone()


def test_a_killed_head_ends_the_run_in_one_line_that_says_where_the_same_command_goes_on(ray_run):
    """Ray alone would end the driver after a minute, with a page of its own and without a word of the run."""
    first = ray_run(ON_RAY, "train.max_steps=1000")
    first.until(lambda: first.steps() >= 2, "two steps")
    first.kill("gcs_server")
    assert first.wait() == 1
    (error,) = [line for line in first.log.read_text().splitlines() if line.startswith("error: ")]
    assert "the Ray cluster is gone: its head" in error
    assert "the same command goes on from step" in error
    assert first.gone()


def test_a_signal_ends_the_run_after_a_step_with_a_checkpoint(ray_run, by_perl):
    first = ray_run(ON_RAY, "train.save_steps=100")
    first.until(lambda: first.steps() >= 1, "a step")
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert json.loads((first.out / "run.json").read_text())["status"] == "interrupted"
    assert latest_step(first.out / "checkpoints") >= 1
    again = ray_run(ON_RAY, "train.save_steps=100")
    assert again.wait() == 0, again.log.read_text()
    assert_same_adapter(again, by_perl)


@pytest.fixture
def three_nodes():
    """A cluster of three nodes of one core each, all on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    others = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield cluster, {node.all_processes["raylet"][0].process.pid: node for node in (cluster.head_node, *others)}
    cluster.shutdown()


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_node_that_is_to_go_brings_a_checkpoint_and_a_start_elsewhere(ray_run, three_nodes, tmp_path):
    """The notice comes four seconds before the node goes; no checkpoint is due but the one that it asks for."""
    from ray._raylet import GcsClient

    cluster, nodes = three_nodes
    long = ("train.max_steps=60", "train.save_steps=1000")
    run = ray_run(ON_RAY, f"engine.address={cluster.address}", *long)
    run.until(lambda: run.steps() >= 3, "three steps")
    workers = [nodes[parent(pid)] for pid in worker_pids() if parent(pid) in nodes]
    victim = next(node for node in workers if node is not cluster.head_node)
    preemption, deadline = 2, int(time.time() * 1000) + 4000
    accepted, why = GcsClient(address=cluster.address).drain_node(victim.node_id, preemption, "preempted", deadline)
    assert accepted, why
    run.until(lambda: latest_step(run.out / "checkpoints") >= 3, "a checkpoint")
    cluster.remove_node(victim)
    assert run.wait() == 0, run.log.read_text()
    local = RayRun(tmp_path, {**TWO, "train": {**TWO["train"], "max_steps": 60, "save_steps": 1000}}, out="local")
    assert local.wait() == 0, local.log.read_text()
    assert_same_adapter(run, load_file(local.out / "adapter" / "adapter_model.safetensors"))
    assert "Ray has started all of them again, time 1" in run.log.read_text()


def worker_pids():
    """Of Ray Train's workers, whoever has started them."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(place.name)
            if WORKER in (place / "cmdline").read_text():
                found.append(pid)
    return found
