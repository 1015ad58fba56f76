"""A push under every fault that we could think of: the repository holds the run or is untouched, never half.

What an outage or a kill cut short is in the run folder, and the same command finishes it.
"""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from perl.cli.push import command
from perl.errors import PerlError
from perl.hub.push.commit import push_package
from perl.hub.push.outbox import alone, queued_steps, read_push, read_pushes
from perl.hub.push.package import PushPackage
from perl.hub.push.publish import pack_checkpoint, publish, push, push_run, wanted_push
from perl.hub.push.requests import HubOutageError
from perl.recipe.sections import HubSection
from tests.hub.files import weights
from tests.hub.push_runs import REPO, add_best, add_checkpoint, files_of, publishable
from tests.local_hub import LocalHub

CARD = b"---\nlibrary_name: peft\ntags: [perl-rl]\n---\n# An adapter\n"
OLD = {
    "adapter_model.safetensors": b"old weights",
    "README.md": CARD,
    "eval/samples.jsonl": b"old",
    "NOTES.md": b"mine",
}
NEW = {"adapter_config.json": b"{}", "README.md": CARD + b"New.\n", "eval/results.json": b'{"perl": {}}'}
FOR_EVER = 10**6
PARTS = 3
Fault = Callable[[LocalHub], None]


def faults(requests: int) -> Iterator[tuple[str, Fault]]:
    """Every fault at every request of a push."""
    for n in range(1, requests + 1):
        yield f"cut before request {n}", lambda hub, n=n: hub.faults.cut(n)
        yield f"cut after request {n}", lambda hub, n=n: hub.faults.cut_after(n)
        yield f"500 at request {n}", lambda hub, n=n: hub.faults.fail(n, 500)
        yield f"everything cut from request {n}", lambda hub, n=n: hub.faults.cut(n, times=FOR_EVER)
        yield f"everything 503 from request {n}", lambda hub, n=n: hub.faults.fail(n, 503, times=FOR_EVER)
    yield "another commit between (412)", lambda hub: hub.faults.stale()
    yield "429 with Retry-After", lambda hub: hub.faults.fail(2, 429, retry_after=7)


def prepared(hub: LocalHub, number: int) -> tuple[str, dict[str, bytes]]:
    """A repository with an older version and somebody's own file, and files to push that no Hub has seen."""
    repo_id = f"user/adapter-{number}"
    hub.create(repo_id, OLD)
    return repo_id, NEW | {"adapter_model.safetensors": weights(b"new weights %d " % number * 100)}


def count_requests(hub: LocalHub) -> int:
    """Requests of a push without faults."""
    repo_id, files = prepared(hub, 0)
    before = hub.requests
    push_package(PushPackage(files), repo_id, may_replace=None)
    return hub.requests - before


def ours_and_known(hub: LocalHub, repo_id: str) -> dict[str, bytes]:
    """The repository without what the Hub itself, and whoever slipped in a commit, put there."""
    known = OLD.keys() | NEW.keys()
    return {name: data for name, data in hub.repo(repo_id).files().items() if name in known}


@pytest.fixture(autouse=True)
def _no_waiting_in_the_client(monkeypatch):
    """The client itself waits between its own repetitions of an upload."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))


def test_a_push_is_one_commit_of_exactly_the_package_others_files_stay_and_older_ones_of_ours_go(hub):
    repo_id, files = prepared(hub, 0)
    before = len(hub.repo(repo_id).commits)
    pushed = push_package(PushPackage(files), repo_id, may_replace=None)
    assert ours_and_known(hub, repo_id) == files | {"NOTES.md": b"mine"}
    assert len(hub.repo(repo_id).commits) == before + 1
    assert (hub.repo(repo_id).commits[-1].oid, pushed.changed) == (pushed.commit, True)
    assert (pushed.deleted, pushed.foreign) == (("eval/samples.jsonl",), ("NOTES.md",))


@pytest.mark.parametrize("part", range(PARTS))
def test_under_every_fault_the_repository_is_untouched_or_whole_and_waits_double(hub, part, monkeypatch):
    """Six tries have five waits between them, of 1, 2, 4, 8 and 16 seconds; chance only shortens them."""
    monkeypatch.setattr("perl.hub.push.requests.random.uniform", lambda _, longest: longest)
    requests = count_requests(hub)
    assert requests >= 6
    for number, (name, fault) in enumerate(faults(requests), 1):
        if number % PARTS != part:
            continue
        repo_id, files = prepared(hub, number)
        wanted, sleeps, before = files | {"NOTES.md": OLD["NOTES.md"]}, [], hub.requests
        commits = len(hub.repo(repo_id).commits) + ("412" in name)  # the one that is slipped in
        fault(hub)
        try:
            push_package(PushPackage(files), repo_id, may_replace=None, sleep=sleeps.append)
            an_outage = False
        except HubOutageError:
            an_outage = True
        hub.faults.clear()
        assert ours_and_known(hub, repo_id) in (OLD, wanted), name
        assert an_outage == name.startswith("everything"), name
        assert sum(sleeps) >= 7 or "429" not in name
        assert not an_outage or sum(sleeps) == sum(2.0**attempt for attempt in range(5)), name
        if "412" in name:  # nothing is written over a commit that was not looked at
            statuses = [request.status for request in hub.log[before:] if "/commit/" in request.path]
            assert statuses[:2] == [412, 200]
        push_package(PushPackage(files), repo_id, may_replace=None)
        assert ours_and_known(hub, repo_id) == wanted, name
        assert len(hub.repo(repo_id).commits) == commits + 1, name


UPLOAD = "/lfs/" + hashlib.sha256(weights(b"new")).hexdigest()


@pytest.mark.parametrize(("status", "path"), [(200, "/api/"), (200, UPLOAD), (403, "/info/lfs"), (404, "/commit/")])
def test_a_web_page_in_the_place_of_an_answer_is_an_outage_that_names_the_proxy(hub, status, path):
    hub.create(REPO, {})
    hub.faults.page(status, times=FOR_EVER, path=path)
    files = {"adapter_model.safetensors": weights(b"new"), "adapter_config.json": b"{}"}
    with pytest.raises(HubOutageError, match="proxy") as caught:
        push_package(PushPackage(files), REPO, sleep=lambda _: None)
    assert "hf auth login" not in str(caught.value)
    assert files.keys().isdisjoint(hub.repo(REPO).files())


@pytest.mark.usefixtures("nothing_waits")
def test_an_outage_leaves_a_queued_push_that_the_next_one_finishes_and_ends_no_training(hub, caplog):
    run = publishable()
    add_checkpoint(run, 10)
    hub.faults.cut(1, times=FOR_EVER)
    with pytest.raises(HubOutageError, match=r"user/adapter: the Hub is unreachable: .*\(6 tries\)$"):
        push_run(run, wanted_push(run, REPO, checkpoints=True, private=True, message="mine"))
    push = read_push(run)
    assert (push.status, push.repo_id, push.private) == ("queued", REPO, True)
    assert "is unreachable" in push.error
    hub.faults.clear()
    push_run(run, wanted_push(run))
    assert hub.repo(REPO).private
    assert hub.repo(REPO).head.title == "mine"
    assert "step-10" in hub.repo(REPO).tags
    assert (read_push(run).status, read_push(run).steps, read_push(run).error) == ("done", (10,), None)
    # At the end of a training it is a warning with the command.
    run = publishable("ended")
    best = add_best(run)
    hub.faults.cut(1, times=FOR_EVER)
    section = HubSection(repo_id="user/ended", push="best", private=True)
    with caplog.at_level(logging.WARNING, "perl"):
        publish(section, run)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "perl"]
    assert line.endswith("the push is kept in ended: `perl push ended` finishes it [PRL308]")
    hub.faults.clear()
    publish(section, run)
    there = hub.repo("user/ended")
    assert there.files()["adapter_model.safetensors"] == (best / "adapter_model.safetensors").read_bytes()
    assert there.private
    requests = hub.requests
    publish(section, run)  # what is done is not done again
    assert hub.requests == requests


@pytest.mark.usefixtures("nothing_waits")
def test_a_queued_push_is_not_lost_by_another_and_what_was_refused_was_not_sent(hub):
    run = publishable()
    hub.faults.cut(1, times=FOR_EVER)
    with pytest.raises(HubOutageError):
        push_run(run, wanted_push(run, "user/a", private=True, message="mine"))
    hub.faults.clear()
    push(run, "user/b")
    assert [(one.repo_id, one.status) for one in read_pushes(run)] == [("user/a", "queued"), ("user/b", "done")]
    assert wanted_push(run, "user/a").private
    assert not wanted_push(run, "user/other").private
    push(run)  # finishes what is queued
    assert hub.repo("user/a").private
    assert not hub.repo("user/b").private
    assert hub.repo("user/a").head.title == "mine"
    assert {one.status for one in read_pushes(run)} == {"done"}
    hub.create(REPO, {"adapter_model.safetensors": weights(b"theirs"), "pickle.bin": b"\x80\x04"})
    run = publishable("another")
    with pytest.raises(PerlError, match="holds pickles"):
        push(run, REPO, replace=True)
    assert read_push(run).sent == ()
    hub.commit(REPO, {}, delete=["pickle.bin"])
    with pytest.raises(PerlError, match="holds another adapter"):
        push(run)


def test_a_checkpoint_waits_in_the_outbox_though_the_run_has_deleted_it(hub):
    run = publishable()
    folder = add_checkpoint(run, 10)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    pack_checkpoint(run, 10, REPO)
    folder.rename(run.path / "deleted")
    push_run(run, wanted_push(run, "user/other"))  # what waits for one repository is not sent to another
    assert queued_steps(run, REPO) == [10]
    assert "step-10" not in hub.repo("user/other").tags
    push_run(run, wanted_push(run, REPO))
    assert files_of(hub, "step-10")["adapter_model.safetensors"] == weights
    assert (read_push(run).steps, queued_steps(run, REPO)) == ((10,), [])


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
    assert json.loads((run.path / "push.json").read_text())[0]["status"] == "queued"
    assert not files_of(hub) or len(hub.repo(REPO).commits) == 2
    done = CliRunner().invoke(command, [str(run.path)])
    assert done.exit_code == 0, done.output
    assert "README.md" in files_of(hub)
    assert read_push(run).status == "done"
    with alone(run):  # the lock is gone with the process
        pass
