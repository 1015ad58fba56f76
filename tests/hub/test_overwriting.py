"""Another adapter in a repository is not overwritten without a word."""

import json
import logging

import pytest
from click.testing import CliRunner

from perl.cli.push import command
from perl.errors import PerlError, RunFolderError
from perl.hub.card.form import CARD
from perl.hub.push.outbox import read_push, read_pushes, write_push
from perl.hub.push.package import Package
from perl.hub.push.publish import publish, push, push_run, wanted_push
from perl.hub.push.retries import HubOutageError
from perl.hub.push.script_push import push_script
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe.sections import HubSection
from perl.run.files import sha256_of
from tests.hub.files import weights
from tests.hub.push_runs import REPO, add_best, add_checkpoint, files_of, publishable, weights_and_config

OTHER = {WEIGHTS: weights(b"somebody else's"), CONFIG: b"{}"}


def test_another_adapter_is_refused_in_one_line_and_stays_unless_one_push_replaces_it(hub):
    hub.create(REPO, OTHER)
    run = publishable()
    with pytest.raises(PerlError) as caught:
        push(run, REPO)
    digest = hub.repo(REPO).head.tree[WEIGHTS].sha256[:12]
    hint = "(--replace overwrites it, or another --repo)"
    assert str(caught.value) == f"{REPO}: holds another adapter ({digest}), which this run has not pushed {hint}"
    assert files_of(hub)[WEIGHTS] == OTHER[WEIGHTS]
    done = push(run, REPO, replace=True)
    assert files_of(hub)[WEIGHTS] == (run.adapter / WEIGHTS).read_bytes()
    assert hub.repo(REPO).files(done.replaced)[WEIGHTS] == OTHER[WEIGHTS]
    # Replace holds for one push, and while that is queued.
    hub.commit(REPO, OTHER)
    run = publishable("another")
    hub.faults.fail(1, 503, times=10**6, path="/commit/")
    with pytest.raises(HubOutageError):
        push_run(run, wanted_push(run, REPO, overwrite=True), sleep=lambda _: None)
    hub.faults.clear()
    assert read_push(run).replace
    push(run)  # says nothing of it, and finishes what was asked for
    assert files_of(hub)[WEIGHTS] == (run.adapter / WEIGHTS).read_bytes()
    assert not read_push(run).replace
    hub.commit(REPO, OTHER)
    with pytest.raises(PerlError, match="holds another adapter"):
        push(run)


def test_a_run_replaces_what_it_pushed_itself_also_what_it_sent_before_a_kill(hub, monkeypatch):
    run = publishable()
    add_best(run)
    first = push(run, REPO, "best")
    push(run, "user/another")
    done = push(run, REPO, "final")
    assert done.changed
    assert done.replaced == first.commit
    assert files_of(hub)[WEIGHTS] == (run.adapter / WEIGHTS).read_bytes()
    assert [push.repo_id for push in read_pushes(run)] == ["user/another", REPO]
    weights_of = {sha256_of(run.adapter / WEIGHTS), sha256_of(run.path / "best" / "adapter" / WEIGHTS)}
    assert weights_of < set(read_push(run).sent)
    # The commit arrives, the process dies before it hears of it, and the run goes on training.
    run = publishable("killed")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("perl.hub.push.publish.send_checkpoints", killed)
        with pytest.raises(KeyboardInterrupt):
            push(run, "user/killed")
    for file, data in weights_and_config(add_best(run)).items():
        (run.adapter / file).write_bytes(data)
    run.record(fingerprint={**run.facts["fingerprint"], "adapter": sha256_of(run.adapter / WEIGHTS)})
    (run.path / "probe.json").unlink()
    monkeypatch.setattr("perl.hub.push.publish.check_round_trip", lambda *_: None)
    assert push(run, "user/killed").changed


def test_a_run_of_the_same_recipe_does_not_overwrite_the_first(hub, caplog):
    first, second = publishable("one"), publishable("two")
    push(first, REPO)
    for file, data in weights_and_config(add_best(second)).items():
        (second.adapter / file).write_bytes(data)
    second.record(fingerprint={**second.facts["fingerprint"], "adapter": sha256_of(second.adapter / WEIGHTS)})
    (second.path / "probe.json").unlink()
    with caplog.at_level(logging.WARNING, "perl"), pytest.MonkeyPatch.context() as changed:
        changed.setattr("perl.hub.push.publish.check_round_trip", lambda *_: None)
        publish(HubSection(repo_id=REPO, push="end"), second)
    assert "holds another adapter" in caplog.text
    assert files_of(hub)[WEIGHTS] == (first.adapter / WEIGHTS).read_bytes()


def _script_push(card):
    package = Package({WEIGHTS: weights(b"mine"), CONFIG: b"{}", CARD: card})
    push_script(package, REPO, message="m", private=False, revision=None, blocking=True)


def test_a_script_replaces_as_transformers_does_and_says_so_unless_it_is_its_own_card(hub, caplog):
    first, second, third = (f"---\nlicense: mit\n---\n{text}.\n".encode() for text in ("First", "Second", "Third"))
    words = b"---\nlicense: mit\n---\nWords of somebody.\n"
    with caplog.at_level(logging.WARNING, "perl"):
        _script_push(first)
        _script_push(second)
        assert "replaced" not in caplog.text
        hub.commit(REPO, OTHER | {CARD: words})
        _script_push(third)
    before = hub.repo(REPO).commits[-2].oid
    for what in ("adapter", CARD):
        assert f"{REPO}: replaced the {what} that was there; commit {before} holds it" in caplog.text
    assert hub.repo(REPO).files(before)[CARD] == words


def test_the_command_replaces_when_it_is_told_to_and_says_which_checkpoints_went_along(hub):
    hub.create(REPO, OTHER)
    run = publishable()
    for steps, option in (((), "--replace"), ((10, 20), "--checkpoints")):
        for step in steps:
            add_checkpoint(run, step)
        asked = CliRunner().invoke(
            command, list(dict.fromkeys([str(run.path), "--repo", REPO, option, "--checkpoints"]))
        )
        assert asked.exit_code == 0, asked.output
        assert ("replaced the adapter that was there; commit " in asked.output) == (option == "--replace")
        (line,) = [line for line in asked.output.splitlines() if line.startswith("steps")]
        assert line == (
            "steps    step-10, step-20, each a revision" if steps else "steps    none: the run holds no checkpoint"
        )
        assert set(hub.repo(REPO).tags) == {f"step-{step}" for step in steps}


def test_what_is_remembered_of_a_push_is_checked_when_it_is_read():
    run = publishable()
    write_push(run, wanted_push(run, REPO))
    file = run.path / "push.json"
    held = json.loads(file.read_text())
    changes = (
        {"repo_id": "../../x"},
        {"repo_id": 5},
        {"steps": ["ten"]},
        {"steps": None},
        {"status": "lost"},
        {"which": 3},
        {"sent": [1]},
        {"sent": {"user/a": ["a"]}},
        {"trying": "a"},
        {"replace": "yes"},
    )
    changed = [json.dumps({**held, "pushes": [{**held["pushes"][0], **change}]}) for change in changes]
    for text in ("", "[]", '{"status": "done"}', '{"steps": [], "hostile": 1}', *changed):
        file.write_text(text)
        with pytest.raises(
            RunFolderError, match=r"push.json: cannot be read: .*\(delete it and push again\)$"
        ) as caught:
            read_push(run)
        assert "\n" not in str(caught.value), text
