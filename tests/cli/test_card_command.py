"""``perl card`` writes a run's card and finds what is wrong with one, here or on the Hub."""

import json
import shutil

import pytest

from perl.hub.cards import run_package
from perl.policy.name import policy_name
from perl.run.folder import Run
from tests.hub.card_runs import make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("card") / "a-run")


@pytest.fixture
def run(made, tmp_path) -> Run:
    shutil.copytree(made.path, tmp_path / "a-run")
    return Run.read(tmp_path / "a-run")


def test_a_run_is_given_its_card_which_then_is_right(perl, run):
    first = perl("card", "a-run", "--check")
    assert (first.code, first.err) == (2, "error: a-run: has no card yet (perl card a-run) [PRL206]\n")
    written = perl("card", "a-run", "--repo", "me/mine")
    assert (written.code, written.err, written.out) == (0, "", "a-run/adapter/README.md\n")
    assert "# me/mine\n" in run.card.read_text()
    checked = perl("card", "a-run", "--check")
    assert (checked.code, checked.err) == (0, "")
    first, compared, reported = checked.out.splitlines()
    assert first == "a-run/adapter/README.md: nothing is wrong with it"
    assert compared.startswith("checked: ")
    assert "2 scores recounted from 160 completions that were judged again" in compared
    assert reported.startswith("reported only: few-shot examples and sampling of the completions")
    assert reported.endswith(", what perl_run.json says of the training")
    run.card.write_text(run.card.read_text().replace("81.2", "91.2"))
    wrong = perl("card", "a-run/adapter", "--check")
    assert (wrong.code, wrong.out) == (2, "")
    (line,) = wrong.err.splitlines()
    assert line.startswith("error: README.md:")
    assert "91.2" in line


def test_the_card_may_go_into_another_file_and_a_mistake_is_one_line(perl, run):
    done = perl("card", "a-run", "-o", "card.md")
    assert (done.code, done.err, done.out) == (0, "", "card.md\n")
    assert not run.card.exists()
    absent = perl("card", "a-run", "-o", "no/such/card.md")
    assert (absent.code, absent.err) == (
        2,
        "error: no/such/card.md: cannot be written: No such file or directory [PRL213]\n",
    )
    mistakes = (
        (["absent"], "absent: is not a run, and only a run's card can be written (--check looks at a card)"),
        (["absent", "--check"], "absent: no such folder, and not a name on the Hub (a run, a folder, or user/name)"),
        (["a-run", "--check", "-o", "x"], "--output: --check writes nothing (leave it out)"),
        (["a-run", "--repo", "mine"], "--repo: 'mine' is not a name on the Hub (user/name)"),
        (["a/b", "--check"], "a/b: HF_HUB_OFFLINE is set, so the Hub is not asked (unset it)"),
    )
    for arguments, message in mistakes:
        done = perl("card", *arguments)
        assert (done.code, done.out, done.err) == (2, "", f"error: {message} [PRL206]\n")


def test_a_card_on_the_hub_is_looked_at_without_its_weights(perl, run, hub):
    files = dict(run_package(run, "user/good").files)
    hub.create("user/good", files)
    before = len(hub.log)
    done = perl("card", "user/good", "--check")
    assert (done.code, done.err) == (0, "")
    assert not any("safetensors" in request.path for request in hub.log[before:])
    assert "2 scores recounted from 160 samples" in done.out
    other = json.loads(files["eval/results.json"])
    subject = other["perl"]["subject"]
    subject["adapter_sha256"] = "0" * 64
    subject["policy"] = policy_name(subject["base_sha256"], "0" * 64, subject["adapter_config_sha256"])
    hub.commit("user/good", {"eval/results.json": json.dumps(other).encode()})
    wrong = perl("card", "user/good", "--check")
    assert wrong.code == 2
    assert "is of another adapter: sha256 000000000000, the weights beside it have" in wrong.err
    assert perl("card", "user/good@main", "--check").code == 2
