"""``perl train`` with verl as its engine: started, followed, stopped, gone on with and brought home.

verl is a stand-in, as a real process behind ``engine.python``: a package ``verl`` whose trainer writes verl's log and
copies checkpoints that were made by hand. The check before it calls verl's own code, which a stand-in has not, so that
the stand-in's Python answers for it; where nothing does, the real check runs and refuses.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import perl
from perl.cli.main import run_commands
from perl.errors import MissingExtraError, RecipeError, RunFolderError
from perl.launch.start import ProcessFailedError
from perl.launch.verl.run_job import LogFollower
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe import Recipe
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.run.progress import progress
from tests import warm
from tests.launch.verl_jobs import ALPHA, RANK, TARGETS, VERL_ROW, a_checkpoint, a_job, log_steps
from tests.launch.verl_recipes import TRAIN

STEPS = 4
PYTHON = """\
#!/usr/bin/env bash
export PYTHONPATH="{path}"
if [ "${{2:-}}" = perl.launch.verl.check_job ] && [ ! -e "{here}/checks" ]; then echo checked; exit; fi
exec {python} "$@"
"""
TRAINER = '''\
"""Trains as verl does, from outside: overrides, its log, its checkpoints, and where it begins again."""
import json, os, shutil, sys, time
from pathlib import Path

told = dict(line.split("=", 1) for line in sys.argv[1:])
here = Path(__file__).parents[2]
steps, folder = int(told["trainer.total_training_steps"]), Path(told["trainer.default_local_dir"].strip("'"))
plan = json.loads((here / "plan.json").read_text())
newest = folder / "latest_checkpointed_iteration.txt"
begun = int(newest.read_text()) if told["trainer.resume_mode"] == "auto" and newest.exists() else 0
print(f"begins after step {begun}", flush=True)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as log:
    for step in range(begun + 1, steps + 1):
        if step == plan.get("fails"):
            raise RuntimeError("CUDA out of memory")
        if step == plan.get("waits"):
            (here / "waits").write_text(str(os.getpid()))
            time.sleep(10_000)
        grows = {"critic/score/mean": 0.5 + 0.0625 * step, "response_length/mean": 24.0 + step}
        log.write(json.dumps({"step": step, "data": {**plan["row"], **grows}}) + "\\n")
        log.flush()
        if step % plan["saves"] == 0:
            shutil.copytree(here / "made" / "checkpoints" / f"global_step_{step}", folder / f"global_step_{step}")
            newest.write_text(str(step))
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Python that has the stand-in, and the adapters of the checkpoints that it will write."""
    here = tmp_path_factory.mktemp("verl")
    job = a_job(here / "made", Recipe.load(sections()))
    tensors = {step: a_checkpoint(job, step, processes=2, seed=step) for step in (2, STEPS)}
    trainer = here / "verl" / "trainer" / "main_ppo.py"
    trainer.parent.mkdir(parents=True)
    trainer.write_text(TRAINER)
    for package in (here / "verl", trainer.parent):
        (package / "__init__.py").touch()
    (here / "python").write_text(
        PYTHON.format(here=here, python=sys.executable, path=os.pathsep.join([str(here), *filter(None, sys.path)]))
    )
    (here / "python").chmod(0o755)
    return here, tensors


@pytest.fixture
def stand_in(made):
    """How it trains the next time; with the recipe that is trained by it."""
    here, _ = made

    def plan(**changed):
        for name in ("waits", "checks"):
            (here / name).unlink(missing_ok=True)
        (here / "plan.json").write_text(json.dumps({"row": VERL_ROW, "saves": 2, **changed}))
        return Recipe.load(sections(engine={"name": "verl", "gpus": 4, "python": str(here / "python")}))

    return plan


def sections(**more):
    return {
        "model": {"name": "sandbox:base"},
        "peft": {"method": "rslora", "rank": RANK, "alpha": ALPHA, "target_modules": TARGETS},
        "train": {**TRAIN, "max_steps": STEPS, "save_steps": 2},
        "rollout": {"max_completion_length": 32},
        "engine": {"name": "verl", "gpus": 4},
        **more,
    }


def farthest_from(run, tensors):
    """Largest difference of a run's adapter to whole tensors."""
    written = load_file(run.adapter / WEIGHTS)
    assert len(written) == len(tensors)
    return max((written[name.replace(".default", "")] - tensor).abs().max().item() for name, tensor in tensors.items())


def test_it_is_trained_there_and_is_a_run_here(made, stand_in, tmp_path, capsys):
    _, tensors = made
    (tmp_path / "recipe.yaml").write_text(stand_in().to_yaml())
    command = ["train", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "run")]
    assert run_commands(command, "perl") == 0
    printed = capsys.readouterr().out
    run = Run.read(tmp_path / "run")
    assert farthest_from(run, tensors[STEPS]) == 0.0
    rows = read_log(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["reward"] for row in rows] == pytest.approx([0.5625, 0.625, 0.6875, 0.75])
    assert [row["completions/mean_length"] for row in rows] == pytest.approx([25, 26, 27, 28])
    assert (run.status, run.facts["steps"]) == ("done", STEPS)
    assert run.facts["reload_difference"] <= 1e-5
    assert "verl 0.9.1" in run.card.read_text()
    assert f"adapter  {run.adapter}" in printed
    assert f"{STEPS} steps" in printed
    assert Recipe.of_run(run.path / "recipe.yaml").engine.gpus == pytest.approx(4)
    assert not (run.path / ".imported").exists()
    at = (run.adapter / WEIGHTS).stat().st_mtime_ns
    assert run_commands(command, "perl") == 0  # done before: nothing is started
    assert (run.path / "job" / "verl.log").read_text().count("begins") == 1
    assert (run.adapter / WEIGHTS).stat().st_mtime_ns == at


def test_what_has_failed_is_said_in_a_line_and_gone_on_with(made, stand_in, tmp_path):
    _, tensors = made
    with pytest.raises(ProcessFailedError) as caught:
        perl.train(stand_in(fails=4), output_dir=tmp_path / "run")
    (mistake,) = caught.value.mistakes
    assert caught.value.exit_code == 1
    assert mistake.where == str(tmp_path / "run" / "job" / "verl.log")
    assert mistake.message == "verl has ended with exit code 1: RuntimeError: CUDA out of memory"
    assert Run.read(tmp_path / "run").status == "failed"
    with pytest.raises(RunFolderError, match="another recipe"):
        perl.train(stand_in(), ["train.learning_rate=1e-3"], tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"engine\.name is verl there, local here"):
        perl.train(Recipe.load(sections(engine={})), output_dir=tmp_path / "run")
    run = perl.train(stand_in(), output_dir=tmp_path / "run")
    assert (run.path / "job" / "verl.log").read_text().count("begins after step 2\n") == 1
    assert farthest_from(run, tensors[STEPS]) == 0.0
    rows = read_log(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]  # the third was logged by both starts
    assert [row["num_tokens"] for row in rows] == pytest.approx([2000, 4000, 6000, 8000])


def started(folder, here):
    """``perl train``, of which verl waits in a step; and the process of verl."""
    command = [*warm.COMMAND, "train", "recipe.yaml", "-o", "run"]
    process = warm.popen(command, cwd=folder, env=dict(warm.OURS.environment), stderr=-1, stdout=-1, text=True)
    waits = here / "waits"
    while not (waits.exists() and waits.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process, int(waits.read_text())


def test_a_signal_ends_verl_too_and_the_same_command_goes_on(made, stand_in, tmp_path):
    here, tensors = made
    for waits, number in ((3, signal.SIGINT), (4, signal.SIGTERM)):
        (tmp_path / "recipe.yaml").write_text(stand_in(waits=waits).to_yaml())
        process, child = started(tmp_path, here)
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == 130, errors
        assert "newest checkpoint is of step 2 of 4" in errors
        assert not Path(f"/proc/{child}").exists()
        assert Run.read(tmp_path / "run").status == "interrupted"
    run = perl.train(stand_in(), output_dir=tmp_path / "run")
    assert farthest_from(run, tensors[STEPS]) == 0.0
    assert [row["step"] for row in read_log(run.metrics)] == pytest.approx([1, 2, 3, 4])
    assert run.status == "done"


def test_one_that_lost_its_parent_is_not_started_beside_itself(made, stand_in, tmp_path):
    here, _ = made
    (tmp_path / "recipe.yaml").write_text(stand_in(waits=3).to_yaml())
    process, child = started(tmp_path, here)
    process.kill()
    process.communicate()
    try:
        with pytest.raises(RunFolderError, match="another process is training here"):
            perl.train(tmp_path / "recipe.yaml", output_dir=tmp_path / "run")
    finally:
        os.killpg(child, signal.SIGKILL)  # run.sh has become it, and leads the group


def test_what_the_check_refuses_is_refused_here_and_another_recipe_takes_its_place(made, stand_in, tmp_path):
    """The real check, which finds no verl of which a version is known."""
    here, tensors = made
    recipe = stand_in()
    (here / "checks").touch()
    with pytest.raises(RecipeError, match="verl is not installed here") as caught:
        perl.train(recipe, ["train.learning_rate=1e-3"], output_dir=tmp_path / "run")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "job" / "verl_metrics.jsonl").exists()
    run = perl.train(stand_in(), output_dir=tmp_path / "run")
    assert farthest_from(run, tensors[STEPS]) == 0.0


def test_an_end_before_the_last_step_is_none(stand_in, tmp_path):
    with pytest.raises(ProcessFailedError, match="ended at step 0 of 4"):
        perl.train(stand_in(saves=7), output_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "adapter").exists()


def test_without_verl_nothing_is_written(tmp_path):
    with pytest.raises(MissingExtraError, match="perl export-verl") as caught:
        perl.train(sections(), output_dir=tmp_path / "run")
    assert caught.value.exit_code == 2
    for python, kind in ((str(tmp_path / "none"), RecipeError), (sys.executable, MissingExtraError)):
        with pytest.raises(kind, match=r"engine\.python"):
            perl.train(sections(), [f"engine.python={python}"], tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_what_exports_prints(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Recipe.load(sections()).to_yaml())
    printed = []
    for name in ("train", "export-verl"):
        assert run_commands([name, str(recipe), "--dry-run"], "perl") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert f"trainer.total_training_steps={STEPS}" in printed[0].splitlines()


def test_the_line_shows_step_reward_and_length(tmp_path):
    with progress(6, "training", done=2, unit="steps") as shown:
        follower = LogFollower(tmp_path / "verl_metrics.jsonl", shown)
        follower.look()
        assert (shown.done, "the first step" in shown.line()) == (2, True)
        log_steps(tmp_path, 4)
        cut = (tmp_path / "verl_metrics.jsonl").read_text()[:-20]
        (tmp_path / "verl_metrics.jsonl").write_text(cut)
        follower.look()
        assert shown.done == pytest.approx(3)  # a line that is not whole waits
        log_steps(tmp_path, 4)
        follower.look()
        assert shown.done == pytest.approx(4)
        assert "4/6 steps" in shown.line()
        assert shown.line().endswith("reward 1.000  length 28.0")
