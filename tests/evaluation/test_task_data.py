"""Questions and golds: from folders in either form, from the sandbox, and what is said where they are missing."""

import collections
import dataclasses
import json
import math
from pathlib import Path

import pytest

from perl.errors import DataError
from perl.evaluation.scoring.task import all_tasks
from perl.evaluation.tasks.task_data import load_task_data, question_of
from perl.rewards.verifier import check_all

PUBLIC_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
TASKS = all_tasks()
COUNTS = {
    "aime24": 30,
    "aime25": 30,
    "math_500": 500,
    "gsm8k": 1319,
    "amc23": 40,
    "minerva": 272,
    "hmmt_feb_2025": 30,
    "olympiadbench": 675,
}


def folder_with(tmp_path, task, text):
    (tmp_path / TASKS[task].file).write_text(text, encoding="utf-8")
    return tmp_path


def rows(*objects):
    return "".join(json.dumps(row) + "\n" for row in objects)


def mistake(task, folder, **options):
    with pytest.raises(DataError) as failure:
        load_task_data(TASKS[task], folder, **options)
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.mark.nightly
@pytest.mark.parametrize("task", COUNTS)
def test_public_data_is_read_whole_and_its_golds_are_right(task):
    if not PUBLIC_DATA.is_dir():
        pytest.skip(f"no public data in {PUBLIC_DATA.name}/ beside the checkout")
    data = load_task_data(TASKS[task], PUBLIC_DATA)
    assert len(data.questions) == COUNTS[task]
    assert len({question.id for question in data.questions}) == COUNTS[task]
    assert data.source == TASKS[task].file
    golds = [question.gold for question in data.questions]
    verdicts = check_all(golds, [f"so it is \\boxed{{{gold}}}." for gold in golds])
    assert collections.Counter(verdict.status for verdict in verdicts) == {"right": COUNTS[task]}


def test_the_hubs_columns_and_the_local_ones_give_the_same_questions(tmp_path):
    pairs = {
        "amc23": ({"id": 0, "question": "Q", "answer": 27.0}, {"id": "0", "problem": "Q", "answer": "27"}),
        "gsm8k": (
            {"question": "Q", "answer": "3*6=<<3*6=18>>18\n#### 18"},
            {"problem": "Q", "answer": "18", "solution": "3*6=18"},
        ),
        "olympiadbench": (
            {"id": 7, "question": "Q", "final_answer": ["$2 n$"], "answer_type": "Expression"},
            {"id": "7", "problem": "Q", "answer": "2 n"},
        ),
        "math_500": (
            {"unique_id": "test/a/1.json", "problem": "Q", "answer": "\\frac12", "solution": "is $\\boxed{1}$"},
            {"id": "test/a/1.json", "problem": "Q", "answer": "\\frac12"},
        ),
        "hmmt_feb_2025": (
            {"problem_idx": 1, "problem": "Q", "answer": "103"},
            {"id": "1", "problem": "Q", "answer": 103},
        ),
    }
    for task, forms in pairs.items():
        hub, local = (load_task_data(TASKS[task], folder_with(tmp_path, task, rows(row))) for row in forms)
        assert hub.sha256 == local.sha256, task
        assert [dataclasses.replace(q, row={}) for q in hub.questions] == [
            dataclasses.replace(q, row={}) for q in local.questions
        ]


def test_a_limit_takes_the_first_questions(tmp_path):
    text = rows(*({"id": i, "problem": f"Q{i}", "answer": i} for i in range(5)))
    folder = folder_with(tmp_path, "amc23", text)
    assert [q.gold for q in load_task_data(TASKS["amc23"], folder, limit=2).questions] == ["0", "1"]
    assert len(load_task_data(TASKS["amc23"], folder, limit=9).questions) == 5
    assert "at least 1" in mistake("amc23", folder, limit=0)


def gpqa_row(number):
    return {
        "Record ID": f"rec{number}",
        "Question": f" Which is number {number}?\n",
        "Correct Answer": f"right {number}\n",
        **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)},
    }


def test_the_letter_of_a_choice_question_names_the_right_choice_and_never_moves():
    task, letters = TASKS["gpqa_diamond"], collections.Counter()
    for number in range(400):
        question = question_of(task, gpqa_row(number), "x")
        assert question == question_of(task, gpqa_row(number), "x")
        head, asked, choices = question.text.split("\n\n")
        assert head.startswith("Answer the following multiple choice question.")
        assert asked == f"Which is number {number}?"
        listed = dict(line.split(") ", 1) for line in choices.split("\n"))
        assert listed[question.gold] == f"right {number}"
        assert [text for text in listed.values() if text.startswith("wrong")] == ["wrong 1", "wrong 2", "wrong 3"]
        letters[question.gold] += 1
    # Each letter comes as often as chance gives: binomial, at most four deviations of 8.7 from 100.
    assert set(letters) == set("ABCD")
    assert max(abs(count - 400 / 4) for count in letters.values()) <= 4 * math.sqrt(400 * 1 / 4 * 3 / 4)


GOOD = rows({"problem": "Q", "answer": "1"})
WITHOUT_A_CHOICE = {name: cell for name, cell in gpqa_row(1).items() if name != "Incorrect Answer 2"}
# Task, what its file holds, and what the line that refuses it must say.
BROKEN = [
    ("amc23", None, ["no file amc23.jsonl", "one JSON object a line"]),
    ("amc23", "\n \n", ["amc23.jsonl is empty"]),
    ("amc23", f"{GOOD}\n{{bad\n", ["amc23.jsonl cannot be read: line 3, column 2"]),
    ("amc23", b"\xff\xfe{}", ["amc23.jsonl cannot be read"]),
    # An absent column and an empty cell are different errors.
    (
        "amc23",
        rows({"id": 1, "task": "Q", "answer": "1"}),
        ["row 1 of amc23.jsonl has no problem or question, it has id, task, answer", "column", "the problem"],
    ),
    (
        "amc23",
        rows({"problem": "Q", "answer": "1"}, {"problem": " ", "answer": "1"}, {"problem": "", "answer": "1"}),
        ["2 of 3 rows of amc23.jsonl have no problem, first row 2"],
    ),
    *(
        (
            "amc23",
            rows({"problem": "Q", "answer": "1"}, {"problem": "Q", "answer": empty}),
            ["1 of 2 rows of amc23.jsonl have no answer, first row 2"],
        )
        for empty in ("", "#### ")
    ),
    ("gpqa_diamond", rows(WITHOUT_A_CHOICE), ["row 1 of ", "has no Incorrect Answer 2"]),
]


def test_broken_data_is_refused_with_task_file_and_row(tmp_path):
    wrong = []
    for number, (task, content, parts) in enumerate(BROKEN):
        folder = tmp_path / str(number)
        folder.mkdir()
        if content is not None:
            (folder / TASKS[task].file).write_bytes(content if isinstance(content, bytes) else content.encode())
        found = mistake(task, folder)
        if not found.startswith(f"task {task}: ") or any(part not in found for part in parts):
            wrong.append((content, found))
    assert wrong == []
    absent = mistake("amc23", tmp_path / "none")
    assert f"no such folder: {tmp_path / 'none'}" in absent
    assert "amc23.jsonl" in absent
