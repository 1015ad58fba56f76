"""lighteval beside us: the same definitions, its verdicts next to ours, and nothing of it in the calling process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perl.evaluation.reporting import judge_with_lighteval, lighteval_installed, scored_by_lighteval
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.task import TaskData, all_tasks, questions_hash
from perl.evaluation.tasks.task_data import load_task_data, question_of
from perl.rewards.verifier import check_all

pytestmark = pytest.mark.skipif(not lighteval_installed(), reason="lighteval is not installed")
PUBLIC_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
TASKS = all_tasks()

AIME_ROW = {"problem": "What is $2+2$?", "answer": "204", "solution": "It is $\\boxed{204}$."}
MATH_ROW = {"problem": "Where?", "answer": "\\frac{3}{2}", "solution": "We get $\\boxed{\\frac{3}{2}}$."}
GSM_ROW = {"problem": "How many?", "answer": "18", "solution": "3*6 = <<3*6=18>>18"}
ROWS = {"aime24": AIME_ROW, "aime25": AIME_ROW, "math_500": MATH_ROW, "gsm8k": GSM_ROW}

# What a process finds that has imported lighteval, printed at its end.
BESIDE_LIGHTEVAL = """
import json, sys
request = json.load(sys.stdin)
from perl.evaluation.tasks.lighteval_process import lighteval_config, lighteval_row
from perl.evaluation.scoring.task import all_tasks

# What lighteval makes of each row, with its own prompt functions, and its own definitions.
tasks, definitions = all_tasks(), {}
for name, rows in request["rows"].items():
    config = lighteval_config(tasks[name])
    docs = [config.prompt_function(lighteval_row(tasks[name], row), name) for row in rows]
    fields = ("name", "hf_repo", "hf_subset", "evaluation_splits", "generation_size", "stop_sequence", "version")
    definitions[name] = {
        "asked": [[doc.query, doc.get_golds()] for doc in docs],
        "config": {field: getattr(config, field) for field in fields},
    }
print(json.dumps(definitions))
"""

# How a completion may end, with R for the right answer: what is said, our verdict, lighteval's, and why they differ.
MATH_CASES = [
    ("It is $\\boxed{R}$.", True, True, ""),
    ("It is \\boxed{7777}.", False, False, ""),
    ("Therefore, the final answer is: $\\boxed{R}$. I hope it is correct", True, True, ""),
    ("The answer is $R$.", True, True, ""),
    ("ANSWER: $R$", True, True, ""),
    ("First \\boxed{7777}, then $\\boxed{R}$.", True, True, ""),
    ("We add and see", False, False, ""),
    ("We add and get $\\boxed{", False, False, ""),
    ("<think>maybe $\\boxed{7777}$</think>It is $\\boxed{R}$.", True, True, ""),
    ("<think>it is $\\boxed{R}$</think>I give up.", False, False, ""),
    (
        "It adds up to $R$. One may look again.",
        False,
        True,
        "lighteval takes the last formula where no answer is announced",
    ),
    ("<think>it is $\\boxed{R}$, or is it", False, True, "lighteval leaves reasoning that never ends in the text"),
    ("it is $\\boxed{R}$</think>I give up.", False, True, "lighteval leaves reasoning that the prompt began"),
]
WORD_CASES = [
    ("It is $\\boxed{R}$.", True, True, ""),
    ("ANSWER: Evelyn", True, False, "lighteval finds no answer in words that stand outside of formulas"),
]


def data_of(task, *rows):
    questions = tuple(question_of(TASKS[task], row, str(number)) for number, row in enumerate(rows))
    return TaskData(TASKS[task], questions, "rows.jsonl", None, questions_hash(questions))


def filled(said, gold):
    return said.replace("ANSWER", "\0").replace("R", gold).replace("\0", "ANSWER")


@pytest.mark.nightly
def test_verdicts_agree_with_lightevals_but_where_it_is_known_not_to():
    words = {"answer": "\\text{Evelyn}", "solution": "It is $\\boxed{\\text{Evelyn}}$."}
    asked = {
        "aime24": (data_of("aime24", AIME_ROW, AIME_ROW | {"answer": "033"}), MATH_CASES),
        "gsm8k": (data_of("gsm8k", GSM_ROW), MATH_CASES[:4]),
        "math_500": (data_of("math_500", MATH_ROW | words), WORD_CASES),
    }
    texts = {
        task: [[filled(said, question.gold) for said, *_ in cases] for question in data.questions]
        for task, (data, cases) in asked.items()
    }
    found = judge_with_lighteval([data for data, _ in asked.values()], texts)
    assert "lighteval" not in sys.modules
    assert torch.is_grad_enabled()
    compared = 0
    for task, (data, cases) in asked.items():
        for question, completions, theirs in zip(data.questions, texts[task], found[task], strict=True):
            ours = [verdict.right for verdict in check_all([question.gold] * len(completions), completions)]
            for case, our, their in zip(cases, ours, theirs, strict=True):
                said, our_expected, their_expected, reason = case
                assert (our, their) == (our_expected, their_expected), (task, said, reason)
                assert bool(reason) == (our != their)
                compared += 1
    assert compared == 32


def test_lightevals_score_is_counted_from_its_verdicts_beside_ours(monkeypatch):
    data = data_of("aime24", AIME_ROW, AIME_ROW)
    theirs = [[True, True], [False, True]]
    monkeypatch.setattr("perl.evaluation.reporting.judge_with_lighteval", lambda *_: {"aime24": theirs})
    statuses = [["right", "wrong"], ["right", "right"]]
    groups = {"base": [[Sample("aime24", "0", 0, 0, "x", 1, False, status) for status in row] for row in statuses]}
    own_task = data_of("aime24_boxed", AIME_ROW)  # of our own way of asking there is no score of lighteval's
    found = scored_by_lighteval([data, own_task], {"aime24": groups, "aime24_boxed": groups})
    assert list(found) == ["aime24"]
    score = found["aime24"]["base"]
    assert (score.accuracy, score.stderr, score.only_ours, score.only_lighteval) == (0.75, 0.25, 1, 1)


@pytest.fixture(scope="module")
def rows():
    """Task -> rows of its data, all there are where the public data is beside the checkout."""
    found = {task: [row] for task, row in ROWS.items()}
    if PUBLIC_DATA.is_dir():
        for task in ROWS:
            found[task] += [dict(question.row) for question in load_task_data(TASKS[task], PUBLIC_DATA).questions]
        assert sum(map(len, found.values())) > 1800
    return found


@pytest.mark.nightly
def test_definitions_are_lightevals(rows):
    request = {"rows": rows}
    command = [sys.executable, "-c", BESIDE_LIGHTEVAL]
    result = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    beside = json.loads(result.stdout.splitlines()[-1])
    for name, told in beside.items():
        task = TASKS[name]
        assert told["config"] == {
            "name": name,
            "hf_repo": task.repository,
            "hf_subset": task.subset or "default",
            "evaluation_splits": [task.split],
            "generation_size": task.max_new_tokens,
            "stop_sequence": list(task.stop),
            "version": task.version,
        }
        for row, (query, (gold,)) in zip(rows[name], told["asked"], strict=True):
            question = question_of(task, row, "")
            assert query == question.text
            assert gold == expected_gold(name, row, question.gold)


def expected_gold(task, row, gold):
    """What lighteval's prompt functions are documented to hold for right."""
    if task == "math_500":
        return f"ANSWER: {row['solution']}"
    return f" {row['solution']}\n#### {gold}" if task == "gsm8k" else gold
