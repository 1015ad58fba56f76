"""A push that an outage or a kill cut short is in the run folder, and the same command finishes it."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from perl.errors import PerlError, RunFolderError
from perl.hub.push.outbox import Push, queue_checkpoint, queued_checkpoint, queued_steps, read_push, write_push
from perl.hub.push.package import Package
from perl.hub.push.publish import pack_checkpoint, publish, push_run, wanted_push
from perl.hub.push.retries import HubOutageError
from perl.recipe.sections import HubSection
from tests.hub.push_runs import REPO, add_best, add_checkpoint, files_of, publishable

FOR_EVER = 10**6


pytestmark = pytest.mark.usefixtures("nothing_waits")


def test_an_outage_leaves_a_queued_push_that_the_next_one_finishes(hub):
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


def test_a_push_to_another_name_leaves_the_settings_of_the_queued_one_behind():
    run = publishable()
    write_push(run, Push("queued", REPO, private=True, steps=(10,), tries=3))
    other = wanted_push(run, "user/other")
    assert (other.repo_id, other.private, other.steps, other.tries) == ("user/other", False, (), 0)
    assert wanted_push(run).private
    assert wanted_push(run, REPO).steps == (10,)
    for text in ("", "[]", '{"status": "done"}', '{"steps": [], "hostile": 1}'):
        (run.path / "push.json").write_text(text)
        with pytest.raises(RunFolderError, match=r"push.json: cannot be read: .*\(delete it and push again\)$"):
            read_push(run)


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


def test_a_waiting_checkpoint_that_is_a_link_is_refused(tmp_path):
    run = publishable()
    folder = queue_checkpoint(run, REPO, 10, Package({"README.md": b"b"}))
    assert dict(queued_checkpoint(run, REPO, 10).files) == {"README.md": b"b"}
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    for refused in (
        lambda: queued_checkpoint(run, REPO, 10),
        lambda: queue_checkpoint(run, REPO, 10, Package({"README.md": b"c"})),
    ):
        with pytest.raises(PerlError, match=r"step-10: is a link, and links are not published \(delete it\)"):
            refused()
    assert (elsewhere / "README.md").read_bytes() == b"b"


def test_at_the_end_of_a_training_an_outage_is_a_warning_with_the_command(hub, caplog):
    run = publishable()
    hub.faults.cut(1, times=FOR_EVER)
    with caplog.at_level(logging.WARNING, "perl"):
        publish(HubSection(repo_id=REPO, push="end"), run)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "perl"]
    assert line.endswith("the push is kept in run: `perl push run` finishes it")
    assert run.status == "done"
    hub.faults.clear()
    publish(HubSection(repo_id=REPO, push="end"), run)
    assert "README.md" in files_of(hub)


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


def test_killed_at_the_commit_the_same_command_goes_on(hub, hub_env, tmp_path):
    run = publishable()
    hub.faults.slow(0.3)
    command = [sys.executable, "-m", "perl", "push", "run", "--repo", REPO]
    process = subprocess.Popen(command, env=hub_env(hub), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        limit = time.monotonic() + 300
        while not any("preupload" in request.path for request in hub.log):
            assert time.monotonic() < limit
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    hub.faults.clear()
    assert json.loads((run.path / "push.json").read_text())["pushes"][0]["status"] == "queued"
    assert not files_of(hub) or len(hub.repo(REPO).commits) == 2
    done = subprocess.run([*command[:5]], env=hub_env(hub), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "README.md" in files_of(hub)
    assert json.loads((run.path / "push.json").read_text())["pushes"][0]["status"] == "done"
