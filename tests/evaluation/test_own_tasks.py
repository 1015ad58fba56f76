"""Tasks of the user's own: data files and Python files, asked, judged, judged again, and refused in a line."""

import csv
import json
import sys
from pathlib import Path

import pytest

import perl
from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.recounting.files import recount_folder
from perl.evaluation.rescore import rescore
from perl.evaluation.scoring.results import read_results
from perl.evaluation.tasks.own_tasks import named_tasks
from perl.evaluation.tasks.task_data import load_task_data
from tests.oracles.counted_scores import check_scores

SUMS = [{"question": f"{i}+{i + 1}=", "gold": str(2 * i + 1), "id": f"sum{i}"} for i in range(6)]
CITIES = [
    {"prompt": "Capital of France?", "choices": ["Rome", "Paris"], "answer": "B"},
    {"prompt": "Capital of Italy?", "choices": ["Rome", "Paris"], "answer": "A"},
]
COLUMNS = {"prompt": "question", "answer": "gold"}
REWARD = """
def short(completions, level, **columns):
    return [1.0 if len(c[0]["content"]) < int(l) else 0.0 for c, l in zip(completions, level)]
"""


def write(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(name, **options):
    [task] = named_tasks([name], **options)
    return load_task_data(task).questions


def evaluate(adapter, tasks, output="out", **settings):
    usual = {"max_new_tokens": 16, "lighteval": False, "device": "cpu", "base_cache": False}
    found = perl.evaluate(adapter, None, tasks, 2, output=output, settings=EvalSettings(**{**usual, **settings}))
    return check_scores(found, output)


def test_every_form_of_file_asks_the_same():
    import pyarrow
    import pyarrow.parquet

    write("sums.jsonl", SUMS)
    Path("sums.json").write_text(json.dumps(SUMS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SUMS), "sums.parquet")
    with Path("sums.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "gold", "id"])
        writer.writeheader()
        writer.writerows(SUMS)
    expected = [(row["id"], row["question"], row["gold"]) for row in SUMS]
    for form in ("jsonl", "json", "parquet", "csv"):
        asked = questions(f"sums.{form}", columns=COLUMNS)
        assert [(question.id, question.text, question.gold) for question in asked] == expected
    [task] = named_tasks(["sums.jsonl"], columns=COLUMNS)
    data = load_task_data(task, limit=2)
    assert (task.name, data.source, data.revision, len(data.questions)) == ("sums", "sums.jsonl", None, 2)


def test_a_data_file_is_scored_judged_again_and_kept_free_of_paths(adapter):
    folder = Path("data")
    folder.mkdir()
    file = write(folder / "my sums.jsonl", SUMS)
    found = evaluate(adapter, [file], columns=COLUMNS, limit=4)
    [task] = found.tasks
    assert (task.name, task.title, task.scorer, task.base.n, task.base.k) == ("my-sums", "my-sums", "math", 4, 2)
    assert task.data["source"] == "my sums.jsonl"
    text = Path("out/results.json").read_text()
    assert str(Path.cwd()) not in text
    assert read_results("out").tasks == found.tasks
    assert not recount_folder("out").mistakes
    before = (Path("out/samples.jsonl").read_bytes(), read_results("out").tasks)
    rescore("out", tasks=[file], columns=COLUMNS, lighteval=False)
    assert (Path("out/samples.jsonl").read_bytes(), read_results("out").tasks) == before


def test_what_rescoring_lacks_is_a_line(adapter):
    file = write("sums.jsonl", SUMS)
    evaluate(adapter, [file], columns=COLUMNS, predict_only=True)
    for options, said in [
        ({}, r"the problems of sums are not here \(name their file: --tasks sums.jsonl\)"),
        ({"tasks": [file]}, "the problems of sums in sums.jsonl are not those that were asked"),
        ({"scorer": "exact"}, "--scorer: is about files of your own"),
        ({"tasks": [write("others.jsonl", SUMS)]}, "no task of others.jsonl was asked"),
    ]:
        with pytest.raises(PerlError, match=said):
            rescore("out", lighteval=False, **options)


def test_scorers_enter_hash_results_and_every_verdict(adapter):
    """Judged at once, later and by another scorer afterwards: the same figures wherever the scorer is the same."""
    file = write("sums.jsonl", SUMS)
    by_text = evaluate(adapter, [file], columns=COLUMNS, scorer="exact")
    by_verifier = evaluate(adapter, [file], "math", columns=COLUMNS)
    assert by_text.tasks[0].scorer == "exact"
    assert by_text.tasks[0].protocol_hash != by_verifier.tasks[0].protocol_hash
    assert not recount_folder("out").mistakes
    evaluate(adapter, [file], "later", columns=COLUMNS, scorer="exact", predict_only=True)
    later = rescore("later", tasks=[file], columns=COLUMNS, lighteval=False)
    assert later.tasks == by_text.tasks
    again = rescore("math", tasks=[file], columns=COLUMNS, scorer="exact", lighteval=False)
    assert again.tasks[0].protocol_hash == by_text.tasks[0].protocol_hash
    assert again.tasks[0].problems == by_text.tasks[0].problems
    assert again.tasks[0].base == by_text.tasks[0].base


def test_a_reward_scores_and_a_results_file_starts_no_code(adapter, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("short_rewards.py").write_text(REWARD)
    file = write("sums.jsonl", [{**row, "level": 20 * (i % 2)} for i, row in enumerate(SUMS)])
    spec = "short_rewards.py:short>=0.5"
    found = evaluate(adapter, [file], columns=COLUMNS, scorer=spec, max_new_tokens=3)
    [task] = found.tasks
    source = task.scorer.partition("@")[2].partition(">")[0]
    assert task.scorer == f"short_rewards:short@{source}>=0.5"
    assert len(source) == 12
    assert f"| `{task.scorer}` |" in Path("out/table.md").read_text()
    assert [problem.base for problem in task.problems] == [(False, False), (True, True)] * 3
    with pytest.raises(PerlError, match=r"--scorer: sums was judged by short_rewards:short@\w+>=0.5 \(name the"):
        rescore("out", tasks=[file], columns=COLUMNS, lighteval=False)
    again = rescore("out", tasks=[file], columns=COLUMNS, scorer=spec, lighteval=False)
    assert again.tasks == found.tasks
    sys.modules.pop("short_rewards", None)


PYTHON = """
from pathlib import Path
from perl.evaluation.tasks.own_tasks import file_task
from perl.evaluation.scoring.task import Task, all_tasks

TASKS = (
    file_task("sums.jsonl", columns={"prompt": "question", "answer": "gold"}, prompt="What is {problem}"),
    file_task("cities.jsonl", scorer="choice", name="capitals"),
)
"""


def test_a_python_file_has_tasks_beside_its_data(adapter):
    folder = Path("mine")
    folder.mkdir()
    write(folder / "sums.jsonl", SUMS)
    write(folder / "cities.jsonl", CITIES)
    (folder / "my_tasks.py").write_text(PYTHON)
    both = named_tasks(["mine/my_tasks.py"])
    assert [task.name for task in both] == ["sums", "capitals"]
    [one] = named_tasks(["mine/my_tasks.py:capitals"])
    assert load_task_data(one).questions[0].gold == "B"
    assert load_task_data(both[0]).questions[0].text == "What is 0+1="
    found = evaluate(adapter, ["mine/my_tasks.py"])
    assert [(task.name, task.scorer) for task in found.tasks] == [("sums", "math"), ("capitals", "choice")]
    Path("mine/my_tasks.py").write_text(PYTHON + "\nwith Path('runs').open('a') as runs:\n    runs.write('x')\n")
    assert rescore("out", tasks=["mine/my_tasks.py"], lighteval=False).tasks == found.tasks
    assert Path("runs").read_text() == "x"  # the user's code runs once


BAD_FILES = {
    "absent.jsonl": (None, "--tasks: no such file: absent.jsonl"),
    "broken.jsonl": ("{", "task broken: .*broken.jsonl cannot be read"),
    "bare.jsonl": (
        '{"prompt": "1+1=", "gold": "2"}',
        "row 1 of bare.jsonl has no answer or solution, it has prompt, g",
    ),
    "twice.jsonl": (
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1= ", "answer": "3"}',
        r"rows 1 and 2 of twice.jsonl ask the same question: '1\+1='; 1 rows repeat",
    ),
    "aime24.jsonl": ('{"prompt": "1+1=", "answer": "2"}', "aime24 is the name of a task of perl eval"),
    "syntax.py": ("x = 1\ny = = 2\n", "syntax.py:2: cannot be imported: SyntaxError: invalid syntax"),
    "raises.py": ("def f():\n    return 1 / 0\n\nf()\n", "raises.py:2: cannot be imported: ZeroDivisionError: "),
    "without.py": ("x = 1\n", "without.py: defines no TASKS"),
    "scorer.py": (
        "from perl.evaluation.tasks.own_tasks import file_task\nTASKS = [file_task('a.jsonl', scorer='chioce')]\n",
        r"scorer.py:2: --scorer: no scorer 'chioce' \(did you mean choice\?",
    ),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_wrong_with_a_file_is_a_line_before_weights_load(name, adapter):
    content, said = BAD_FILES[name]
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(PerlError, match=said) as failure:
        evaluate(adapter, [name])
    assert len(failure.value.mistakes) == 1
    assert failure.value.exit_code == 2


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (SUMS, {"columns": {"promt": "question"}}, r"there is no column for 'promt' \(did you mean prompt\?\)"),
        (
            SUMS,
            {"columns": {**COLUMNS, "prompt": "qestion"}},
            "has no qestion, it has question, gold, id .*--columns prompt=NAME",
        ),
        (SUMS, {"columns": COLUMNS, "scorer": "exat"}, r"--scorer: no scorer 'exat' \(did you mean exact\?"),
        (SUMS, {"columns": COLUMNS, "scorer": "choice"}, "row 1 of f.jsonl has no choices under 'choices'"),
        ([{**CITIES[0], "answer": "C"}], {"scorer": "choice"}, "answer 'C' of row 1 is none of its 2 choices"),
        (
            [CITIES[0], {**CITIES[1], "choices": ["Rome", "Paris", " Rome "]}],
            {"scorer": "choice"},
            "the choices of row 2 of f.jsonl are no list of 2 to 26 different texts",
        ),
        (SUMS, {"columns": COLUMNS, "scorer": "mine.py:short>=nan"}, "'nan' is not a number, .*>=0.5"),
    ],
)
def test_what_is_wrong_with_columns_and_scorers(rows, options, said, adapter):
    write("f.jsonl", rows)
    with pytest.raises(PerlError, match=said) as failure:
        evaluate(adapter, ["f.jsonl"], **options)
    assert "\n" not in str(failure.value)


def test_names_that_meet_and_options_of_data_files_for_a_benchmark():
    Path("b").mkdir()
    with pytest.raises(PerlError, match="a is named 2 times"):
        named_tasks([write("a.jsonl", SUMS), write("b/a.jsonl", SUMS)])
    for options in ({"columns": COLUMNS}, {"scorer": "exact"}):
        with pytest.raises(PerlError, match="is about a data file, and none is named"):
            named_tasks(["aime24"], **options)
