r"""Agreement with published test suites of other verifiers, with hand-labelled model outputs, and with data sets."""

import itertools
import json
from pathlib import Path

import pytest

from perl.rewards import check, check_all
from perl.rewards.verifier import unreadable
from perl.rewards.verifier.comparison import is_plain

PUBLIC_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"

# Cases of tier core in which this verifier says something else, and why.
DISAGREEMENTS = dict.fromkeys(
    ["vc-0136", "vc-0286", "vc-0291", "vc-0296", "vc-0298", "vc-0301", "vc-0305", "vc-0604"],
    "the answer is neither boxed nor announced, or it is in another language than English",
)
# data set -> problems, gold answers that cannot be read, whether all are plain: numbers and words
SETS = {
    "aime24": (30, 0, True),
    "aime25": (30, 0, True),
    "amc23": (40, 0, True),
    "gsm8k_test": (1319, 0, True),
    "gsm8k_train": (7473, 0, True),
    "hmmt_feb_2025": (30, 0, False),
    "math_500": (500, 0, False),
    "minerva_math": (272, 0, False),
    "olympiadbench": (675, 2, False),
}


def rows_of(name):
    path = PUBLIC_DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"the public data set {name} is not beside the checkout")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]


def boxed(answer):
    return f"\\boxed{{{answer}}}"


def verdicts_of(rows):
    completions = [boxed(row["pred"]) if row["pred_form"] == "answer" else row["pred"] for row in rows]
    return check_all([row["gold"] for row in rows], completions, timeout_seconds=30.0)


def test_the_verifier_agrees_with_other_verifiers_test_suites_and_calls_no_wrong_answer_right():
    rows = [row for row in rows_of("verifier_cases") if row["tier"] in {"core", "unsafe"}]
    judged = list(zip(rows, verdicts_of(rows), strict=True))
    core = [(row, verdict) for row, verdict in judged if row["tier"] == "core"]
    disagreeing = {row["id"] for row, verdict in core if verdict.right != row["expected"]}
    assert disagreeing == set(DISAGREEMENTS)
    assert len(core) == 869
    assert len(disagreeing) <= 0.01 * len(core)
    assert [row["id"] for row, verdict in judged if verdict.right and not row["expected"]] == []
    statuses = [(row["expected"], verdict.status) for row, verdict in judged]
    assert statuses.count((True, "right")) > 330
    assert statuses.count((False, "wrong")) > 500


def test_code_in_an_answer_is_not_run():
    rows = [row for row in rows_of("verifier_cases") if row["tier"] == "unsafe"]
    assert len(rows) >= 6
    for form in ("{}", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "The answer is {}"):
        for row in rows:
            assert not check(row["gold"], form.format(row["pred"])).right
            assert check(form.format(row["pred"]), boxed("5")).status in {"wrong", "unparsable_gold"}
    assert not list(Path.cwd().iterdir())  # tests run in an empty folder, and so do the worker processes
    assert not list(PUBLIC_DATA.glob("marker*"))


@pytest.mark.parametrize("name", SETS)
def test_gold_answers_are_right_and_nearly_all_readable(name):
    golds = [row["answer"] for row in rows_of(name)]
    problems, unread, plain = SETS[name]
    assert len(golds) == problems
    assert all(map(is_plain, golds)) is plain
    verdicts = check_all(golds, [boxed(gold) for gold in golds], timeout_seconds=30.0)
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if not verdict.right] == []
    assert len(unreadable(golds)) <= unread


@pytest.mark.parametrize("name", SETS)
def test_another_answer_is_wrong(name):
    """Another number, and where answers are no plain numbers the next one that is written differently."""
    answers = [row["answer"] for row in rows_of(name)]
    numbers = [gold for gold in answers if gold.lstrip("-").isdigit()]
    assert numbers or name == "hmmt_feb_2025"
    pairs = [(gold, str(int(gold) + change)) for gold in numbers for change in (1, -1, 10)]
    if name in ("math_500", "minerva_math", "olympiadbench"):
        pairs += itertools.pairwise([*dict.fromkeys(answers), answers[0]])
    verdicts = check_all([gold for gold, _ in pairs], [boxed(other) for _, other in pairs], timeout_seconds=30.0)
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.right] == []
    assert {verdict.status for verdict in verdicts[: 3 * len(numbers)]} <= {"wrong"}


@pytest.mark.parametrize("name", ["gsm8k_test", "gsm8k_train"])
def test_gsm8ks_own_solutions_are_right(name):
    rows = rows_of(name)
    answers = [row["answer"] for row in rows]
    as_published = [f"{row['solution']}\n#### {row['answer']}" for row in rows]
    assert {verdict.status for verdict in check_all(answers, as_published)} == {"right"}
    assert {verdict.status for verdict in check_all(as_published, list(map(boxed, answers)))} == {"right"}
