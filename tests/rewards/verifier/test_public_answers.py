r"""Agreement with published test suites of other verifiers, with hand-labelled model outputs, and with data sets."""

import json
from pathlib import Path

import pytest

from perl.rewards import check, check_all
from perl.rewards.verifier import unreadable
from perl.rewards.verifier.comparison import is_plain

PUBLIC_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"

NOT_ANNOUNCED = "the answer is neither boxed nor announced"
# Cases of tier core in which this verifier says something else, and why.
DISAGREEMENTS = {
    "vc-0084": NOT_ANNOUNCED,
    "vc-0087": NOT_ANNOUNCED,
    "vc-0113": NOT_ANNOUNCED,
    "vc-0114": NOT_ANNOUNCED,
    "vc-0115": NOT_ANNOUNCED,
    "vc-0135": NOT_ANNOUNCED,
    "vc-0136": NOT_ANNOUNCED,
    "vc-0137": NOT_ANNOUNCED,
    "vc-0286": f"{NOT_ANNOUNCED} (Chinese)",
    "vc-0291": f"{NOT_ANNOUNCED} (Chinese)",
    "vc-0293": f"{NOT_ANNOUNCED} (Arabic)",
    "vc-0294": f"{NOT_ANNOUNCED} (French)",
    "vc-0296": f"{NOT_ANNOUNCED} (French)",
    "vc-0298": f"{NOT_ANNOUNCED} (French)",
    "vc-0301": f"{NOT_ANNOUNCED} (Chinese)",
    "vc-0305": f"{NOT_ANNOUNCED} (Hindi)",
    "vc-0604": f"{NOT_ANNOUNCED}; the completion is the gold answer itself",
}
# data set -> problems, gold answers that cannot be read
SETS = {
    "aime24": (30, 0),
    "aime25": (30, 0),
    "amc23": (40, 0),
    "gsm8k_test": (1319, 0),
    "gsm8k_train": (7473, 0),
    "hmmt_feb_2025": (30, 0),
    "math_500": (500, 0),
    "minerva_math": (272, 0),
    "olympiadbench": (675, 2),
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


def test_the_verifier_agrees_with_other_verifiers_test_suites():
    rows = [row for row in rows_of("verifier_cases") if row["tier"] == "core"]
    verdicts = verdicts_of(rows)
    disagreeing = {row["id"] for row, verdict in zip(rows, verdicts, strict=True) if verdict.right != row["expected"]}
    assert disagreeing == set(DISAGREEMENTS)
    assert len(rows) == 869
    assert len(disagreeing) <= 0.02 * len(rows)


def test_no_wrong_answer_of_other_verifiers_test_suites_is_right():
    rows = [row for row in rows_of("verifier_cases") if row["tier"] in {"core", "unsafe"}]
    statuses = []
    for row, verdict in zip(rows, verdicts_of(rows), strict=True):
        assert row["expected"] or not verdict.right, row["id"]
        statuses.append((row["expected"], verdict.status))
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
    problems, unread = SETS[name]
    assert len(golds) == problems
    verdicts = check_all(golds, [boxed(gold) for gold in golds], timeout_seconds=30.0)
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if not verdict.right] == []
    assert len(unreadable(golds)) <= unread


@pytest.mark.parametrize("name", SETS)
def test_another_number_is_wrong(name):
    golds = [row["answer"] for row in rows_of(name) if row["answer"].lstrip("-").isdigit()]
    assert golds or name == "hmmt_feb_2025"
    for change in (1, -1, 10):
        others = [str(int(gold) + change) for gold in golds]
        verdicts = check_all(golds, [boxed(other) for other in others])
        assert {verdict.status for verdict in verdicts} <= {"wrong"}


@pytest.mark.parametrize("name", ["gsm8k_test", "gsm8k_train"])
def test_gsm8k_answers_are_plain_and_their_own_solutions_right(name):
    rows = rows_of(name)
    for row in rows:
        assert is_plain(row["answer"]), row["id"]
        as_published = f"{row['solution']}\n#### {row['answer']}"
        assert check(row["answer"], as_published).status == "right", row["id"]
        assert check(as_published, boxed(row["answer"])).status == "right", row["id"]


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23"])
def test_answers_of_competitions_are_plain(name):
    assert all(is_plain(row["answer"]) for row in rows_of(name))


@pytest.mark.parametrize("name", ["math_500", "minerva_math", "olympiadbench"])
def test_the_answer_of_another_problem_is_wrong(name):
    """Each gold answer against the next one that is written differently."""
    golds = list(dict.fromkeys(row["answer"] for row in rows_of(name)))
    others = [*golds[1:], golds[0]]
    verdicts = check_all(golds, [boxed(other) for other in others], timeout_seconds=30.0)
    right = [(gold, other) for gold, other, verdict in zip(golds, others, verdicts, strict=True) if verdict.right]
    assert right == []
