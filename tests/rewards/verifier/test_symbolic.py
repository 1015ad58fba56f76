r"""What algebra decides in a worker: expressions at random points, relations up to a factor; with every math-verify."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sympy

import perl
from perl.rewards.verifier.comparison import is_plain
from perl.rewards.verifier.symbolic import is_readable, judge, read, same_by_algebra
from tests.oracles.answer_cases import CASES, random_pairs
from tests.oracles.rewritten import random_formula, rewritten_pairs

CHECKOUT = Path(__file__).resolve().parents[3]
PUBLIC_CASES = CHECKOUT.parent / "shared" / "data" / "verifier_cases.jsonl"
NEWEST = CHECKOUT / ".venv" / "newest-math-verify"

# Prints which versions ran and the verdicts; an item that overruns is a timeout.
JUDGE_ALL = """\
import importlib.metadata, json, signal, sys
import latex2sympy2_extended, math_verify
from perl.rewards.verifier.symbolic import judge

class OutOfTime(BaseException): pass

def stop(*_): raise OutOfTime

signal.signal(signal.SIGALRM, stop)
statuses = []
for pair in json.load(sys.stdin):
    signal.alarm(20)
    try:
        statuses.append(judge(pair))
    except OutOfTime:
        statuses.append("timeout")
    signal.alarm(0)
versions = [importlib.metadata.version(name) for name in ("math-verify", "latex2sympy2-extended")]
print(json.dumps([versions, math_verify.__file__, statuses]))
"""


def judged(pairs, folder=None):
    """Versions, where math-verify lies, and verdicts, in a process of its own."""
    ours = str(Path(perl.__file__).parents[1])  # the source under test, also where another one is installed
    path = os.pathsep.join([ours] if folder is None else [str(folder), ours])
    done = subprocess.run(
        [sys.executable, "-c", JUDGE_ALL],
        input=json.dumps(pairs),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def pairs():
    """Our own tables, random expressions, and the public cases where they are."""
    pairs = [pair for same, other in CASES.values() for pair in (*same, *other)]
    pairs += [(gold, answer) for gold, answer, _ in random_pairs(300, seed=2)]
    if PUBLIC_CASES.is_file():
        rows = [json.loads(line) for line in PUBLIC_CASES.read_text(encoding="utf-8").strip().split("\n")]
        pairs += [(row["gold"].strip("$"), row["pred"].strip("$")) for row in rows if row["pred_form"] == "answer"]
    return [pair for pair in dict.fromkeys(pairs) if max(map(len, pair)) < 500]


@pytest.mark.nightly
@pytest.mark.skipif(not (NEWEST / "math_verify").is_dir(), reason="no newest math-verify in .venv/newest-math-verify")
def test_both_ends_of_the_supported_range_of_math_verify_give_the_same_verdicts(pairs):
    (tested, _), tested_file, tested_statuses = judged(pairs)
    (newest, _), newest_file, newest_statuses = judged(pairs, NEWEST)
    assert tested == "0.5.2"
    assert newest == "0.9.0"
    assert Path(newest_file).is_relative_to(NEWEST)
    assert not Path(tested_file).is_relative_to(NEWEST)
    different = [
        (pair, one, other)
        for pair, one, other in zip(pairs, tested_statuses, newest_statuses, strict=True)
        if one != other
    ]
    assert different == []
    assert tested_statuses.count("right") > 200
    assert tested_statuses.count("timeout") < 10
    assert sum(not is_plain(gold) for gold, _ in pairs) > 250  # of the tables alone, without public data


@pytest.mark.nightly
def test_the_tables_hold_without_worker_processes():
    for kind, (same, other) in CASES.items():
        assert {judge(pair) for pair in same} == {"right"}, kind
        assert {judge(pair) for pair in other} == {"wrong"}, kind


def test_what_sympy_rewrites_is_the_same_and_what_has_a_term_more_is_not():
    pairs = list(rewritten_pairs(20, seed=3))
    statuses = [judge((gold, answer)) for gold, answer, _ in pairs]
    wrong = [
        (*pair, status) for pair, status in zip(pairs, statuses, strict=True) if status != ["wrong", "right"][pair[2]]
    ]
    assert wrong == []
    assert 3 < sum(same for *_, same in pairs) < 17


def test_a_formula_that_is_read_has_pythons_value_at_points_of_the_tests_own():
    draw = random.Random(0)
    formulas = [random_formula(draw, depth=3) for _ in range(20)]
    for text, compute in formulas:
        for point in (1.7, -0.3):
            found = sympy.sympify(read(text))
            at = {symbol: sympy.Float(point, 30) for symbol in found.free_symbols}
            assert float(found.subs(at)) == pytest.approx(compute(point), rel=1e-9, abs=1e-9), text


@pytest.mark.parametrize(
    "answer",
    ["x<i<y", r"y_1<i\cdot \sum_{k=1}^n", r"\begin{pmatrix}1\end{pmatrix}\begin{pmatrix}1\\2\end{pmatrix}", "i<2"],
)
def test_what_sympy_refuses_to_compare_is_not_the_gold_answer(answer):
    for gold in ("5", "x+1", r"\begin{pmatrix}1\\2\\3\end{pmatrix}"):
        assert judge((gold, answer)) == "wrong"
    assert judge((answer, "5")) in {"wrong", "unparsable_gold"}


def test_without_an_answer_only_the_gold_answer_is_judged():
    assert judge(("x^2", None)) == "no_answer"
    assert judge((r"\frac{", None)) == "unparsable_gold"
    with pytest.raises(ValueError, match="no gold answer"):
        judge((None, "5"))


READABLE = [
    *("x^2", r"\frac{x}{2}", "x+y=1", r"\begin{pmatrix}x\\1\end{pmatrix}", r"(1, \pi)", "5 cm", "a_1", "x>y"),
    *(r"0.\overline{3}", r"L_\odot", "E_0"),
]
UNREADABLE = [r"\frac{", "t(0,4]", r"\foo{", "x+", "1/0", r"\sqrt[", "(" * 300 + "x" + ")" * 300 + "("]


def test_gold_answers_that_cannot_be_read_are_right_only_letter_for_letter():
    assert [text for text in READABLE if not is_readable(text)] == []
    for text in UNREADABLE:
        assert not is_readable(text)
        assert judge((text, "5")) == "unparsable_gold"
        assert judge((text, text)) == "right"


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("R", "r", False),
        ("i^2", "-1", True),
        (r"\sum_{i=1}^{3} i", "6", True),
        ("x^2+1", "(x-i)(x+i)", True),
        ("(-1)^n", r"\cos(n \pi)", True),
        (r"\sqrt{x^2}", "x", False),
        ("9^{99999}", "5", False),
        ("x=1", "2x=2", True),
        ("x<y", "y>x", True),
        ("x<y", "-x<-y", False),
        (r"\sqrt{2}", "1.414213", True),
        (r"\sqrt{2}", "1.414214", True),
        (r"\sqrt{2}", "1.414215", False),
        (r"10^{-30} \pi", r"2 \cdot 10^{-30} \pi", False),
        (r"\sin^2 x + \cos^2 x - 1", "0", True),
        (r"\sqrt{2}\sqrt{3}-\sqrt{6}", "0", True),
        (r"(x+1)^2-x^2-2x-1", "0", True),
        (r"e^{\ln x}-x", r"\ln(e^x)-x", True),
        (r"\infty", r"-\infty", False),
        (r"\frac{1}{", "1", False),
    ],
)
def test_what_algebra_says(gold, answer, same):
    assert bool(same_by_algebra(gold, answer)) is same
    assert bool(same_by_algebra(answer, gold)) is same
