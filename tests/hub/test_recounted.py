"""A run's scores leave it, and stand on its card, only as its samples give them."""

import json

import pytest

from perl.cli.commands import run as run_command
from perl.errors import EXIT_USER_MISTAKE, PerlError
from perl.evaluation.recounting.files import PUBLISHED
from perl.evaluation.scoring.results import read_results
from perl.hub.card.candidate import find_candidate
from perl.hub.push.publish import pack
from perl.run.folder import Run
from tests.evaluation.forgeries import FORGERIES
from tests.hub.push_runs import publishable

REPO = "user/adapter"
NAMES = ("accuracy", "every bit 1 and every figure that follows", "p", "protocol_hash")


@pytest.fixture
def run(tmp_path):
    return publishable(tmp_path / "run")


def packed(run: Run):
    return pack(find_candidate(Run.read(run.path)), REPO)


def test_scores_that_the_samples_do_not_give_are_neither_packed_nor_on_a_card(run, capsys):
    files = {file: file.read_bytes() for file in (run.path / "eval").iterdir()}
    for name in NAMES:
        FORGERIES[name].edit(run.path / "eval")
        with pytest.raises(PerlError, match=FORGERIES[name].said) as caught:
            packed(run)
        assert all(line.startswith("eval/") for line in str(caught.value).splitlines()), name
        for file, content in files.items():
            file.write_bytes(content)
    FORGERIES["difference"].edit(run.path / "eval")
    assert run_command(["card", str(run.path)], "perl") == EXIT_USER_MISTAKE
    assert "difference.mean is 0.526 in the file, counted is" in capsys.readouterr().err
    (run.path / "eval" / "samples.jsonl").unlink()
    with pytest.raises(PerlError, match=r"cannot be counted again, there is no samples.jsonl"):
        packed(run)


def test_the_samples_are_published_without_their_texts_and_give_the_scores(run):
    content = packed(run).files[PUBLISHED]
    file = run.path / "eval" / "samples.jsonl"
    lines = file.read_text().splitlines()
    there = [json.loads(line) for line in content.decode().splitlines()]
    assert there == [{name: value for name, value in json.loads(line).items() if name != "text"} for line in lines]
    (task,) = read_results(run.path / "eval").tasks
    for who, score in (("base", task.base), ("adapter", task.adapter)):
        rights = [line["status"] == "right" for line in there if line["policy"] == task.samples[who]]
        assert score.accuracy == pytest.approx(sum(rights) / len(rights))
        assert len(rights) == score.n * score.k
    others = [line.replace('"policy": "', '"policy": "c') for line in lines]  # of earlier adapters
    file.write_text("\n".join([*lines, *others]) + "\n")
    assert len(packed(run).files[PUBLISHED].splitlines()) == len(lines)
