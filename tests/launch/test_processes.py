"""Two processes of one run, as every launcher starts them: one of them is killed, stopped or differs from the other."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from perl.recipe.sections import STRATEGIES
from tests import warm
from tests.conftest import CHECKOUT
from tests.launch import launchers
from tests.launch.launchers import MODULE, OURS, RUN, TORCHRUN, TRAIN, by_srun, run, run_warm, write_recipe
from tests.oracles.two_trainers import relative_difference

BY_US = [*OURS, *TRAIN, "--processes", "2"]
BY_TORCHRUN = [*TORCHRUN, *TRAIN]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, in one go."""
    folder = tmp_path_factory.mktemp("straight")
    write_recipe(folder)
    code, said = run_warm(BY_US, folder)
    assert code == 0, said
    assert launchers.facts(folder)["hardware"]["count"] == 2
    assert said.count("card  ") == 1
    assert [said.count(f"step {step}/4") for step in range(1, 5)] == [1, 1, 1, 1]
    assert "rank 1" not in said
    return folder


def assert_goes_on(command: list[str], folder: Path, straight: Path, run=run) -> None:
    """The same command ends the run as if nothing had happened."""
    code, said = run(command, folder)
    assert code == 0, said
    assert launchers.facts(folder)["status"] == "done"
    assert "error" not in launchers.facts(folder)
    assert launchers.steps_logged(folder) == [1, 2, 3, 4]
    assert launchers.adapter(folder) == launchers.adapter(straight)


def assert_failed(said: str, *words: str) -> None:
    """One line says who failed."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    for word in (*words, "the same command goes on from step 2"):
        assert word in lines[0]
    assert ("Traceback" in said) == (") failed: " in lines[0])
    assert "gloo" not in said


@pytest.mark.parametrize(
    ("strategy", "rank", "wire", "end"),
    [
        ("ddp", 0, "4 9", "was killed by SIGKILL"),
        ("ddp", 1, "4 0", "failed: OutOfMemoryError: simulated"),
        *(pytest.param(strategy, 1, "4 9", "SIGKILL", marks=pytest.mark.nightly) for strategy in STRATEGIES),
    ],
)
def test_a_rank_that_fails_is_named_and_the_same_command_goes_on(tmp_path, straight, strategy, rank, wire, end):
    """Whatever the strategy, it ends with the adapter of the uninterrupted run of DDP: all train the same bits."""
    command = [*BY_US, f"engine.strategy={strategy}"]
    write_recipe(tmp_path)
    (tmp_path / f"tripwire-{rank}").write_text(wire)
    code, said = run_warm(command, tmp_path)
    assert code == 1, said
    assert_failed(said, f"rank {rank} (pid ", end)
    assert launchers.facts(tmp_path)["status"] == "failed"
    assert f"rank {rank} (pid " in launchers.facts(tmp_path)["error"]
    assert end in launchers.facts(tmp_path)["error"]
    assert_goes_on(command, tmp_path, straight, run_warm)


@pytest.mark.nightly
def test_a_killed_rank_is_named_under_torchrun_by_one_that_is_left(tmp_path, straight):
    rank = 1
    write_recipe(tmp_path)
    (tmp_path / f"tripwire-{rank}").write_text("4 9")
    code, said = run(BY_TORCHRUN, tmp_path)
    assert code == 1, said
    line = next(line for line in said.splitlines() if line.startswith("error: "))
    assert f"rank {rank} (pid " in line
    assert "the same command goes on from step 2" in line
    assert launchers.facts(tmp_path)["status"] == "failed"
    assert_goes_on(BY_TORCHRUN, tmp_path, straight)


@pytest.mark.nightly
@pytest.mark.parametrize(("to", "number"), [("group", signal.SIGINT), ("launcher", signal.SIGTERM)])
def test_a_signal_ends_the_step_on_all_and_writes_a_checkpoint(tmp_path, straight, to, number):
    write_recipe(tmp_path)
    process = launchers.started(BY_US, tmp_path)
    while process.poll() is None and not launchers.steps_logged(tmp_path):
        time.sleep(0.01)
    os.killpg(process.pid, number) if to == "group" else process.send_signal(number)
    code, said = launchers.ended(process)
    assert code == 130, said
    assert said.count("stopping after this step") == 1
    assert said.count("stopped after step") == 1
    assert "Traceback" not in said
    assert launchers.facts(tmp_path)["status"] == "interrupted"
    assert_goes_on(BY_US, tmp_path, straight)


@pytest.mark.nightly
def test_processes_whose_launcher_is_killed_stop_in_order(tmp_path, straight):
    write_recipe(tmp_path)
    process = launchers.started(BY_US, tmp_path)
    while process.poll() is None and not launchers.steps_logged(tmp_path):
        time.sleep(0.01)
    process.kill()
    _, said = launchers.ended(process)  # whose pipes end with the last of them
    assert launchers.facts(tmp_path)["status"] == "interrupted", said
    assert_goes_on(BY_US, tmp_path, straight)


@pytest.mark.nightly
def test_a_script_trains_twice_and_no_process_goes_on_before_the_main_one_is_done(tmp_path):
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    command = ["-m", "tests.launch.trained_twice"]
    done = warm.run_distributed(command, tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    for number, main, other in zip((1, 2), *found, strict=True):
        assert main["published"]
        assert other["published"], "it went on before the main process had published"
        written = json.loads((tmp_path / f"run-{number}" / "run.json").read_text())
        assert written["status"] == "done"
        assert main["facts"] == other["facts"] == written


def test_a_mistake_is_told_once_with_its_exit_code(tmp_path):
    write_recipe(tmp_path)
    output = tmp_path / "taken"
    output.mkdir()
    (output / "something").touch()
    code, said = run_warm([*BY_US, "-o", str(output)], tmp_path)
    assert code == 2, said
    assert said.count("is not empty and holds no run") == 1
    assert said.count("error: ") == 1
    assert "Traceback" not in said


@pytest.mark.nightly
def test_tasks_of_srun_are_one_run_and_one_without_the_folder_is_named(tmp_path):
    apart = tmp_path / "apart", tmp_path / "elsewhere"
    for folder in apart:
        folder.mkdir()
        write_recipe(folder)
    (first, said), (second, other) = by_srun(TRAIN, apart)
    assert (first, second) == (2, 2), said + other
    assert "rank 1 (pid " in said
    assert "does not see it as rank 0 does" in said
    assert "all processes need one folder" in said
    assert other == ""
    assert not list((apart[0] / RUN).glob(".together-*"))
    assert not (apart[1] / RUN / "run.json").exists()
    assert launchers.steps_logged(apart[0]) == []


def test_a_task_of_srun_with_another_recipe_is_named(tmp_path):
    apart = tmp_path / "apart", tmp_path / "elsewhere"
    for folder in apart:
        folder.mkdir()
        write_recipe(folder)
    recipe = apart[1] / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("1e-3", "2e-3"))
    (first, said), (second, other) = by_srun(TRAIN, apart)
    assert (first, second) == (2, 2), said + other
    assert "has another recipe than rank 0: train.learning_rate is 0.001 there, 0.002 here" in said
    assert "rank 1 (pid " in said
    assert other == ""


def by_accelerate(kind: str, folder: Path, **further: object) -> list[str]:
    """The command that trains by accelerate, with a configuration for two processes."""
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "num_processes": 2, "num_machines": 1,
              "machine_rank": 0, "mixed_precision": "no", "use_cpu": True, "main_process_port": 0}  # fmt: skip
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config | further))
    launcher = [*MODULE, "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
    return [*launcher, "-m", "perl", *TRAIN]


@pytest.mark.nightly
def test_fsdp2_of_accelerate_is_trained_as_strategy_fsdp2(tmp_path, straight):
    write_recipe(tmp_path)
    command = by_accelerate("FSDP", tmp_path, fsdp_config={"fsdp_version": 2})
    code, said = run(command, tmp_path)
    assert code == 0, said
    assert said.count("accelerate's configuration asks for FSDP2: strategy fsdp2") == 1
    ours, theirs = (
        load_file(folder / RUN / "adapter" / "adapter_model.safetensors") for folder in (tmp_path, straight)
    )
    assert relative_difference(ours, theirs) <= 1e-5


def test_a_script_is_told_what_to_type_where_it_asks_for_processes(tmp_path):
    import perl
    from perl.errors import RecipeError

    write_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"torchrun --nproc-per-node 2") as found:
        perl.train("recipe.yaml", ["engine.processes=2"])
    assert "engine.processes" in found.value.mistakes[0].where
    assert sys.modules["perl"] is perl
