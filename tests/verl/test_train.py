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
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import perl
from perl.cli.main import run_commands
from perl.errors import MissingExtraError, RecipeError, RunFolderError
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe.sections import EngineSection
from perl.run.folder import Run
from perl.run.logs import read_log
from tests import warm
from tests.verl.jobs import PEFT, VERL_ROW, a_checkpoint, a_job
from tests.verl.recipes import recipe

STEPS = 4
PYTHON = """\
#!/usr/bin/env bash
export PYTHONPATH="{path}"
if [ "${{2:-}}" = perl.verl.check_job ] && [ ! -e "{here}/checks" ]; then echo checked; exit; fi
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
    job = a_job(here / "made", **PEFT)
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
        return given(python=str(here / "python"))

    return plan


def given(**engine):
    """A recipe that verl trains."""
    engine = {"name": "verl", "gpus": 4, **engine}
    return recipe(peft=PEFT, train={"max_steps": STEPS, "save_steps": 2, "learning_rate": 1e-3}, engine=engine)


def farthest_from(run, tensors):
    """Largest difference of a run's adapter to whole tensors."""
    written = load_file(run.adapter / WEIGHTS)
    assert len(written) == len(tensors)
    return max((written[name.replace(".default", "")] - tensor).abs().max().item() for name, tensor in tensors.items())


def test_it_is_trained_there_gone_on_with_after_a_failure_and_is_a_run_here(made, stand_in, tmp_path, capsys):
    here, tensors = made
    fails = stand_in(fails=4)
    (here / "checks").touch()  # the real check, which finds no verl of which a version is known
    with pytest.raises(RecipeError, match="verl is not installed here"):
        perl.train(fails, ["train.learning_rate=1e-2"], output_dir=tmp_path / "run")
    (here / "checks").unlink()  # nothing was trained: another recipe takes its place
    (tmp_path / "recipe.yaml").write_text(fails.to_yaml())
    command = ["train", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "run")]
    assert run_commands(command, "perl") == 1
    log = tmp_path / "run" / "job" / "verl.log"
    assert f"{log}: verl ended with exit code 1: RuntimeError: CUDA out of memory" in capsys.readouterr().err
    assert Run.read(tmp_path / "run").status == "failed"
    with pytest.raises(RunFolderError, match="another recipe"):
        perl.train(stand_in(), ["train.learning_rate=1e-2"], tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"engine\.name is verl there, local here"):
        perl.train(replace(given(), engine=EngineSection()), output_dir=tmp_path / "run")
    stand_in()
    assert run_commands(command, "perl") == 0
    run = Run.read(tmp_path / "run")
    assert log.read_text().count("begins after step 2\n") == 1
    assert farthest_from(run, tensors[STEPS]) == 0.0
    rows = read_log(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]  # the third was logged by both starts
    assert [row["reward"] for row in rows] == pytest.approx([0.5625, 0.625, 0.6875, 0.75])
    assert [row["num_tokens"] for row in rows] == pytest.approx([2000, 4000, 6000, 8000])
    assert (run.status, run.facts["steps"]) == ("done", STEPS)
    assert run.facts["reload_difference"] <= 1e-5
    assert "verl 0.9.1" in run.card.read_text()
    assert run_commands(command, "perl") == 0  # done before: nothing is started
    assert log.read_text().count("begins") == 2


def started(folder, here):
    """``perl train``, of which verl waits in a step; and the process of verl."""
    command = [*warm.COMMAND, "train", "recipe.yaml", "-o", "run"]
    process = warm.popen(command, cwd=folder, env=dict(warm.OURS.environment), stderr=-1, stdout=-1, text=True)
    waits = here / "waits"
    while not (waits.exists() and waits.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process, int(waits.read_text())


@pytest.mark.nightly
def test_a_signal_ends_verl_too_and_one_that_lost_its_parent_is_not_started_beside_itself(made, stand_in, tmp_path):
    here, _ = made
    (tmp_path / "recipe.yaml").write_text(stand_in(waits=3).to_yaml())
    process, child = started(tmp_path, here)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "newest checkpoint is of step 2 of 4" in errors
    assert not Path(f"/proc/{child}").exists()
    assert Run.read(tmp_path / "run").status == "interrupted"
    stand_in(waits=4)
    process, child = started(tmp_path, here)
    process.kill()
    process.communicate()
    try:
        with pytest.raises(RunFolderError, match="another process is training here"):
            perl.train(tmp_path / "recipe.yaml", output_dir=tmp_path / "run")
    finally:
        os.killpg(child, signal.SIGKILL)  # run.sh has become it, and leads the group


def test_without_verl_nothing_is_written(tmp_path):
    with pytest.raises(MissingExtraError, match="perl export-verl") as caught:
        perl.train(given(), output_dir=tmp_path / "run")
    assert caught.value.exit_code == 2
    for python, kind in ((str(tmp_path / "none"), RecipeError), (sys.executable, MissingExtraError)):
        with pytest.raises(kind, match=r"engine\.python"):
            perl.train(given(), [f"engine.python={python}"], tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
