"""A training is one run of each tracker, however often it is resumed.

The trackers are the real ones, offline: what they hold is read back with their own readers.
"""

import importlib
import json
import os
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerState

from perl.recipe.optional_packages import send_no_statistics
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.callbacks.trackers import FILE, KeptRuns
from tests.training.tracker_fixtures import INSTALLED, SQL

SCORES = {"eval/final/sums/avg@2/base": 0.5, "eval/final/sums/avg@2/adapter": 0.75}
SCRIPT = """
import json, pathlib, sys
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.trainer.callbacks.trackers import log_scores
from tests.evaluations import results, task_result
from tests.trainer.test_trainer import arguments, problems

def of_odd_length(completions, **_):
    return [float(len(completion) % 2) for completion in completions]

def train_to(steps, checkpoint=None):
    given = {"max_steps": steps, "save_steps": 1, "save_strategy": "steps", "report_to": sys.argv[1:]}
    args, data = arguments("out", **given), problems(8)
    trainer = PeftGRPOTrainer(model="sandbox:base", reward_funcs=of_odd_length, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, json.loads(pathlib.Path("out/trackers.json").read_text())

first = train_to(2)[1]
trainer, resumed = train_to(3, "out/checkpoint-1")
pathlib.Path("eval").mkdir()
results(task_result(base=["10", "10"], adapter=["11", "10"])).write(pathlib.Path("eval"))
log_scores(trainer, pathlib.Path("eval"))
pathlib.Path("ids.json").write_text(json.dumps([first, resumed, train_to(1)[1]]))
"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, about MLflow's own use of it
def test_a_resumed_training_goes_on_in_its_run_of_each_tracker_and_scores_go_there_too(nobody, checkout, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{nobody}/mlflow.db" if SQL else f"file:{nobody}/mlruns")
    environment = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(nobody / "trackio")}
    (nobody / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", *INSTALLED]
    path = f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ids, resumed, others = json.loads((nobody / "ids.json").read_text())
    assert resumed == ids
    assert sorted(ids) == sorted(INSTALLED)
    assert not set(others.values()) & set(ids.values())  # a training from its first step is another one

    if "wandb" in INSTALLED:
        found = {file.name.rpartition("-")[2] for file in nobody.glob("wandb/offline-run-*")}
        assert found == {ids["wandb"], others["wandb"]}
    if "trackio" in INSTALLED:
        with sqlite3.connect(nobody / "trackio" / "huggingface.db") as store:
            rows = store.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
        ours = [json.loads(metrics) for name, metrics in rows if name == ids["trackio"]]
        assert {row["train/global_step"] for row in ours if "train/loss" in row} == {1, 2, 3}
        assert [row[name] for row in ours for name in SCORES if name in row] == list(SCORES.values())
        assert {name for name, _ in rows} == {ids["trackio"], others["trackio"]}
    if "mlflow" in INSTALLED:
        import mlflow

        client = mlflow.MlflowClient()
        runs = {run.info.run_id: run for run in client.search_runs(["0"])}
        assert set(runs) == {ids["mlflow"], others["mlflow"]}
        assert {m.step for m in client.get_metric_history(ids["mlflow"], "loss")} == {1, 2, 3}
        kept = runs[ids["mlflow"]].data
        assert {
            name.replace("@", "_").replace("/", "_", 1): score for name, score in SCORES.items()
        }.items() <= kept.metrics.items()
        assert (kept.params["max_steps"], kept.params["peft_rank"]) == ("2", "4")
        assert runs[ids["mlflow"]].info.status == "FINISHED"
    if "tensorboard" in INSTALLED:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        curves = EventAccumulator(str(nobody / "out" / ids["tensorboard"])).Reload()
        assert {event.step for event in curves.Scalars("train/loss")} == {1, 2, 3}
        assert {name: curves.Scalars(name)[0].value for name in SCORES} == SCORES


@pytest.mark.usefixtures("nobody")
def test_the_users_own_run_wins_and_only_the_main_process_names_runs(tmp_path, monkeypatch):
    args = PeftRLConfig(str(tmp_path / "out"), use_cpu=True, report_to=[])
    args.report_to = ["wandb", "tensorboard"]
    runs = KeptRuns(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[])))
    runs.on_train_begin(args, TrainerState(is_world_process_zero=False))
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / FILE).write_text('{"mlflow": {"id": ')
    monkeypatch.setattr(
        "perl.trainer.callbacks.trackers._NAMES", {"mlflow": lambda *_: "new", "tensorboard": lambda *_: "curves"}
    )
    args.report_to = ["mlflow", "tensorboard"]
    runs.on_train_begin(args, TrainerState(is_world_process_zero=True, global_step=3))
    assert os.environ["MLFLOW_RUN_ID"] == "mine"
    assert json.loads((tmp_path / "out" / FILE).read_text()) == {"mlflow": "new", "tensorboard": "curves"}
    monkeypatch.delenv("MLFLOW_RUN_ID")
    for step, of_this_training in ((3, "new"), (0, "newer")):
        monkeypatch.setattr("perl.trainer.callbacks.trackers._NAMES", {"mlflow": lambda *_: "newer"})
        runs.on_train_begin(args, TrainerState(is_world_process_zero=True, global_step=step))
        assert os.environ["MLFLOW_RUN_ID"] == of_this_training


def test_trackers_send_their_makers_nothing_unless_the_user_says_so(monkeypatch):
    for name in ("MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "kept")
    send_no_statistics(["mlflow", "wandb"])
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["WANDB_ERROR_REPORTING"]) == ("kept", "kept")
    for name in ("MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name)
    send_no_statistics(["mlflow", "wandb"])
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["WANDB_ERROR_REPORTING"]) == ("true", "false")
    for name, asks in (("mlflow", "mlflow.telemetry.utils"), ("wandb", "wandb.env")):
        if name in INSTALLED:
            module = importlib.import_module(asks)
            off = module.is_telemetry_disabled() if name == "mlflow" else not module.error_reporting_enabled()
            assert off


def test_trackers_are_shown_arguments_without_secrets(tmp_path):
    secret = {"vllm_server_base_url": "http://user:password@host:8000"}
    secret |= {"model_init_kwargs": {"token": "hf_" + "a1B2c3D4" * 4, "revision": "main"}}
    args = PeftRLConfig(str(tmp_path), use_cpu=True, report_to=[], **secret)
    shown = args.to_dict()
    assert "password" not in json.dumps(shown, default=str)
    assert shown["model_init_kwargs"] == {"token": "***", "revision": "main"}
    assert shown["learning_rate"] == args.learning_rate
    assert "hf_a1B2" not in args.to_json_string()
