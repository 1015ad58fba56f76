"""A training is one run of each tracker, however often it is stopped and killed, with samples, alarms and scores there.

The trackers are the real ones, offline: what they hold is read back with their own readers, wandb's file by its format.
"""

import importlib.util
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from perl.errors import RecipeError
from perl.recipe.tracker_checks import send_no_statistics
from perl.trainer.config import PeftRLConfig
from perl.trainer.trackers.place import Place, known, note, place_of
from perl.trainer.trackers.registry import TRACKERS
from perl.trainer.trackers.shown import ShownArguments, shown_recipe
from perl.trainer.trackers.table import table_of
from perl.training.callbacks.tracked import TrackedTables
from tests.training.test_interruptions import RECIPE, TRIPWIRE
from tests.training.tracker_fixtures import INSTALLED, SQL, needs

TRACKED = RECIPE.replace("max_steps: 4", "max_steps: 6").replace("save_steps: 2", "save_steps: 3")
TRACKED = TRACKED.replace("  beta: 0.01\n", f"  beta: 0.01\n  report_to: [{', '.join(INSTALLED)}]\n")
SCORES = {"final/sandbox:addition/avg@1/base", "final/sandbox:addition/avg@1/adapter"}


def offline(folder: Path) -> dict[str, str]:
    """An environment in which every tracker writes into a folder, and nobody is logged in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))}
    mine = {
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db" if SQL else f"file:{folder}/mlruns",
    }
    return kept | mine | ({} if SQL else {"MLFLOW_ALLOW_FILE_STORE": "true"})


def train(folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perl", "train", "recipe.yaml", *overrides]
    env = offline(folder) | environment
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def in_folder(folder: Path, recipe: str = TRACKED) -> Path:
    (folder / "tripwire.py").write_text(TRIPWIRE)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe that was killed in step 5, stopped in step 5 again, and then finished.

    Its checkpoints are of steps 3, 5 and 6; steps 4 and 5 were logged by the first start or by both.
    """
    folder = in_folder(tmp_path_factory.mktemp("resumed"))
    (folder / "tripwire").write_text("5 9")
    assert train(folder).returncode == -9
    run = folder / "runs" / "recipe"
    first = json.loads((run / "trackers.json").read_text())
    assert sorted(first) == sorted(INSTALLED)
    assert {facts["logged"] for facts in first.values()} == {4}
    # An alarm that came before the kill, and one that a resumed run takes back with its step.
    alarms = [{"step": step, "code": "PRL401", "name": "masked_samples", "line": f"of {step}"} for step in (2, 4)]
    (run / "alarms.jsonl").write_text("".join(f"{json.dumps(alarm)}\n" for alarm in alarms))
    (folder / "tripwire").write_text("2 2")
    stopped = train(folder)
    assert stopped.returncode == 130, stopped.stderr
    done = train(folder)
    assert done.returncode == 0, done.stderr
    assert "no table" not in done.stderr
    assert "does not take" not in done.stderr
    return folder


def kept_of(folder: Path, tracker: str) -> dict:
    return json.loads((folder / "runs" / "recipe" / "trackers.json").read_text())[tracker]


def steps_of_samples(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "runs/recipe/samples.jsonl").read_text().splitlines()]


# One run of each tracker, with the same in it.


@needs["wandb"]
def test_wandb_has_one_run_whose_segments_repeat_no_step(resumed):
    segments = [records_of(file) for file in sorted(resumed.glob("wandb/offline-run-*/*.wandb"))]
    assert len(segments) == 3
    runs = [record.run for records in segments for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (kept_of(resumed, "wandb")["id"], "recipe", "recipe")
    }
    rows = [row for records in segments for row in history_of(records)]
    logged = [row["train/global_step"] for row in rows if "train/loss" in row]
    assert logged == [1, 2, 3, 4, 5, 6]
    sizes = {
        name: [row[f"{name}/nrows"] for row in rows if f"{name}/nrows" in row]
        for name in ("samples", "alarms", "scores")
    }
    assert sizes == {"samples": [20, 4], "alarms": [1], "scores": [2]}
    assert len(steps_of_samples(resumed)) == 24
    (first, *_) = (row["samples/path"] for row in rows if "samples/path" in row)
    assert {"step", "prompt", "completion", "rewards/accuracy", "advantage"} <= set(columns_of(resumed, first))
    summary = [item.key or item.nested_key[0] for records in segments for item in summary_of(records)]
    assert set(summary) >= SCORES
    assert "accuracy" in config_of(segments[0])["recipe"]["rewards"]


def records_of(file: Path) -> list:
    """The records of a .wandb file: LevelDB's log format, a header of 7 bytes before it."""
    from wandb.proto import wandb_internal_pb2 as schema

    content, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last part
            record = schema.Record()
            record.ParseFromString(parts)
            found, parts = [*found, record], b""
    return found


def history_of(records: list) -> list[dict]:
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def summary_of(records: list) -> list:
    return [item for r in records if r.WhichOneof("record_type") == "summary" for item in r.summary.update]


def config_of(records: list) -> dict:
    updates = [r.config.update for r in records if r.WhichOneof("record_type") == "config"]
    return {(item.key or item.nested_key[0]): json.loads(item.value_json) for update in updates for item in update}


def columns_of(folder: Path, path: str) -> list[str]:
    (file,) = folder.glob(f"wandb/offline-run-*/files/{path}")
    return json.loads(file.read_text())["columns"]


@needs["mlflow"]
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, about MLflow's own use of it
def test_mlflow_has_one_run_with_each_step_once_and_tables_as_artifacts(resumed):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=offline(resumed)["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("recipe")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name) == (kept_of(resumed, "mlflow")["id"], "recipe")
    assert run.info.status == "FINISHED"
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [1, 2, 3, 4, 5, 6]
    assert {name.replace("@", "_") for name in SCORES} <= set(run.data.metrics)
    assert run.data.params["learning_rate"] == "0.001"
    place = Path(run.info.artifact_uri.removeprefix("file://"))
    files = {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}
    assert {"recipe.yaml", "samples/000005.json", "samples/000006.json", "scores/000006.json"} <= files
    tables = [json.loads((place / name).read_text()) for name in sorted(files) if name.startswith("samples/")]
    assert [row[t["columns"].index("step")] for t in tables for row in t["data"]] == steps_of_samples(resumed)
    (alarms,) = (json.loads((place / name).read_text()) for name in files if name.startswith("alarms/"))
    assert [row[alarms["columns"].index("line")] for row in alarms["data"]] == ["of 2"]


@needs["trackio"]
def test_trackio_has_one_run_that_forgot_the_steps_that_were_repeated(resumed):
    with sqlite3.connect(resumed / "trackio" / "recipe.db") as store:
        rows = store.execute("SELECT run_id, run_name, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = store.execute("SELECT config FROM configs").fetchall()
    assert len({run_id for run_id, _, _ in rows}) == 1
    assert {name for _, name, _ in rows} == {"recipe"}
    logged = [json.loads(metrics) for _, _, metrics in rows]
    assert [row["train/global_step"] for row in logged if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    samples = [sample for row in logged if "samples" in row for sample in row["samples"]["_value"]]
    assert [sample["step"] for sample in samples] == steps_of_samples(resumed)
    assert [alarm["line"] for row in logged if "alarms" in row for alarm in row["alarms"]["_value"]] == ["of 2"]
    assert {name for row in logged for name in row if name.startswith("final/")} == SCORES
    timings = [name for row in logged for name in row if name.endswith("_prepare_inputs")]
    assert len(timings) == 6  # which TRL logs without the step's number
    assert "sandbox:addition" in json.loads(config[0])["recipe"]


@needs["tensorboard"]
def test_tensorboard_has_one_folder_in_which_repeated_steps_are_purged(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = resumed / "runs" / "recipe" / "tensorboard"
    assert {file.parent for file in resumed.rglob("events.out*")} == {folder}
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    for metric in ("loss", "reward"):  # the entry that closes a training has the last step's once more
        assert [event.step for event in found.Scalars(f"train/{metric}")] == [1, 2, 3, 4, 5, 6]
    assert set(found.Tags()["scalars"]) >= SCORES

    def texts(tag: str) -> list[str]:
        return [event.tensor_proto.string_val[0].decode() for event in found.Tensors(f"{tag}/text_summary")]

    rows = [line for text in texts("samples") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == steps_of_samples(resumed)
    assert "of 2" in texts("alarms")[0]
    assert len(texts("alarms")) == 1
    assert "sandbox:addition" in texts("scores")[0]
    assert "tripwire:reward" in texts("recipe")[0]


def test_what_is_kept_of_the_trackers_says_what_each_was_given(resumed):
    for tracker in INSTALLED:
        facts = kept_of(resumed, tracker)
        assert facts["logged"] == 6
        assert facts["tables"] == {"samples": [5, 6], "alarms": [2]}
        assert set(facts["scores"]) == SCORES


@pytest.mark.nightly
def test_of_two_processes_only_the_main_one_has_runs(tmp_path):
    in_folder(tmp_path, TRACKED.replace("max_steps: 6", "max_steps: 2"))
    done = train(tmp_path, "engine.processes=2", "train.per_device_train_batch_size=4")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == ("wandb" in INSTALLED)
    assert len(list(tmp_path.rglob("events.out*"))) == 2 * ("tensorboard" in INSTALLED)  # training, scores
    if "trackio" in INSTALLED:
        with sqlite3.connect(tmp_path / "trackio" / "recipe.db") as store:
            assert store.execute("SELECT count(DISTINCT run_id) FROM metrics").fetchone() == (1,)
    if "mlflow" in INSTALLED and SQL:
        with sqlite3.connect(tmp_path / "mlflow.db") as store:
            assert store.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_another_process_than_the_main_one_opens_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "curves"))
    args = PeftRLConfig(str(tmp_path / "out"), use_cpu=True, report_to=[])
    state = TrainerState(is_world_process_zero=False)
    for tracker in INSTALLED:
        callback = TRACKERS[tracker].ours()
        callback.on_train_begin(args, state, TrainerControl(), model=None)
        callback.on_log(args, state, TrainerControl(), logs={"loss": 1.0}, model=None)
        callback.on_train_end(args, state, TrainerControl())
    assert list(tmp_path.iterdir()) == []


# Scripts.


def of_odd_length(completions, **_):
    return [float(len(completion) % 2) for completion in completions]


@needs["tensorboard"]
def test_a_script_goes_on_in_its_run_and_another_training_in_the_same_folder_has_another(nobody):
    from perl import PeftGRPOTrainer
    from tests.trainer.test_trainer import arguments, problems

    def train_to(steps: int, checkpoint: str | None = None) -> Path:
        given = {"max_steps": steps, "save_steps": 1, "save_strategy": "steps", "report_to": ["tensorboard"]}
        trainer = PeftGRPOTrainer(
            model="sandbox:base",
            reward_funcs=of_odd_length,
            args=arguments(nobody / "out", **given),
            train_dataset=problems(8),
            callbacks=[TrackedTables(every=1)],
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return nobody / "out" / known(place_of(trainer.args), "tensorboard")["id"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = train_to(2)
    (nobody / "out" / "samples.jsonl").write_text('{"step": 2, "prompt": "1+1=", "rewards": {"r": 1.0}}\n')
    assert train_to(3, str(nobody / "out" / "checkpoint-1")) == first
    found = EventAccumulator(str(first)).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]
    assert "samples/text_summary" in found.Tags()["tensors"]
    assert train_to(1) != first


def test_a_row_becomes_cells_and_a_text_that_holds_no_markup():
    rows = [{"step": 1, "rewards": {"a": 0.5}, "completion": "x|y\nz"}, {"step": 2, "verdicts": [1, None]}]
    table = table_of(rows)
    assert table.columns == ("step", "rewards/a", "completion", "verdicts")
    assert table.rows == ((1, 0.5, "x|y\nz", None), (2, None, None, "[1, null]"))
    assert table.by_column()["step"] == [1, 2]
    assert table.markdown().splitlines()[2] == "| 1 | 0.5 | x\\|y<br>z |  |"


def test_tables_follow_the_files_whoever_writes_them_and_a_tracker_that_refuses_one_is_told_of_once(
    tmp_path, monkeypatch, caplog
):
    given: list[tuple[str, list[int]]] = []

    def refuse(*_):
        raise OSError("disk full")

    def take(_, name, table, step):
        given.append((name, table.by_column()["step"], step))

    for name, write in (("wandb", refuse), ("mlflow", take)):
        row = SimpleNamespace(name=name, write_table=write, logs_completions=name == "wandb")
        monkeypatch.setitem(TRACKERS, name, row)
    args = SimpleNamespace(
        output_dir=str(tmp_path),
        report_to=["wandb", "mlflow", "clearml"],
        log_completions=False,
        project="p",
        run_name="r",
    )
    note(Place(tmp_path, "p", "r"), "mlflow", id="a run", tables={"samples": [1]})
    tables = TrackedTables(every=2)
    control = SimpleNamespace(should_training_stop=False)
    state = SimpleNamespace(global_step=2, is_world_process_zero=True)
    tables.on_train_begin(args, state, control)
    log = tmp_path / "samples.jsonl"
    whole = "".join(f"{json.dumps({'step': step, 'prompt': '?'})}\n" for step in (1, 2))
    log.write_text(whole + '{"step": 3, "pro')  # being written
    tables.on_log(args, SimpleNamespace(global_step=1), control, {})
    assert given == []
    tables.on_log(args, state, control, {})
    assert given == [("samples", [2], 2)]  # it has step 1 already
    log.write_text(whole + '{"step": 3, "prompt": "?"}\n')
    tables.on_log(args, SimpleNamespace(global_step=3), control, {"train_runtime": 1.0})
    assert given[1:] == [("samples", [3], 3)]
    assert known(Place(tmp_path, "p", "r"), "mlflow")["tables"] == {"samples": [1, 2, 3]}
    assert [r.getMessage() for r in caplog.records if "disk full" in r.getMessage()] == [
        "wandb takes no table of samples, and gets no more of them: disk full [PRL343]"
    ]
    other = TrackedTables()
    other.on_train_begin(args, SimpleNamespace(global_step=0, is_world_process_zero=False), control)
    other.on_log(args, SimpleNamespace(global_step=10), control, {"train_runtime": 1.0})
    assert len(given) == 2
    with pytest.raises(RecipeError, match=r"TrackedTables\(every\): must be a whole number of at least 1, not 0"):
        TrackedTables(every=0)


# What is sent.


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


def test_settings_are_shown_without_secrets(tmp_path):
    args = PeftRLConfig(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        vllm_server_base_url="http://user:password@host:8000",
        model_init_kwargs={"token": "hf_" + "a1B2c3D4" * 4, "revision": "main"},
    )
    shown = ShownArguments(args, run_name="named").to_dict()
    assert "password" not in json.dumps(shown, default=str)
    assert shown["model_init_kwargs"] == {"token": "***", "revision": "main"}
    assert (shown["run_name"], shown["learning_rate"]) == ("named", args.learning_rate)
    assert "hf_a1B2" not in ShownArguments(args).to_json_string()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{name: x}}\nother: hf_{'a1B2c3D4' * 4}\n")
    assert shown_recipe(recipe) == "model: {name: x}\n***\n"
    assert shown_recipe(tmp_path / "none") is shown_recipe(None) is None


def test_a_file_of_trackers_that_is_broken_begins_new_runs(tmp_path, caplog):
    (tmp_path / "trackers.json").write_text('{"wandb": {"id": ')
    place = Place(tmp_path, "p", "r")
    assert known(place, "wandb") == {}
    assert "trackers begin new runs" in caplog.text
    note(place, "wandb", id="new")
    assert known(place, "wandb") == {"id": "new"}
