"""``perl card`` writes a run's card and finds what is wrong with one, here or on the Hub."""

import json
import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest

from perl.cli import commands
from perl.hub.run_card import run_package
from perl.policy.name import policy_name
from perl.run.folder import Run
from tests.hub.card_runs import make_run


class Said(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("card") / "a-run")


@pytest.fixture
def run(made, tmp_path) -> Run:
    shutil.copytree(made.path, tmp_path / "a-run")
    return Run.read(tmp_path / "a-run")


@pytest.fixture
def perl(capsys) -> Callable[..., Said]:
    """A command in this process: an own one takes most of its time to import the libraries."""

    def run(*arguments: str) -> Said:
        code = commands.run(list(arguments), "perl")
        return Said(code, *capsys.readouterr())

    return run


def repository(run: Run, repo_id: str) -> dict[str, bytes]:
    """The files that would be published."""
    return dict(run_package(run, repo_id).files)


def test_a_run_is_given_its_card_which_then_is_right(perl, run):
    first = perl("card", "a-run", "--check")
    assert (first.returncode, first.stderr) == (2, "error: a-run: has no card yet (perl card a-run) [PRL206]\n")
    written = perl("card", "a-run", "--repo", "me/mine")
    assert (written.returncode, written.stderr, written.stdout) == (0, "", "a-run/adapter/README.md\n")
    assert "# me/mine\n" in run.card.read_text()
    checked = perl("card", "a-run", "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    first, compared, reported = checked.stdout.splitlines()
    assert first == "a-run/adapter/README.md: nothing is wrong with it"
    assert compared.startswith("checked: ")
    assert "2 scores recounted from 160 completions that were judged again" in compared
    assert reported.startswith("reported only: few-shot examples and sampling of the completions")
    for fact in ("name", "licence", "trainable parameters", "seconds", "hardware", "versions"):
        assert f", {fact}" in reported
    run.card.write_text(run.card.read_text().replace("81.2", "91.2"))
    wrong = perl("card", "a-run/adapter", "--check")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    (line,) = wrong.stderr.splitlines()
    assert line.startswith("error: README.md:")
    assert "91.2" in line


def test_the_card_may_go_into_another_file_and_a_mistake_is_one_line(perl, run):
    done = perl("card", "a-run", "-o", "card.md")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "card.md\n")
    assert not run.card.exists()
    absent = perl("card", "a-run", "-o", "no/such/card.md")
    assert (absent.returncode, absent.stderr) == (
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
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message} [PRL206]\n")


def test_a_card_on_the_hub_is_looked_at_without_its_weights(perl, run, hub):
    files = repository(run, "user/good")
    hub.create("user/good", files)
    before = len(hub.log)
    done = perl("card", "user/good", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert not any("safetensors" in request.path for request in hub.log[before:])
    assert "2 scores recounted from 160 samples" in done.stdout
    other = json.loads(files["eval/results.json"])
    subject = other["perl"]["subject"]
    subject["adapter_sha256"] = "0" * 64
    subject["policy"] = policy_name(subject["base_sha256"], "0" * 64, subject["adapter_config_sha256"])
    hub.commit("user/good", {"eval/results.json": json.dumps(other).encode()})
    wrong = perl("card", "user/good", "--check")
    assert wrong.returncode == 2
    assert "is of another adapter: sha256 000000000000, the weights beside it have" in wrong.stderr
    assert perl("card", "user/good@main", "--check").returncode == 2
