"""Cells of a study on a Ray cluster of two nodes: bit by bit those of this machine, one of a lost node included."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

import perl

pytest.importorskip("ray")

from ray.exceptions import RayError

from perl.launch.on_ray import cells
from perl.training.studies import on_ray
from perl.training.studies.conduct import usage_rows
from perl.training.studies.nursery import Job

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


@pytest.mark.parametrize(("patience", "lost"), [(1e9, False), (0.0, True)])
def test_a_cell_whose_study_does_not_answer_trains_on_and_comes_home(tmp_path, monkeypatch, patience, lost):
    marker, asked = tmp_path / "trains", []

    def get(_reference, timeout):
        if not marker.exists():
            return False
        asked.append(timeout)
        if lost or len(asked) <= 3:
            raise RayError("unreachable")
        return True

    monkeypatch.setattr(cells.ray, "get", get)
    monkeypatch.setattr(cells, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cells, "_PATIENCE_SECONDS", patience)
    program = (
        "import sys, time; from pathlib import Path; folder = Path(sys.argv[3]); folder.mkdir(); "
        "(folder / 'step').write_bytes(bytes(7)); Path(sys.argv[1]).touch(); time.sleep(3600)"
    )
    remote = SimpleNamespace(stop_asked=SimpleNamespace(remote=lambda: None))
    cell = cells.RemoteCell("run", ("-c", program, str(marker)), {}, 1, None)
    begun, piece, _, (_, end) = cells.train_cell(cell, remote)
    assert begun == (cells.BEGUN,)
    assert piece == (cells.PIECE, "step", bytes(7))
    assert (end.code, end.lost) == (-15, lost)
    assert len(asked) == pytest.approx(1 if lost else 4)


def test_a_cell_on_a_node_ends_with_its_task_from_before_it_imports(tmp_path):
    line = [sys.executable, "-P", "-c", on_ray._PROGRAM, json.dumps([["train", "quickstart"], None])]
    gone = subprocess.run([*line, str(os.getpid() + 1), str(tmp_path / "run")], check=False)
    assert gone.returncode == 130
    assert not (tmp_path / "run").exists()
    signal_of_parent = (
        "import ctypes, os, sys; from perl.training.studies.nursery import end_with; assert end_with(os.getppid()); "
        "found = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(found)); "
        "print(found.value, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", signal_of_parent], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["15", "False"]


def test_a_stop_takes_back_the_cells_that_no_node_has_begun(tmp_path, monkeypatch, caplog):
    tasks, cancelled, stopped = [], [], []

    class Task:
        """What comes of a task, as it is put here."""

        def __init__(self):
            self.coming = queue.SimpleQueue()
            tasks.append(self)

        def __iter__(self):
            return iter(self.coming.get, None)

    import ray

    monkeypatch.setattr(ray, "get", lambda what: what)
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    how = SimpleNamespace(remote=lambda *_: Task())
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=lambda **_: how))
    caplog.set_level("INFO", "perl")
    sent = on_ray.RayCells(SimpleNamespace(stop=SimpleNamespace(remote=lambda: stopped.append(1))), None, 1, {})
    names = ("trains", "waits", "late")
    jobs = [Job(name, (), str(tmp_path / f"{name}.log"), str(tmp_path / name)) for name in names]
    sent.begin(jobs[0])
    sent.begin(jobs[1])
    tasks[0].coming.put((cells.BEGUN,))
    while "trains" not in sent._placed:
        time.sleep(0.01)
    sent.stop()
    first = sent.next()
    sent.begin(jobs[2])  # the stop came amid it
    second = sent.next()
    assert [first["name"], second["name"]] == ["waits", "late"]
    assert [first["code"], second["code"]] == pytest.approx([130, 130])
    assert cancelled == [tasks[1], tasks[2]]
    for task in tasks[1:]:
        task.coming.put(None)  # which says nothing twice
    tasks[0].coming.put((cells.ENDED, cells.End(130, 5.0, 7, lost=False)))
    tasks[0].coming.put(None)
    last = sent.next()
    assert (last["name"], last["code"], last["cpu"]) == ("trains", 130, pytest.approx(5.0))
    assert sent._ends.empty()
    assert stopped == [1]
    assert "waits until 1 cells have a checkpoint: trains" in caplog.text


@pytest.mark.nightly
def test_a_lost_node_takes_the_cell_in_hand_which_another_one_trains_to_the_local_bits(two_nodes, tmp_path):
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
    assert first.wait() == 0, log.read_text()
    assert statuses(tmp_path) == ["done", "done"]
    assert "is sent once more: the cell was lost on the Ray cluster: its node is gone" in log.read_text()
    assert [row.get("lost", False) for row in usage_rows(tmp_path / "out")].count(True) == 1
    for row in perl.study(STUDY, tmp_path / "here").rows:
        there, here = (
            load_file(tmp_path / out / "cells" / "score" / row.name / "adapter" / "adapter_model.safetensors")
            for out in ("out", "here")
        )
        assert there.keys() == here.keys()
        assert max(float((there[name] - here[name]).abs().max()) for name in here) == 0.0
    assert not list((tmp_path / "out" / "cells").rglob(".incoming-*"))
