"""What makes a completion right where a task says so: letters, equal text, rewards with a threshold."""

import sys

import pytest

from perl.evaluation.scoring.choices import announced_letter, right_letters
from perl.evaluation.scoring.reward_scorer import find_scorer
from perl.evaluation.scoring.scorers import SCORERS, normal
from perl.evaluation.scoring.task import Question
from perl.rewards.verifier import Judging, check_all

CHOICES = ("Paris", "London", "Rome", "Bern")

REWARDS = """
def length(completions, **columns):
    return [len(c[0]["content"]) / 10 for c in completions]

def needs_level(completions, level):
    return [float(x) for x in level]

def breaks(completions, **columns):
    raise RuntimeError("no")

async def waits(completions, solution, **columns):
    return [float(c[0]["content"] == s) for c, s in zip(completions, solution)]
"""


@pytest.fixture
def rewards_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "rewards_of_scorers.py"
    file.write_text(REWARDS)
    yield file
    sys.modules.pop("rewards_of_scorers", None)


def judged(spec, text, gold="", choices=(), **row):
    question = Question("0", "asked", gold, row, tuple(choices))
    [verdict] = find_scorer(str(spec)).verdicts([question], [text], Judging())
    return verdict.status


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("**Answer:** C", "C"),
        ("The answer is (D).", "D"),
        (r"thus \boxed{B}", "B"),
        (r"\boxed{\text{C. Rome}}", "C"),
        ("Answer: London", "B"),
        ("I first thought the answer is A. But no.\nAnswer: D", "D"),
        ("<think>Answer: A</think>\nAnswer: B", "B"),
        ("C. Rome", "C"),
        ("答案是C", "C"),
        ("Answer: E", "E"),
        ("A city in France comes to mind", None),
        ("The answer is a matter of taste", None),
        ("It may be (A) or (B)", None),
    ],
)
def test_the_letter_that_is_announced(text, letter):
    assert announced_letter(text, CHOICES) == letter


def test_a_long_text_is_searched_in_linear_time():
    assert announced_letter("answer " * 100_000 + "**" * 100_000, CHOICES) is None


@pytest.mark.parametrize(
    ("answers", "letters"),
    [(["A", "d"], ["A", "D"]), (["(b)", "C."], ["B", "C"]), (["0", "3"], ["A", "D"]), (["rome ", "Bern"], ["C", "D"])],
)
def test_right_choices_are_letters_numbers_or_texts(answers, letters):
    assert right_letters(answers, [CHOICES] * 2) == letters


def test_equal_text():
    assert judged("exact", "Paris", "Paris") == "right"
    assert judged("exact", "so: \\boxed{Paris}", "Paris") == "right"
    assert judged("exact", "paris", "Paris") == "wrong"
    assert judged("exact", " ", "Paris") == "no_answer"
    assert judged("normalised", "The  paris!", "Paris") == "right"
    assert judged("normalised", "Lyon", "Paris") == "wrong"
    assert normal("normalised", "The cat.") == normal("normalised", "a  CAT")
    assert normal("exact", "The cat.") != normal("exact", "cat")


def test_letters_and_the_verifier():
    assert judged("choice", "Answer: A", "A", CHOICES) == "right"
    assert judged("choice", "Answer: Paris", "B", CHOICES) == "wrong"
    assert judged("choice", "who knows", "A", CHOICES) == "no_answer"
    assert "needs choices" in str(SCORERS["choice"].lacking(Question("0", "q", "A", {})))
    texts = [r"\boxed{1/2}", r"\boxed{3}", "none"]
    same = find_scorer("math").verdicts([Question("0", "q", "0.5", {})] * 3, texts, Judging())
    assert [one.status for one in same] == [one.status for one in check_all(["0.5"] * 3, texts)]


def test_a_reward_is_a_scorer(rewards_file):
    assert judged(f"{rewards_file}:length", "x" * 10) == "right"
    assert judged(f"{rewards_file}:length", "x" * 9) == "wrong"
    assert judged(f"{rewards_file}:length>=0.5", "x" * 5) == "right"
    assert judged("rewards_of_scorers:length >= 0.5", "x" * 4) == "wrong"
    assert judged(f"{rewards_file}:waits", "a", "a") == "right"
    assert judged(f"{rewards_file}:needs_level>=2", "a", level=2) == "right"
    scorer = find_scorer(f"{rewards_file}:length>=0.50")
    assert scorer.name == "rewards_of_scorers:length>=0.5"
    assert scorer.label == f"rewards_of_scorers:length@{scorer.source}>=0.5"
    assert len(scorer.source) == 12
    lacking = find_scorer(f"{rewards_file}:needs_level").lacking(Question("0", "q", "", {"stage": 1}))
    assert "needs the column 'level'" in str(lacking)
    assert "stage" in str(lacking)
