"""A run's adapter on the Hub: exactly its files, in one commit, found by the real clients, and over nobody else's."""

import json
import logging
import os

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants
from peft import PeftConfig

import perl
from perl.errors import BrokenPromiseError, PerlError, RunFolderError
from perl.hub.card.published import CARD
from perl.hub.push.commit import push_package, push_revision
from perl.hub.push.outbox import read_push, read_pushes, write_push
from perl.hub.push.package import PushPackage
from perl.hub.push.publish import publish, push, push_run, push_script, wanted_push
from perl.hub.push.requests import HubOutageError
from perl.policy.saved.adapter import CONFIG, WEIGHTS, find_adapter
from perl.recipe.sections import HubSection
from perl.run.files import sha256_of
from tests.hub.files import weights
from tests.hub.push_runs import FILES, REPO, add_best, add_checkpoint, files_of, publishable, weights_and_config
from tests.hub_fixtures import TOKEN, USER, taken_for_the_hub
from tests.local_hub import LocalHub

TEXT = b"---\nlibrary_name: peft\n---\n"
OTHER = {WEIGHTS: weights(b"somebody else's"), CONFIG: b"{}"}


def test_the_repository_holds_exactly_the_run_and_others_load_it(hub, capsys, tmp_path, caplog):
    run = publishable()
    done, difference = push_run(run, wanted_push(run, REPO))
    there = files_of(hub)
    assert sorted(there) == FILES
    assert {name: there[name] for name in (WEIGHTS, CONFIG)} == weights_and_config(run.adapter)
    assert there["eval/results.json"] == (run.path / "eval/results.json").read_bytes()
    assert difference < 1e-4
    push = read_push(run)
    assert (push.status, push.repo_id, push.commit, done.changed) == ("done", REPO, done.commit, True)
    assert push.sha256 == run.facts["fingerprint"]["adapter"]
    # The token is in no file and in no line.
    assert TOKEN not in "".join(capsys.readouterr()) + caplog.text
    login = tmp_path / "hf-home"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(login)]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert find_adapter(REPO).base_fingerprint == run.facts["fingerprint"]["base"]
    assert PeftConfig.from_pretrained(REPO).base_model_name_or_path == "sandbox:base"
    commits = len(hub.repo(REPO).commits)
    again = perl.push(run.path)  # again: nothing is committed
    assert (again.commit, again.changed, len(hub.repo(REPO).commits)) == (done.commit, False, commits)


def test_checkpoints_are_revisions_that_never_change_and_one_of_another_adapter_is_refused_by_name(hub):
    run = publishable()
    folders = {step: add_checkpoint(run, step) for step in (10, 20)}
    push_run(run, wanted_push(run, REPO, checkpoints=True))
    for step, folder in folders.items():
        there = files_of(hub, f"step-{step}")
        assert there[WEIGHTS] == (folder / WEIGHTS).read_bytes()
        assert "optimizer.pt" not in there
        assert [json.loads(row)["step"] for row in there["metrics.jsonl"].splitlines()][-1] == step
    assert read_push(run).steps == (10, 20)
    assert not (run.path / "outbox").exists()
    assert "step-20" in files_of(hub)["README.md"].decode()
    requests = hub.requests
    push_run(run, wanted_push(run, REPO, checkpoints=True))
    assert not [r for r in hub.log[requests:] if "/commit/" in r.path]
    hub.create("user/tags", {})
    push_revision(PushPackage(OTHER | {CARD: TEXT + b"one"}), "user/tags", "step-10")
    again = push_revision(PushPackage(OTHER | {CARD: TEXT + b"two"}), "user/tags", "step-10")
    assert hub.repo("user/tags").files("step-10")[CARD] == TEXT + b"one"
    assert hub.repo("user/tags").at("step-10").oid == again
    with pytest.raises(PerlError, match=r"^user/tags: has a revision step-10 with another adapter \(choose"):
        push_revision(PushPackage(OTHER | {WEIGHTS: weights(b"third")}), "user/tags", "step-10")


def test_what_the_hub_or_the_repository_refuses_is_one_line_and_not_tried_again(hub):
    hub.create(REPO, {})
    for status, said in ((401, "refuses your token"), (403, "may not write there"), (404, "no such repository")):
        hub.faults.fail(1, status, times=100, path="/commit/")
        before = hub.requests
        with pytest.raises(PerlError, match=f"^{REPO}: .*{said}.*hf auth login"):
            push_package(PushPackage(OTHER), REPO, sleep=pytest.fail)
        assert len([r for r in hub.log[before:] if "/commit/" in r.path]) == 1
        hub.faults.clear()
    with pytest.raises(PerlError, match=r"somebody/adapter: .*hf auth login"):
        push_package(PushPackage(OTHER), "somebody/adapter", sleep=pytest.fail)
    for name, held, said in (  # not for an adapter
        ("user/whole", {"config.json": b"{}", "model-00001-of-2.safetensors": b""}, "holds a model: model-00001-of-2"),
        ("user/pickled", {"adapter_model.bin": b"x"}, "holds pickles, .*: adapter_model.bin"),
        ("user/public", {"a": b"b"}, "exists and is public"),
    ):
        hub.create(name, held)
        with pytest.raises(PerlError, match=f"^{name}: {said}"):
            push_package(PushPackage(OTHER), name, private=name == "user/public")
        assert hub.repo(name).files().keys() - {".gitattributes"} == held.keys()
    push_package(PushPackage(OTHER), "user/private", private=True)
    assert hub.repo("user/private").private


@pytest.mark.usefixtures("hub")
def test_a_hub_that_holds_other_bytes_than_were_sent_is_a_broken_promise(monkeypatch):
    create = HfApi.create_commit

    def exchanged(self, repo_id, operations, **options):
        return create(self, repo_id, [CommitOperationAdd(one.path_in_repo, b"other") for one in operations], **options)

    monkeypatch.setattr(HfApi, "create_commit", exchanged)
    with pytest.raises(BrokenPromiseError, match=f"holds other bytes than were sent: {WEIGHTS}, {CONFIG}"):
        push_package(PushPackage(OTHER), REPO, sleep=pytest.fail)


@pytest.mark.usefixtures("hub")
def test_a_run_without_a_login_a_name_a_network_or_its_files_is_refused_at_once(monkeypatch, tmp_path):
    (tmp_path / "hf-home" / "token").unlink()
    run = publishable()
    with pytest.raises(PerlError, match=r"hf auth login\)$"):
        push_run(run, wanted_push(run, REPO), sleep=pytest.fail)
    (run.path / "push.json").unlink()
    with pytest.raises(RunFolderError, match=r"does not say where to push it \(--repo user/name\)"):
        wanted_push(run)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PerlError, match="is unreachable"):
        push_package(PushPackage(OTHER), REPO, sleep=pytest.fail)
    os.mkfifo(run.path / "push.json")  # a pipe in place of a file is not waited for
    with pytest.raises(PerlError, match="it is no regular file"):
        perl.push(run.path, REPO)


@pytest.mark.parametrize("name", [WEIGHTS, CARD])
def test_a_failed_check_sends_nothing(hub, name):
    run = publishable()
    if name == WEIGHTS:
        another(run, add_checkpoint(run, 10))
        kind, said = BrokenPromiseError, "loaded anew, its log-probabilities differ from the trained policy's by"
    else:
        run.record(settings={"target_modules": "/home/alice/secret"})
        kind, said = PerlError, "README.md"
    with pytest.raises(kind, match=said):
        push_run(run, wanted_push(run, REPO), sleep=pytest.fail)
    assert hub.requests == 0
    push = read_push(run)
    assert push.status == "queued"
    assert said in push.error


def another(run, folder):
    """The run as if it had trained another adapter."""
    for file, data in weights_and_config(folder).items():
        (run.adapter / file).write_bytes(data)
    run.record(fingerprint={**run.facts["fingerprint"], "adapter": sha256_of(run.adapter / WEIGHTS)})


def test_another_adapter_is_refused_in_one_line_and_stays_unless_one_push_replaces_it(hub):
    hub.create(REPO, OTHER)
    run = publishable()
    digest = hub.repo(REPO).head.tree[WEIGHTS].sha256[:12]
    with pytest.raises(PerlError, match=rf"^{REPO}: holds another adapter \({digest}\).*--replace"):
        push(run, REPO)
    assert files_of(hub)[WEIGHTS] == OTHER[WEIGHTS]
    done = push(run, REPO, replace=True)
    assert files_of(hub)[WEIGHTS] == (run.adapter / WEIGHTS).read_bytes()
    assert (list(done.replaced), hub.repo(REPO).files(done.before)[WEIGHTS]) == ([WEIGHTS], OTHER[WEIGHTS])
    # Replace holds for one push, and while that is queued.
    hub.commit(REPO, OTHER)
    run = publishable("another")
    hub.faults.fail(1, 503, times=10**6, path="/commit/")
    with pytest.raises(HubOutageError):
        push_run(run, wanted_push(run, REPO, overwrite=True), sleep=lambda _: None)
    hub.faults.clear()
    push(run)  # says nothing of it, and finishes what was asked for
    assert files_of(hub)[WEIGHTS] == (run.adapter / WEIGHTS).read_bytes()
    hub.commit(REPO, OTHER)
    with pytest.raises(PerlError, match="holds another adapter"):
        push(run)


def test_a_run_replaces_what_it_pushed_itself_also_before_a_kill_and_not_what_another_run_has(hub, monkeypatch, caplog):
    run = publishable()
    folder = add_best(run)
    first = push(run, REPO, "best")
    push(run, "user/another")
    done = push(run, REPO, "final")
    assert (done.changed, done.before) == (True, first.commit)
    assert files_of(hub)[WEIGHTS] == (run.adapter / WEIGHTS).read_bytes()
    assert [push.repo_id for push in read_pushes(run)] == ["user/another", REPO]
    # The commit arrives, the process dies before it hears of it, and the run goes on training.
    run = publishable("killed")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("perl.hub.push.publish.send_checkpoints", killed)
        with pytest.raises(KeyboardInterrupt):
            push(run, "user/killed")
    another(run, folder)
    monkeypatch.setattr("perl.hub.push.publish.check_round_trip", lambda *_: None)
    assert push(run, "user/killed").changed
    before = files_of(hub)
    second = publishable("two")
    another(second, add_checkpoint(second, 10))
    with caplog.at_level(logging.WARNING, "perl"):
        publish(HubSection(repo_id=REPO, push="end"), second)
    assert "holds another adapter" in caplog.text
    assert files_of(hub) == before


def test_a_script_replaces_as_transformers_does_and_says_so_unless_it_is_its_own(hub, caplog):
    def push_card(text):
        package = PushPackage({WEIGHTS: weights(b"mine"), CONFIG: b"{}", CARD: text})
        push_script(package, REPO, message="m", private=False, revision=None, blocking=True)

    words = TEXT + b"Words of somebody.\n"
    with caplog.at_level(logging.WARNING, "perl"):
        push_card(TEXT + b"First.\n")
        push_card(TEXT + b"Second.\n")
        assert "replaced" not in caplog.text
        hub.commit(REPO, OTHER | {CARD: words})
        push_card(TEXT + b"Third.\n")
    before = hub.repo(REPO).commits[-2].oid
    for what in (WEIGHTS, CARD):
        assert f"{REPO}: replaced the {what} that was there; commit {before} holds it" in caplog.text
    assert hub.repo(REPO).files(before)[CARD] == words


def test_a_card_that_somebody_edited_stays_and_one_that_says_nothing_does_not_count(hub):
    run = publishable()
    push(run, REPO)
    edited = files_of(hub)[CARD] + b"\nDo not use it for medicine.\n"
    hub.commit(REPO, {CARD: edited})
    with pytest.raises(PerlError, match=f"^{REPO}: its README.md was written or edited by somebody, not by a push of"):
        push(run, REPO)
    assert files_of(hub)[CARD] == edited
    push(run, REPO, replace=True)
    assert b"medicine" not in files_of(hub)[CARD]
    package = PushPackage(OTHER | {CARD: TEXT + b"Ours.\n"})
    hub.create("user/form", {CARD: b"---\nlicense: mit\n---\n"})
    push_package(package, "user/form")
    assert hub.repo("user/form").files()[CARD] == package.files[CARD]


def test_an_own_adapter_is_known_where_the_hub_keeps_no_large_files(tmp_path):
    with LocalHub(USER, TOKEN, lfs_patterns=()) as plain, taken_for_the_hub(plain, tmp_path / "home"):
        run = publishable()
        first = push(run, REPO)
        assert push_package(PushPackage(OTHER), REPO, may_replace=read_push(run).sent).before == first.commit


def test_what_is_remembered_of_a_push_is_checked_when_it_is_read():
    run = publishable()
    write_push(run, wanted_push(run, REPO))
    file = run.path / "push.json"
    (held,) = json.loads(file.read_text())
    changes = ({"repo_id": "../../x"}, {"steps": ["ten"]}, {"status": "lost"}, {"sent": "a"}, {"replace": "yes"})
    for text in ("", "{}", "[" * 100_000, *(json.dumps([{**held, **change}]) for change in changes)):
        file.write_text(text)
        with pytest.raises(RunFolderError, match=r"push.json: cannot be read: .*\(delete it and push again\)$"):
            read_push(run)
