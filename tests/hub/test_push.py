"""A run's adapter on the Hub: exactly its files, in one commit, found by the real clients."""

import json
import os

import pytest
from huggingface_hub import constants
from peft import PeftConfig

import perl
from perl.errors import BrokenPromiseError, PerlError, RunFolderError
from perl.hub.found_card import find_card
from perl.hub.push.commit import push_package, push_revision
from perl.hub.push.outbox import read_push
from perl.hub.push.package import Package
from perl.hub.push.publish import push_run, wanted_push
from perl.hub.run_card import write_card
from perl.policy.saved.adapter import WEIGHTS, find_adapter
from perl.run.files import sha256_of
from perl.run.folder import Run
from tests.hub.files import weights
from tests.hub.push_runs import FILES, REPO, add_checkpoint, files_of, publishable, weights_and_config
from tests.hub_fixtures import TOKEN

CARD = b"---\nlibrary_name: peft\n---\n"
SCORE = b"- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 41.2\n"
OTHER = {"adapter_model.safetensors": weights(b"other"), "adapter_config.json": b"{}"}


def test_the_repository_holds_exactly_the_run_and_others_load_it(hub, capsys, tmp_path, caplog):
    run = publishable()
    done, difference = push_run(run, wanted_push(run, REPO))
    there = files_of(hub)
    assert sorted(there) == FILES
    assert {name: there[name] for name in weights_and_config(run.adapter)} == weights_and_config(run.adapter)
    assert there["eval/results.json"] == (run.path / "eval/results.json").read_bytes()
    assert difference < 1e-4
    assert done.changed
    push = read_push(run)
    assert (push.status, push.repo_id, push.commit, push.tries) == ("done", REPO, done.commit, 1)
    assert push.sha256 == run.facts["fingerprint"]["adapter"]
    # The token is in no file and in no line.
    said = "".join(capsys.readouterr()) + caplog.text
    assert TOKEN not in said
    login = tmp_path / "hf-home"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(login)]
    assert len(written) > len(FILES)
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert all(TOKEN.encode() not in data for data in there.values())
    assert find_adapter(REPO).base_fingerprint == run.facts["fingerprint"]["base"]
    assert PeftConfig.from_pretrained(REPO).base_model_name_or_path == "sandbox:base"
    commits = len(hub.repo(REPO).commits)
    again = perl.push(run.path)  # again: nothing is committed
    assert (again.commit, again.changed) == (done.commit, False)
    assert len(hub.repo(REPO).commits) == commits


def test_checkpoints_are_revisions_that_never_change_and_one_of_another_adapter_is_refused_by_name(hub):
    run = publishable()
    folders = {step: add_checkpoint(run, step) for step in (10, 20)}
    push_run(run, wanted_push(run, REPO, checkpoints=True))
    for step, folder in folders.items():
        there = files_of(hub, f"step-{step}")
        assert there[WEIGHTS] == (folder / WEIGHTS).read_bytes()
        assert "optimizer.pt" not in there
        assert "plots/curves.png" not in there
        assert [json.loads(row)["step"] for row in there["metrics.jsonl"].splitlines()][-1] == step
    assert read_push(run).steps == (10, 20)
    assert not (run.path / "outbox").exists()
    assert "step-20" in files_of(hub)["README.md"].decode()
    requests = hub.requests
    push_run(run, wanted_push(run, REPO, checkpoints=True))
    assert not [r for r in hub.log[requests:] if "/commit/" in r.path]
    hub.create("user/tags", {})
    push_revision(Package(OTHER | {"README.md": CARD + b"one"}), "user/tags", "step-10")
    again = push_revision(Package(OTHER | {"README.md": CARD + b"two"}), "user/tags", "step-10")
    assert hub.repo("user/tags").files("step-10")["README.md"] == CARD + b"one"
    assert hub.repo("user/tags").at("step-10").oid == again
    with pytest.raises(PerlError, match=r"^user/tags: has a revision step-10 with another adapter \(choose"):
        push_revision(Package(OTHER | {WEIGHTS: weights(b"third")}), "user/tags", "step-10")


def test_what_the_hub_or_the_repository_refuses_is_one_line_and_not_tried_again(hub):
    hub.create(REPO, {})
    for status, said in (
        (401, "the Hub refuses your token (hf auth login)"),
        (403, "your token may not write there (choose another name, or a token with write: hf auth login)"),
        (404, "the Hub has no such repository, or it is not yours (hf auth login)"),
    ):
        hub.faults.fail(1, status, times=100, path="/commit/")
        before = hub.requests
        with pytest.raises(PerlError) as caught:
            push_package(Package(OTHER), REPO, sleep=pytest.fail)
        assert str(caught.value) == f"{REPO}: {said}"
        assert len([r for r in hub.log[before:] if "/commit/" in r.path]) == 1
        hub.faults.clear()
    with pytest.raises(PerlError, match=r"somebody/adapter: .*hf auth login"):
        push_package(Package(OTHER), "somebody/adapter", sleep=pytest.fail)
    for name, held, said in (  # not for an adapter
        (
            "user/whole",
            {"config.json": b"{}", "model-00001-of-2.safetensors": b""},
            "holds a whole model: model-00001-of-2",
        ),
        (
            "user/pickled",
            {"adapter_model.bin": b"x"},
            "holds pickles, which run code when they are loaded: adapter_model.bin",
        ),
    ):
        hub.create(name, held)
        with pytest.raises(PerlError, match=said):
            push_package(Package(OTHER), name)
        assert hub.repo(name).files().keys() - {".gitattributes"} == held.keys()


def test_private_is_private_or_refused(hub):
    push_package(Package(OTHER), REPO, private=True)
    assert hub.repo(REPO).visibility.private
    hub.create("user/public", {"a": b"b"})
    with pytest.raises(PerlError, match="user/public: exists and is public"):
        push_package(Package(OTHER), "user/public", private=True)
    assert "adapter_config.json" not in hub.repo("user/public").files()


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
        push_package(Package(OTHER), REPO, sleep=pytest.fail)
    for name in ("push.json", "run.json"):  # a pipe in place of a file is not waited for
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)
        with pytest.raises(PerlError, match="it is no regular file"):
            perl.push(run.path, REPO)
        (run.path / name).unlink()


@pytest.mark.parametrize("name", [WEIGHTS, "README.md"])
def test_a_failed_check_sends_nothing_and_other_weights_are_not_taken_for_another_adapter(hub, name):
    run = publishable()
    if name == WEIGHTS:
        for file, data in weights_and_config(add_checkpoint(run, 10)).items():
            (run.adapter / file).write_bytes(data)
        run.facts["fingerprint"]["adapter"] = sha256_of(run.adapter / WEIGHTS)
        kind, said = BrokenPromiseError, "loaded anew, its log-probabilities differ from the trained policy's by"
    else:
        run.record(settings={"target_modules": "/home/alice/secret"})
        kind, said = PerlError, "README.md"
    before = hub.requests
    with pytest.raises(kind, match=said):
        push_run(run, wanted_push(run, REPO), sleep=pytest.fail)
    assert hub.requests == before
    push = read_push(run)
    assert push.status == "queued"
    assert said in push.error
    run = publishable("changed")
    write_card(run)
    file = run.adapter / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of one number the last bit but a few
    file.write_bytes(content)
    for show in (lambda run: perl.push(run, REPO), lambda run: find_card(str(run.path)), write_card):
        with pytest.raises(PerlError, match=r"the run trained [0-9a-f]{12}: it was changed since"):
            show(Run.read(run.path))
    assert ("model", REPO) not in hub.store.repositories
