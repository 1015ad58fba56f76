"""Scores by a user's own reward: named by its code, limited in time, and never a 0 that is a failure."""

import json
import os
import sys
from pathlib import Path

import pytest

import perl
from perl.errors import PerlError, RewardError
from perl.evaluation.comparing.evaluations import compare
from perl.evaluation.comparing.text import as_plain
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.rescore import rescore
from perl.evaluation.scoring.reward_scorer import find_scorer
from perl.evaluation.scoring.task import Question
from perl.rewards.verifier import Judging

COLUMNS = {"prompt": "question", "answer": "gold"}
SUMS = [{"question": f"{i}+{i + 1}=", "gold": str(2 * i + 1), "id": f"sum{i}"} for i in range(12)]
SHORT = """
def score(completions, **columns):
    return [1.0 if len(c[0]["content"]) < 8 else 0.0 for c in completions]
"""
ALWAYS = """
def score(completions, **columns):
    return [1.0] * len(completions)
"""
RAISES = """
def score(completions, **columns):
    raise KeyError("no such thing")
"""
HANGS_ONCE = """
import time

def score(completions, prompts, **columns):
    if "3+4=" in str(prompts):
        time.sleep(60)
    return [1.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """Each call finds modules anew, as a command of its own does."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    forget()


def forget():
    for name in ("mine", "mine_too"):
        sys.modules.pop(name, None)


def reward(code, folder="."):
    Path(folder).mkdir(exist_ok=True)
    file = Path(folder, "mine.py")
    file.write_text(code)
    forget()
    sys.path_importer_cache.clear()
    sys.path[:] = [entry for entry in sys.path if not Path(entry, "mine.py").is_file()]
    return f"{file}:score"


def evaluate(adapter, output, scorer, **settings):
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    usual = {"max_new_tokens": 6, "lighteval": False, "device": "cpu", "base_cache": False, "columns": COLUMNS}
    chosen = EvalSettings(**{**usual, "scorer": scorer, **settings})
    return perl.evaluate(adapter, None, ["sums.jsonl"], 2, output=output, settings=chosen)


def kept(output):
    return [json.loads(line) for line in Path(output, "samples.jsonl").read_text().splitlines()]


def test_rewards_of_one_name_and_other_code_are_other_protocols(adapter):
    one = evaluate(adapter, "one", reward(SHORT, "a"))
    two = evaluate(adapter, "two", reward(ALWAYS, "b"))
    windows = evaluate(adapter, "windows", reward(SHORT.replace("\n", "\r\n"), "c"))
    hashes = [found.tasks[0].protocol_hash for found in (one, two, windows)]
    assert hashes[0] == hashes[2] != hashes[1]
    names = [found.tasks[0].scorer for found in (one, two)]
    with pytest.raises(PerlError) as refused:
        compare([one, two])
    assert f"scorer {names[0]} and {names[1]}" in str(refused.value)
    assert f"Judged by: sums {names[0]}." in as_plain(compare([one, windows]))
    assert find_scorer("accuracy").source == ""


@pytest.mark.filterwarnings("ignore")
def test_a_reward_that_raises_ends_the_evaluation_with_its_line_and_the_samples_stay(adapter):
    with pytest.raises(RewardError) as failure:
        evaluate(adapter, "out", reward(RAISES))
    for part in ("reward score: failed on 17 completions", "mine.py:3: KeyError: 'no such thing'", "problem sum"):
        assert part in str(failure.value)
    assert not Path("out/results.json").exists()
    assert len(kept("out")) == 17
    assert [one["status"] for one in kept("out")].count("not_judged") == 1
    whole = evaluate(adapter, "whole", reward(SHORT))
    again = evaluate(adapter, "out", reward(SHORT))
    assert again.tasks == whole.tasks
    assert len(kept("out")) == 48
    judged = Path("out/results.json").read_bytes()
    with pytest.raises(RewardError, match=r"mine\.py:3: KeyError"):
        rescore("out", tasks=["sums.jsonl"], columns=COLUMNS, scorer=reward(RAISES), lighteval=False)
    assert Path("out/results.json").read_bytes() == judged


def test_one_completion_that_takes_too_long_is_said_and_not_judged(adapter, caplog):
    found = evaluate(adapter, "out", reward(HANGS_ONCE), scorer_timeout=2)
    assert found.tasks[0].score.accuracy == pytest.approx(11 / 12)
    assert found.tasks[0].score.unjudged == pytest.approx(1 / 12)
    assert "reward score: timeout: " in caplog.text
    assert "for problem sum3, '3+4='" in caplog.text
    assert "Not judged:" in Path("out/table.md").read_text()


@pytest.mark.parametrize(("seconds", "status"), [(0, "right"), (10, "wrong")])
def test_without_a_limit_a_reward_is_called_in_this_process(seconds, status):
    code = (
        f"import os\n\ndef score(completions):\n    return [float(os.getpid() == {os.getpid()})] * len(completions)\n"
    )
    scorer = find_scorer(reward(code), timeout_seconds=seconds)
    assert scorer.verdicts([Question("0", "asked", "", {})], ["text"], Judging())[0].status == status
