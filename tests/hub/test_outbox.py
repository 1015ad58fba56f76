"""A push that an outage or a kill cut short is in the run folder, and the same command finishes it."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from perl.cli.push import command
from perl.errors import PerlError
from perl.hub.push.outbox import alone, queued_steps, read_push
from perl.hub.push.publish import pack_checkpoint, publish, push, push_run, wanted_push
from perl.hub.push.retries import HubOutageError
from perl.recipe.sections import HubSection
from tests.hub.push_runs import REPO, add_best, add_checkpoint, files_of, publishable

FOR_EVER = 10**6


pytestmark = pytest.mark.usefixtures("nothing_waits")


def test_an_outage_leaves_a_queued_push_that_the_next_one_finishes_and_ends_no_training(hub, caplog):
    run = publishable()
    add_checkpoint(run, 10)
    hub.faults.cut(1, times=FOR_EVER)
    with pytest.raises(HubOutageError, match=r"user/adapter: the Hub is unreachable: .*\(6 tries\)$"):
        push_run(run, wanted_push(run, REPO, checkpoints=True, private=True, message="mine"))
    push = read_push(run)
    assert (push.status, push.tries, push.repo_id, push.private) == ("queued", 1, REPO, True)
    assert "is unreachable" in push.error
    hub.faults.clear()
    push_run(run, wanted_push(run))
    assert hub.repo(REPO).visibility.private
    assert hub.repo(REPO).head.title == "mine"
    assert "step-10" in hub.repo(REPO).tags
    push = read_push(run)
    assert (push.status, push.tries, push.error, push.steps) == ("done", 2, None, (10,))
    # At the end of a training it is a warning with the command.
    run = publishable("ended")
    hub.faults.cut(1, times=FOR_EVER)
    with caplog.at_level(logging.WARNING, "perl"):
        publish(HubSection(repo_id="user/ended", push="end"), run)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "perl"]
    assert line.endswith("the push is kept in ended: `perl push ended` finishes it [PRL308]")
    assert run.status == "done"
    hub.faults.clear()
    publish(HubSection(repo_id="user/ended", push="end"), run)
    assert "README.md" in hub.repo("user/ended").files()


def test_a_checkpoint_waits_in_the_outbox_though_the_run_has_deleted_it(hub):
    run = publishable()
    folder = add_checkpoint(run, 10)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    pack_checkpoint(run, 10, REPO)
    for path in sorted(folder.iterdir()):
        path.unlink()
    folder.rmdir()
    push_run(run, wanted_push(run, "user/other"))  # what waits for one repository is not sent to another
    assert queued_steps(run, REPO) == [10]
    assert hub.repo("user/other").tags == {} or "step-10" not in hub.repo("user/other").tags
    push_run(run, wanted_push(run, REPO))
    assert files_of(hub, "step-10")["adapter_model.safetensors"] == weights
    assert read_push(run).steps == (10,)
    assert queued_steps(run, REPO) == []


def test_best_publishes_the_best_and_what_is_done_is_not_done_again(hub):
    run = publishable()
    folder = add_best(run)
    publish(HubSection(repo_id=REPO, push="best", private=True), run)
    assert files_of(hub)["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    assert hub.repo(REPO).visibility.private
    run = publishable("another")
    end = HubSection(repo_id="user/another", push="end")
    publish(end, run)
    requests = hub.requests
    publish(end, run)
    assert hub.requests == requests
    publish(HubSection(repo_id=REPO), publishable("never"))
    assert hub.requests == requests


def test_only_one_process_pushes_a_run_and_killed_at_the_commit_the_same_command_goes_on(hub, hub_env, tmp_path):
    run = publishable()
    hub.faults.slow(0.3)
    started = [sys.executable, "-m", "perl", "push", "run", "--repo", REPO]
    process = subprocess.Popen(started, env=hub_env(hub), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        limit = time.monotonic() + 300
        while not any("preupload" in request.path for request in hub.log):
            assert time.monotonic() < limit
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.01)
        with pytest.raises(PerlError, match=r"^run: another process is pushing this run \(wait for it\)$"):
            push(run, REPO)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    hub.faults.clear()
    assert json.loads((run.path / "push.json").read_text())["pushes"][0]["status"] == "queued"
    assert not files_of(hub) or len(hub.repo(REPO).commits) == 2
    done = CliRunner().invoke(command, [str(run.path)])
    assert done.exit_code == 0, done.output
    assert "README.md" in files_of(hub)
    assert json.loads((run.path / "push.json").read_text())["pushes"][0]["status"] == "done"
    with alone(run):  # the lock is gone with the process
        pass
