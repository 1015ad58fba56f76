"""Cells of a study on a Ray cluster of two nodes: bit by bit those of this machine; a lost node takes one of them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import perl

pytest.importorskip("ray")

from perl.launch.on_ray import cells

CELL = "perl.training.studies.nursery import alone"
STUDY = {
    "recipe": "quickstart",
    "overrides": {
        "train.max_steps": 12,
        "train.prompts_per_step": 4,
        "train.num_generations": 4,
        "train.per_device_train_batch_size": 16,
        "eval.limit": 8,
        "eval.k": 1,
    },
    "grid": [{"peft.method": ["lora"], "peft.rank": [2]}, {"peft.method": ["ia3"]}],
    "seeds": {"score": [3]},
    "at_once": 2,
}


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster of two nodes of one core each beside its head, all on this machine; raylets' pids, their nodes."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # or tasks wait for every other program
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield cluster, {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    cluster.shutdown()


def command(folder, log):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "perl", "study", "mine.yaml", "-o", "out"]
    with log.open("w") as printed:
        return subprocess.Popen(line, cwd=folder, env=environment, stdout=printed, stderr=printed)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylets_with_a_cell():
    """Whose tasks have a cell's process."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if CELL in (place / "cmdline").read_text():
                found.add(parent(parent(int(place.name))))
    return found


def statuses(folder):
    return [cell["status"] for cell in json.loads((folder / "out" / "results.json").read_text())["cells"]]


def test_a_run_folder_is_carried_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "_PIECE_BYTES", 5)
    sizes = {"run.json": 12, "adapter/weights": 5, "plots/empty": 0}
    for number, (name, size) in enumerate(sizes.items()):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(bytes(range(number, number + size)))
    (tmp_path / "run" / ".lock").touch()  # whose process is not there
    carried = list(cells.pieces(tmp_path / "run"))
    assert [len(content) for name, content in carried if name == "run.json"] == pytest.approx([5, 5, 2])
    for name, content in carried:
        cells.add_piece(tmp_path / "there", name, content)
    files = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert len(files) == len(sizes)
    for path in files:
        assert path.read_bytes() == (tmp_path / "run" / path.relative_to(tmp_path / "there")).read_bytes()


@pytest.mark.nightly
def test_a_lost_node_takes_the_cell_in_hand_and_the_same_command_goes_on_to_the_local_bits(two_nodes, tmp_path):
    cluster, nodes = two_nodes
    (tmp_path / "mine.yaml").write_text(json.dumps({**STUDY, "ray": cluster.address}))
    log = tmp_path / "study.log"
    first = command(tmp_path, log)
    end = time.monotonic() + 1200.0
    while not (victims := raylets_with_a_cell() & nodes.keys()):
        assert time.monotonic() < end, log.read_text()
        assert first.poll() is None, log.read_text()
        time.sleep(0.1)
    cluster.remove_node(nodes[victims.pop()], allow_graceful=False)
    assert first.wait() == 1, log.read_text()
    assert sorted(statuses(tmp_path)) == ["done", "failed"]
    assert "its node is gone" in log.read_text()
    again = command(tmp_path, log)
    assert again.wait() == 0, log.read_text()
    assert statuses(tmp_path) == ["done", "done"]
    for row in perl.study(STUDY, tmp_path / "here").rows:
        there, here = (
            load_file(tmp_path / out / "cells" / "score" / row.name / "adapter" / "adapter_model.safetensors")
            for out in ("out", "here")
        )
        assert there.keys() == here.keys()
        assert max(float((there[name] - here[name]).abs().max()) for name in here) == 0.0
    assert not list((tmp_path / "out" / "cells").rglob(".incoming-*"))
