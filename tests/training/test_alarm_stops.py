"""What ends a training in order: alarms that are named in ``alarms.stop``, and signals that it hears."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

import perl
from perl.errors import EXIT_FAILED, AlarmError
from perl.run.folder import Run
from perl.run.host import Host, hosted_by
from perl.run.logs import read_log
from perl.training.callbacks.graceful_stop import GracefulStop

SMALL = [
    *("train.max_steps=3", "train.prompts_per_step=2", "train.num_generations=4", "train.learning_rate=1e-2"),
    *("train.per_device_train_batch_size=4", "rollout.max_completion_length=24", "eval.enabled=false"),
    "engine.threads=1",
]
STOPS = [*SMALL, "alarms.stop=[learning_rate]"]


@pytest.mark.nightly
def test_a_run_ends_with_a_checkpoint_is_refused_and_goes_on_without_the_alarm(tmp_path):
    with pytest.raises(AlarmError) as caught:
        perl.train("quickstart", STOPS, tmp_path / "run")
    (line,) = str(caught.value).splitlines()
    assert caught.value.exit_code == EXIT_FAILED
    assert "the alarm learning_rate has ended the training after step 1, with a checkpoint: " in line
    assert "lower train.learning_rate (now 0.01) [PRL410]" in line
    assert "without learning_rate in alarms.stop the same command goes on" in line
    run = Run.read(tmp_path / "run")
    assert run.status == "failed"
    assert [path.name for path in run.checkpoints.glob("checkpoint-*")] == ["checkpoint-1"]
    (row,) = read_log(run.alarms)
    assert (row["step"], row["name"], row["code"], row["stopped"]) == (1, "learning_rate", "PRL410", True)
    assert row["line"] in line

    with pytest.raises(AlarmError, match="after step 1"):
        perl.train("quickstart", STOPS, tmp_path / "run")
    assert len(read_log(run.metrics)) == 1  # nothing was trained
    assert read_log(run.alarms) == [row]

    done = perl.train("quickstart", SMALL, tmp_path / "run")
    assert done.status == "done"
    assert done.facts["steps"] == 3
    assert read_log(done.alarms) == [row]  # said already
    again = perl.train("quickstart", STOPS, tmp_path / "run")
    assert again.facts["steps"] == 3


@pytest.mark.nightly
def test_an_alarm_in_the_last_step_is_not_forgotten_by_the_same_command(tmp_path):
    """Nothing is left to train then, and what an alarm has ended must not be scored and published."""
    for _ in range(2):
        with pytest.raises(AlarmError, match="after step 1, with a checkpoint"):
            perl.train("quickstart", [*STOPS, "train.max_steps=1"], tmp_path / "run")
        assert Run.read(tmp_path / "run").status == "failed"
        assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.nightly
def test_two_processes_end_together(tmp_path, perl_command):
    command = ["train", "quickstart", *STOPS, "engine.processes=2", "train.per_device_train_batch_size=4"]
    done = perl_command(*command, "--output", "run", cwd=tmp_path)
    assert done.returncode == EXIT_FAILED, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the alarm learning_rate has ended the training after step 1" in errors[0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert [(row["step"], row["name"]) for row in rows] == [(1, "learning_rate")]
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-1").is_dir()


def test_a_signal_that_was_ignored_at_the_start_does_not_stop_a_training():
    """As a shell without a terminal starts ``perl train R &``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = GracefulStop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_first_signal_of_a_process_that_another_one_has_asked_to_stop_is_no_second_one():
    stop = GracefulStop()
    with stop.listening():
        stop.requested = True  # as all have agreed after a step in which another process had heard a signal
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_each_notice_that_a_node_goes_asks_for_one_checkpoint():
    class Leaving(Host):
        notices = iter([False, True, True, False, True])

        def leaves(self):
            return next(self.notices)

    stop, saved = GracefulStop(), []
    with hosted_by(Leaving()):
        for _ in range(5):
            control = SimpleNamespace(should_save=False, should_training_stop=False)
            stop.on_step_end(None, None, control)
            assert not control.should_training_stop
            saved.append(int(control.should_save))
    assert saved == [0, 1, 0, 0, 1]
