r"""The verifier tells right from wrong answers, and gives up only where it says so, whatever it is given."""

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from perl.rewards import check, check_all
from perl.rewards.answers import extract_answer, gold_answer
from perl.rewards.verifier import unreadable
from perl.rewards.verifier.comparison import same_answer
from perl.rewards.verifier.symbolic import judge
from perl.rewards.verifier.verdicts import told_at_once
from tests.oracles.alarm import no_hang
from tests.oracles.answer_cases import CASES, WITHOUT_ANSWER, random_number, random_pairs, ways_to_write, with_point


def boxed(answer):
    return f"so it is \\boxed{{{answer}}}"


def statuses(pairs):
    pairs = list(pairs)
    verdicts = check_all([gold for gold, _ in pairs], [boxed(answer) for _, answer in pairs])
    return [verdict.status for verdict in verdicts]


def test_a_number_is_right_however_it_is_written():
    for _ in range(400):
        number = random_number(random)
        ways = ways_to_write(number, random)
        percentage = [f"{with_point(number * 100, 5)}%", with_point(number, 5)]
        golds = [way for way in ways if "$" not in way]
        for way in [*ways, *(percentage if (number * 10**5).denominator == 1 else [])]:
            gold = random.choice(golds)
            verdict = check(gold, boxed(way))
            assert verdict.status == "right", (gold, way)
            assert verdict.extracted == way.strip()


def test_another_number_is_wrong_however_it_is_written():
    for _ in range(400):
        number = random_number(random)
        other = number + random.choice([1, -1, Fraction(1, 10), Fraction(-1, 97), Fraction(1, 10**9)])
        for way in ways_to_write(other, random):
            assert check(str(number), boxed(way)).status == "wrong", (number, way)


@pytest.mark.parametrize(
    "answer", ["1,23", "12,34", "1234,567", ",123", "1,234,56", "1.2.3", "1//2", "/2", "3/", "1/2/3"]
)
def test_what_only_looks_like_a_number_is_none(answer):
    for gold in ("123", "1234", "1234567", "123456", "1.23", "1/2", "3", "2"):
        assert check(gold, boxed(answer)).status == "wrong"
    assert check(answer, boxed(answer)).status == "right"


HOSTILE_CODE = [
    "__import__('os').system('touch pwned')",
    "().__class__",
    "x.is_real",
    "1e999999999",
]


@pytest.mark.parametrize("code", HOSTILE_CODE)
def test_nothing_is_evaluated(code):
    for other in ("5", "x"):
        for judge_one in (lambda gold, answer: check(gold, boxed(answer)).status, lambda *pair: judge(pair)):
            with no_hang():
                assert judge_one(other, code) in ({"wrong"} if other == "5" else {"wrong", "unparsable_gold"})
                assert judge_one(code, other) in {"wrong", "unparsable_gold"}
                assert judge_one(code.replace("_", ""), other) in {"wrong", "unparsable_gold"}
    assert not list(Path.cwd().iterdir())


NONE = "unparsable_gold"
BY_GOLD_ANSWER = {  # gold answer -> verdicts on itself in a box, on 17, on no answer
    **dict.fromkeys([r"\frac{1}{2}", "$5$", "x^2", "a_1", "{1,2}", r"\pi"], ("right", "wrong", "no_answer")),
    **dict.fromkeys(["#### 1,250", "She has 3 + 4 = <<3+4=7>>7.\n#### 7"], ("right", "wrong", "no_answer")),
    **dict.fromkeys(["t(0,4]", "1/0", "0/0", "x" * 2001], ("right", NONE, NONE)),  # letter for letter
    **dict.fromkeys([r"\frac{", "", "   ", "work #### ", None], (NONE, NONE, NONE)),
}


def test_a_gold_answer_is_compared_if_it_can_be_read_and_else_right_only_letter_for_letter():
    found = {}
    for gold in BY_GOLD_ANSWER:
        completions = [boxed(gold_answer(gold or "")), boxed("17"), "no answer at all"]
        found[gold] = tuple(verdict.status for verdict in check_all([gold] * 3, completions))
    assert found == BY_GOLD_ANSWER
    assert unreadable(found) == [row for row, verdicts in enumerate(found.values()) if verdicts[1] == NONE]


def test_a_gold_answer_that_is_a_tensor_is_its_number():
    golds = [torch.tensor(7), torch.tensor(0.1), np.float32(0.1), float(np.float32(0.1)), 2**53 + 1]
    assert set(statuses(zip(golds, ("7", "0.1", "0.1", "0.1", "9007199254740993"), strict=True))) == {"right"}


def test_a_long_answer_is_right_only_letter_for_letter():
    long = "1+" * 1500 + "1"
    assert check(long, boxed(long)).status == "right"
    for gold in ("3001", "x^2 + 3001"):
        assert check(gold, boxed(long)).status == "wrong"
    digits = "1" * 2001
    assert same_answer(digits, digits + " ") is True
    assert same_answer(digits, digits + ".0") is False


@pytest.mark.parametrize("kind", CASES)
def test_right_and_nearly_right_answers(kind):
    same, other = CASES[kind]
    assert min(len(same), len(other)) >= 5
    assert dict(zip(same, statuses(same), strict=True)) == dict.fromkeys(same, "right")
    assert dict(zip(other, statuses(other), strict=True)) == dict.fromkeys(other, "wrong")


def test_near_misses_of_an_answer_are_wrong_and_other_ways_to_write_it_are_right():
    rows = [json.loads(line) for line in Path(__file__).with_name("near_misses.jsonl").read_text("utf-8").splitlines()]
    asked = [(row["gold"], answer, kind) for row in rows for kind in ("right", "wrong") for answer in row[kind]]
    completions = [answer if "boxed" in answer or "nswer" in answer else boxed(answer) for _, answer, _ in asked]
    verdicts = check_all([gold for gold, _, _ in asked], completions, timeout_seconds=30.0)
    found = zip(asked, verdicts, strict=True)
    assert [row for row, verdict in found if verdict.right is not (row[2] == "right")] == []
    assert sum(len(row["wrong"]) for row in rows) >= 200


def test_random_expressions_against_their_coefficients():
    pairs = random_pairs(150, seed=1)
    found = statuses([(gold, answer) for gold, answer, _ in pairs])
    wrong = [
        (*pair, status) for pair, status in zip(pairs, found, strict=True) if status != ["wrong", "right"][pair[2]]
    ]
    assert wrong == []
    assert 30 < sum(same for _, _, same in pairs) < 120


@pytest.mark.parametrize("completion", WITHOUT_ANSWER)
def test_a_completion_without_a_final_answer_is_said_to_have_none(completion):
    for gold in ("5", "x^2"):
        verdict = check(gold, completion)
        assert (verdict.status, verdict.extracted, verdict.right) == ("no_answer", None, False)


def test_verdicts_come_in_the_order_of_the_completions_however_often_a_pair_occurs():
    golds = ["5", r"\sqrt{8}", "5", None, r"\sqrt{8}"] * 3
    answers = ["5", r"2\sqrt{2}", "6", "5", "3"] * 3
    verdicts = check_all(golds, [boxed(answer) for answer in answers])
    assert [verdict.status for verdict in verdicts] == ["right", "right", "wrong", "unparsable_gold", "wrong"] * 3
    assert [verdict.extracted for verdict in verdicts] == answers
    assert check_all([], []) == []
    with pytest.raises(ValueError, match="zip"):
        check_all(["5"], [])


MANY = 30_000


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{" * MANY,
        "\\boxed{" + "{" * MANY + "5" + "}" * MANY + "}",
        "\\boxed{" + "1/" * MANY + "}",
        "\\boxed{5" + "%" * MANY + "}",
        "#### 5" + " " * MANY * 8 + "x",
        "answer" + " " * MANY * 8,
        "answer: \n" * MANY,
        "the answer is " * MANY + "5",
    ],
    ids=lambda text: text[:12].strip() + "..." + text[-12:].strip(),
)
def test_a_hostile_completion_does_not_hang(completion):
    with no_hang():
        verdict = check("5", completion)
    assert verdict.status in {"right", "wrong", "no_answer"}
    assert verdict.seconds >= 0


def test_random_text_gets_a_verdict():
    pieces = [
        *("\\boxed{", "}", "{", "####", "answer is", ":", "5", "-", "/", ",", ".", "%"),
        *(" ", "\n", "</think>", "$", "\\"),
    ]
    texts = ["".join(random.choices(pieces, k=random.randint(0, 12))) for _ in range(3000)]
    assert {verdict.status for verdict in check_all(texts[::2], texts[1::2])} == {
        "right",
        "wrong",
        "no_answer",
        "unparsable_gold",
    }


PIECES = [
    *("\\frac", "\\sqrt", "{", "}", "(", ")", "[", "]", "\\{", "\\}", ",", ";", "1", "23", "0.5", "x", "y_1"),
    *("n!", "^", "^{2}", "\\pm", "\\cup", "\\infty", "=", "<", "\\leq", "\\in", "\\text{cm}", "%", "\\pi"),
    *("&", "\\\\", "|", "\\begin{pmatrix}", "\\end{pmatrix}", "\\sum_{k=1}^n", "\\int", "\\sin", "$"),
    *("\\circ", "e", "i", "9^9^9", "\\overline{3}", "\\mid", "million", "\\", "_", "'"),
    *("\\text{ and }", " ", "\u221a", "\u00bd", "\u4e2d", "\x00", "\ud800"),
]


def test_random_latex_is_judged_by_processes_that_survive():
    """Five hundred random items, half of them long, among answers that are known."""
    golds, completions = ["\\sqrt{8}"], [boxed(r"2\sqrt{2}")]
    for i in range(500):
        gold, answer = (
            "".join(random.choices(PIECES, k=random.randint(1, 300 if i % 5 == 0 else 8))) for _ in range(2)
        )
        golds.append(gold)
        completions.append(boxed(answer))
    verdicts = check_all([*golds, r"\sqrt{18}"], [*completions, boxed(r"3\sqrt{2}")], timeout_seconds=2.0)
    counts = Counter(verdict.status for verdict in verdicts)
    assert (verdicts[0].status, verdicts[-1].status) == ("right", "right")
    assert set(counts) <= {"right", "wrong", "no_answer", "unparsable_gold", "timeout"}, counts
    assert counts["wrong"] > 20
    assert counts["unparsable_gold"] > 100


LONG_PARTS = [
    *("\\frac", "\\sqrt", "{", "}", "(", "[", "\\{", ",", "1", "x", "^", "\\pm", "=", "<"),
    *("\\begin{pmatrix}", "&", "\\\\", "|", "$", "9^9^9", "\\frac{1}", "\\frac{", "\\sqrt\\frac", "(1,2),"),
    *("1<x<", "((1,", "1,000,", "\\text{a", "5000!+", "\\frac{1}{3^{40000}}+"),
    *("a \\pm b ", "1 or x ", "5 cm ", "1 \u4e2d", "answer: \\( is \n"),
]


@pytest.mark.parametrize("part", LONG_PARTS)
def test_what_is_told_at_once_is_told_soon(part):
    """It runs in the trainer's process: no exponential or quadratic blow-up, no recursion error."""
    with no_hang():
        for length in (300, 1990, 100_000):
            long = (part * (length // len(part) + 1))[:length]
            for gold, answer in (
                (long, long[:-1]),
                ("5", long),
                ("(" * 50 + long, "(" * 50 + long[::-1]),
                (f"{long},1", f"1,{long}"),
            ):
                assert told_at_once(gold, answer) in {"right", "wrong", "unparsable_gold", None}
            assert extract_answer(long) is None or len(long) > 0
            assert gold_answer(long) is not None


def test_large_collections_are_left_to_the_workers():
    """Comparing each value with each is quadratic: in the trainer's process it is done for few."""
    numbers = [str(i) for i in range(90)]
    assert told_at_once(",".join(numbers[:40]), ",".join(reversed(numbers[:40]))) == "right"
    assert told_at_once(",".join(numbers), ",".join(reversed(numbers))) is None
    assert check(",".join(numbers), boxed(",".join(reversed(numbers)))).status == "right"


def test_what_takes_too_long_is_a_timeout_and_costs_nothing_else():
    golds = [r"\sqrt{8}", "5^{5^{5^{5^{5}}}}", r"\sqrt{18}"]
    answers = [r"2\sqrt{2}", "4^{4^{4^{4^{4}}}}", r"3\sqrt{2}"]
    verdicts = check_all(golds, [boxed(answer) for answer in answers], timeout_seconds=1.0)
    assert [verdict.status for verdict in verdicts] == ["right", "timeout", "right"]
    assert verdicts[1].seconds < 5
