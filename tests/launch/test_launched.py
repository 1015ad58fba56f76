"""What launchers leave in the environment: which process of how many this one is, and which strategy was asked for."""

import os
from unittest import mock

import pytest
import torch

from perl.errors import RecipeError
from perl.launch import meeting
from perl.recipe.recipe import rank, world_size
from perl.recipe.sections import EngineSection
from perl.run import launched
from perl.run.joint_work import joining
from perl.run.launched import adopt_launcher, taken_over
from tests.launch.launchers import of_srun

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name in TORCH or name.startswith(("SLURM_", "ACCELERATE_", "FSDP_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    launched._asked_of_accelerate.cache_clear()
    with mock.patch.dict(os.environ):
        yield
    launched._asked_of_accelerate.cache_clear()


def adopted() -> dict[str, str]:
    adopt_launcher()
    return {name: os.environ[name] for name in TORCH if name in os.environ}


def test_a_task_of_srun_has_the_variables_of_torch(monkeypatch):
    several = {
        **{"JOB_ID": "4711", "STEP_ID": "2", "STEP_NUM_TASKS": "7", "NTASKS": "9", "PROCID": "6", "LOCALID": "0"},
        **{"NODEID": "3", "STEP_TASKS_PER_NODE": "2(x3),1", "STEP_NODELIST": "gpu-[007-009,012]-ib,login"},
    }
    for name, value in several.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert adopted() == {
        **{"RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "gpu-007-ib", "MASTER_PORT": str(15_000 + (7 * 4711 + 2) % 15_000)},
    }
    assert (world_size(), rank()) == (7, 6)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node07,node09", "node07"),
        ("node[11,07-09],login", "node11"),
        ("rack[00-03,7]b[010-041,9]-ib,other[1-2]", "rack00b010-ib"),
        ("gpu-1.cluster.org,gpu-[2-3].cluster.org", "gpu-1.cluster.org"),
    ],
)
def test_the_first_node_of_a_list_is_where_tasks_meet(monkeypatch, nodes, first):
    several = {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": nodes}
    for name, value in {**of_srun(0, 1), **several}.items():
        monkeypatch.setenv(name, value)
    assert adopted()["MASTER_ADDR"] == first


def test_tasks_on_one_node_meet_there_and_an_address_or_port_that_is_set_is_kept(monkeypatch):
    for name, value in of_srun(1, 29_999).items():
        monkeypatch.setenv(name, value)
    found = adopted()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "29999")
    for name in TORCH:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert adopted()["MASTER_ADDR"] == "10.0.0.1"


def test_one_task_and_the_script_of_a_batch_job_are_one_process(monkeypatch, caplog):
    for name, value in of_srun(0, 1, size=1).items():
        monkeypatch.setenv(name, value)
    assert "WORLD_SIZE" not in adopted()
    for name, value in {"SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name)
    assert "WORLD_SIZE" not in adopted()
    assert "srun perl train" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "SLURM_LOCALID"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "0"}, "SLURM_PROCID"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "accelerate was asked for several"),
    ],
    ids=["srun cut short", "srun out of range", "mpirun", "half of torch's", "accelerate on CPUs"],
)
def test_what_would_train_several_runs_or_one_process_in_silence_is_refused_with_the_line_to_type(
    monkeypatch, given, says
):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=says) as found:
        adopt_launcher()
    assert "torchrun --nproc-per-node" in str(found.value)


def test_fsdp2_of_accelerate_is_taken_over_once_and_its_own_is_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with caplog.at_level("INFO", logger="perl"):
        assert taken_over("ddp") == "fsdp2"
        assert "ACCELERATE_USE_FSDP" not in os.environ
        assert taken_over("ddp") == "fsdp2"
        assert taken_over("fsdp2") == "fsdp2"
    assert caplog.text.count("accelerate's configuration asks for FSDP2") == 1
    with pytest.raises(RecipeError, match="ddp, but accelerate's configuration asks for fsdp2"):
        taken_over("ddp", written=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, r"FSDP1 \(use fsdp2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, r"DeepSpeed \(fsdp2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
    ],
)
def test_other_sharding_of_accelerate_is_refused_by_name(monkeypatch, given, says):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=says):
        taken_over("ddp")


@pytest.mark.parametrize(
    ("given", "gpus", "compared"),
    [
        ({**of_srun(3, 1, size=8)}, 1, 1),  # srun --gpus-per-task 1
        ({**of_srun(3, 1, size=16)}, 8, 16),  # srun without it
        ({**of_srun(0, 1, size=1), "RANK": "3", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, 4, 8),
        ({**of_srun(0, 1), "TORCHELASTIC_RUN_ID": "a", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, 1, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH", "RANK": "0", "WORLD_SIZE": "8",
          "LOCAL_WORLD_SIZE": "8"}, 1, 8),
    ],
    ids=["srun, each its own", "srun, all", "torchrun in a job", "below srun", "in a batch script"],
)  # fmt: skip
def test_processes_are_compared_with_the_gpus_unless_srun_shows_each_its_own(monkeypatch, given, gpus, compared):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(meeting, "accelerator", lambda: torch.device("cuda"))
    adopt_launcher()
    assert meeting.processes_here() == compared
    if compared <= gpus:
        meeting.check_machine(EngineSection(), compared)
        return
    with pytest.raises(RecipeError, match=f"{compared} processes, and this machine has {gpus} GPUs"):
        meeting.check_machine(EngineSection(), compared)


@pytest.mark.parametrize(("visible", "chosen"), [(1, 0), (8, 3)])
def test_a_process_takes_its_own_of_the_gpus_that_it_sees(monkeypatch, visible, chosen):
    found = []
    for name, value in {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with joining(on_cpu=False):
        pass
    assert found == [chosen]
