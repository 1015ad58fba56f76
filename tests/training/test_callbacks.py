"""The public callbacks in scripts: alone, together, with TRL's trainers too, stopped, killed, on two processes."""

import json
import logging
import os
import signal
import subprocess

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from perl.callbacks import BenchmarkScores, GracefulStop, HubCheckpoints, LearningCurves, LiveProgress, SamplesLog
from perl.errors import PerlError, RecipeError
from perl.hub.card.check import check_card
from perl.run.facts import read_best
from perl.run.files import sha256_of
from perl.sandbox import BASE_FOLDER
from tests import warm
from tests.conftest import CHECKOUT
from tests.hub.push_runs import REPO, files_of
from tests.training.scripted_callbacks import ROWS, STEPS, every_callback, sum_of_letters, trainer_of

pytestmark = [
    pytest.mark.usefixtures("nothing_waits"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def adapter_of(folder, step=STEPS):
    return sha256_of(folder / f"checkpoint-{step}" / "adapter_model.safetensors")


def check_files(folder, steps=STEPS):
    """What the five callbacks leave behind of so many steps, none of them twice."""
    rows = rows_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    scored = [row["step"] for row in rows if "eval/sandbox:chain/avg@2" in row]
    assert scored == list(range(2, steps + 1, 2))
    sampled = [row["step"] for row in rows_of(folder / "samples.jsonl")]
    assert sampled == [step for step in (1, *range(2, steps + 1, 2)) for _ in range(4)]
    assert {path.name for path in (folder / "plots").iterdir()} == {"curves.png", "scores.png"}
    best = read_best(folder / "best")
    assert best["value"] == max(row.get("eval/sandbox:chain/avg@2", -1.0) for row in rows)
    kept = folder / "best" / "adapter" / "adapter_model.safetensors"
    assert kept.is_file()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks") / "whole"
    trainer_of(folder, every_callback()).train()
    return folder


def test_all_together_leave_their_files_and_change_no_number_of_the_training(uninterrupted, tmp_path):
    check_files(uninterrupted)
    trainer_of(tmp_path / "bare", []).train()
    assert adapter_of(tmp_path / "bare") == adapter_of(uninterrupted)


@pytest.mark.parametrize("kind", [LiveProgress, GracefulStop, SamplesLog, LearningCurves])
def test_each_works_alone(kind, tmp_path, capfd):
    trainer_of(tmp_path / "out", [kind()], max_steps=2).train()
    written = {path.name for path in (tmp_path / "out").iterdir()}
    expected = {SamplesLog: {"samples.jsonl"}, LearningCurves: {"metrics.jsonl", "plots"}}.get(kind, set())
    assert written - {"README.md", "perl_run.json", "checkpoint-2", "alarms.jsonl"} == expected
    assert ("step 2/2  reward " in capfd.readouterr().err) == (kind is LiveProgress)


def test_a_notebook_trains_twice_and_the_logs_are_of_the_second_training(tmp_path):
    trainer = trainer_of(tmp_path / "out", every_callback())
    trainer.train()
    trainer.train()
    check_files(tmp_path / "out")


def started(folder, *words, processes=1):
    """Exit code and output of the script with every callback."""
    arguments, environment = ["-m", "tests.training.scripted_callbacks", str(folder), *words], dict(os.environ)
    environment |= {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    if processes > 1:
        done = warm.run_distributed(arguments, folder.parent, processes, env=environment)
        return done.returncode, done.stdout, done.stderr
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = warm.fork(warm.OURS, arguments, cwd=folder.parent, env=environment, **pipes)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "ends", "says"),
    [
        ("signal", (0, "done 3 True"), "stopping after this step, with a checkpoint"),
        ("kill", (-signal.SIGKILL, ""), ""),
    ],
)
def test_after_a_signal_or_a_kill_it_goes_on_and_no_line_is_there_twice(uninterrupted, tmp_path, what, ends, says):
    code, out, err = started(tmp_path / "out", what)
    assert (code, " ".join(out.split())) == ends, err
    assert says in err
    code, out, err = started(tmp_path / "out", "resume")
    assert (code, out.split()) == (0, ["done", "6", "False"]), err
    check_files(tmp_path / "out")
    assert adapter_of(tmp_path / "out") == adapter_of(uninterrupted)


@pytest.mark.nightly
@pytest.mark.parametrize("words", [("signal",), ("signal", "bf16")])
def test_two_processes_stop_at_the_same_step_and_one_of_them_writes(words, tmp_path):
    code, out, err = started(tmp_path / "out", *words, processes=2)
    assert (code, out.split()) == (0, ["done", "3", "True"] * 2), err
    code, out, err = started(tmp_path / "out", "resume", *words[1:], processes=2)
    assert (code, out.split()) == (0, ["done", "6", "False"] * 2), err
    check_files(tmp_path / "out")


SETTINGS = {
    **{"per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "logging_steps": 1, "max_steps": 2},
    **{"save_steps": 1, "bf16": False, "activation_checkpointing": False, "disable_tqdm": True},
}


def trls_grpo(folder, callbacks):
    arguments = GRPOConfig(str(folder), num_generations=4, max_completion_length=8, **SETTINGS)
    return GRPOTrainer(str(BASE_FOLDER), sum_of_letters, arguments, ROWS, callbacks=callbacks)


def trls_sft(folder, callbacks):
    texts = Dataset.from_list([{"text": f"{i}+1={i + 1}"} for i in range(8)])
    return SFTTrainer(str(BASE_FOLDER), SFTConfig(str(folder), **SETTINGS), train_dataset=texts, callbacks=callbacks)


@pytest.mark.parametrize("make", [trls_grpo, trls_sft])
def test_those_that_need_nothing_of_ours_work_with_trls_own_trainers(make, tmp_path, capfd):
    stop = GracefulStop()
    make(tmp_path / "out", [LearningCurves(), LiveProgress(), stop]).train()
    rows = rows_of(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert (tmp_path / "out" / "plots" / "curves.png").is_file()
    shown = capfd.readouterr().err
    assert ("step 2/2  reward " if make is trls_grpo else "step 2/2  loss ") in shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("callback", [SamplesLog(), BenchmarkScores(["sandbox:chain"]), HubCheckpoints(REPO)])
def test_those_that_need_ours_say_so_in_one_line(callback, tmp_path):
    with pytest.raises(RecipeError, match=f"^callbacks: {callback} needs perl.PeftGRPOTrainer: ") as raised:
        trls_sft(tmp_path / "out", [callback]).train()
    assert "\n" not in str(raised.value)


def test_two_of_a_kind_are_refused_when_the_trainer_is_made_and_by_trls_when_it_trains(tmp_path):
    with pytest.raises(RecipeError, match=r"^callbacks: there are two SamplesLog "):
        trainer_of(tmp_path / "out", [SamplesLog(), SamplesLog(every=2)])
    trainer = trainer_of(tmp_path / "out", [SamplesLog()])
    trainer.add_callback(SamplesLog())
    with pytest.raises(RecipeError, match=r"^callbacks: there are two SamplesLog "):
        trainer.train()
    with pytest.raises(RecipeError, match=r"^callbacks: there are two LiveProgress "):
        trls_sft(tmp_path / "out", [LiveProgress(), LiveProgress()]).train()


def test_checkpoints_of_a_script_are_revisions_with_a_card_that_holds(hub, tmp_path):
    trainer = trainer_of(tmp_path / "out", [HubCheckpoints(REPO, private=True)], max_steps=2, save_steps=1)
    trainer.train()
    for step in (1, 2):
        there = files_of(hub, f"step-{step}")
        weights = tmp_path / "out" / f"checkpoint-{step}" / "adapter_model.safetensors"
        assert there["adapter_model.safetensors"] == weights.read_bytes()
        assert check_card(there, sha256_of(weights)).mistakes == ()
        assert json.loads(there["perl_run.json"])["step"] == step
    assert hub.repo(REPO).private


def test_an_outage_does_not_end_a_script_and_the_next_training_sends_what_waits(hub, tmp_path, caplog):
    hub.faults.fail(2, 503, times=10**6)  # after the login was looked at
    with caplog.at_level(logging.WARNING, "perl"):
        trainer_of(tmp_path / "out", [HubCheckpoints(REPO)], max_steps=1, save_steps=1).train()
    assert "checkpoints wait in " in caplog.text
    hub.faults.clear()
    trainer = trainer_of(tmp_path / "out", [HubCheckpoints(REPO)], max_steps=2, save_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert all(files_of(hub, f"step-{step}") for step in (1, 2))


@pytest.mark.usefixtures("hub")
def test_without_a_login_and_without_an_adapter_nothing_is_trained(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"^callbacks: HubCheckpoints publishes adapters"):
        trainer_of(tmp_path / "out", [HubCheckpoints(REPO)], peft_method="full")
    with pytest.raises(RecipeError, match=r"^HubCheckpoints\(repo_id\): is not a name on the Hub: 'me'"):
        HubCheckpoints("me")
    monkeypatch.setattr("perl.hub.push.requests.get_token", lambda: None)
    with pytest.raises(PerlError, match=r"^HubCheckpoints: push needs a login to the Hub"):
        trainer_of(tmp_path / "out", [HubCheckpoints(REPO)]).train()
    assert not (tmp_path / "out" / "checkpoint-2").exists()
