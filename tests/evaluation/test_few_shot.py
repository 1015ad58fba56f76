"""Solved examples before a question, limits of single tasks, and a run's held-out problems asked as a task."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import perl
from perl.cli.eval import _numbers_of_tasks, command
from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.recounting.files import recount_folder
from perl.evaluation.rescore import rescore
from perl.evaluation.scoring.results import RESULTS, read_results
from perl.evaluation.scoring.task import all_tasks, shown_hash
from perl.evaluation.tasks.own_tasks import chosen_tasks
from perl.evaluation.tasks.questions import as_text, shown_before
from perl.evaluation.tasks.task_data import load_task_data
from perl.policy.model import load_tokenizer
from perl.recipe.eval_section import EvalSection
from perl.recipe.sections import ModelSection
from perl.recipe.validation import checked
from perl.sandbox import load_problems
from perl.training.callbacks.benchmark_scores import BenchmarkScores
from perl.training.prepare import prepare, read_recipe
from tests.oracles.counted_scores import check_scores

CHAIN = "sandbox:chain"
USUAL = {"max_new_tokens": 16, "lighteval": False, "device": "cpu", "base_cache": False}
SUMS = [{"problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(9)]


def evaluate(adapter, tasks, output, k=2, **settings):
    found = perl.evaluate(adapter, None, tasks, k, output=output, settings=EvalSettings(**{**USUAL, **settings}))
    return check_scores(found, output)


def write(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def gsm8k(count, folder):
    worked = {"question": "Two and two?", "answer": "Two and two are <<2+2=4>>4.\n#### 4"}
    write(folder / "gsm8k_train.jsonl", [worked])
    write(folder / "gsm8k_test.jsonl", [{"question": f"{i} and one?", "answer": f"#### {i + 1}"} for i in range(count)])
    return {name: load_task_data(all_tasks()[name], folder, few_shot=1) for name in ("gsm8k", "gsm8k_boxed")}


def test_examples_come_from_the_split_that_a_task_names():
    data = load_task_data(all_tasks()[CHAIN], limit=4, few_shot=3, seed=7)
    train = {problem.question: problem.answer for problem in load_problems(CHAIN, "train")}
    assert [one.answer for one in data.examples] == [f"\\boxed{{{train[one.question.text]}}}" for one in data.examples]
    every = [problem.question for problem in load_problems(CHAIN, "heldout")]
    assert [question.text for question in (*data.questions, *data.further)] == every
    more = load_task_data(all_tasks()[CHAIN], few_shot=5, seed=7)
    assert more.examples[:3] == data.examples  # whatever the limit
    assert load_task_data(all_tasks()[CHAIN], few_shot=3, seed=8).examples != data.examples


def test_worked_solutions_end_as_the_task_asks(tmp_path):
    found = gsm8k(3, tmp_path)
    assert found["gsm8k"].examples[0].answer == "Two and two are <<2+2=4>>4.\n#### 4"
    assert found["gsm8k_boxed"].examples[0].answer == "Two and two are <<2+2=4>>4.\n\\boxed{4}"
    data = found["gsm8k"]
    text = "Question: Two and two?\nAnswer: Two and two are <<2+2=4>>4.\n#### 4\n\nQuestion: 0 and one?\nAnswer:"
    assert as_text(data.examples, data.questions[0]) == text


def test_examples_of_a_file_are_set_aside(tmp_path):
    [one] = chosen_tasks(section([{"name": write(tmp_path / "sums.jsonl", SUMS), "few_shot": 2}]), "tasks")
    data = load_task_data(one.task, few_shot=2)
    texts = [row["problem"] for row in SUMS]
    shown = [one.question.text for one in data.examples]
    assert [question.text for question in data.questions] == [text for text in texts if text not in shown]
    by_text = {row["problem"]: row["answer"] for row in SUMS}
    assert [one.answer for one in data.examples] == [f"\\boxed{{{by_text[text]}}}" for text in shown]
    turns = shown_before(data.examples, data.questions[0])
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 + ["user"]
    assert [turn["content"] for turn in turns[1::2]] == [one.answer for one in data.examples]


def test_examples_stand_in_the_prompt_and_in_the_results(adapter):
    results = evaluate(adapter, [CHAIN], "out", limit=2, few_shot=3, k=1)
    [task] = results.tasks
    data = load_task_data(all_tasks()[CHAIN], limit=2, few_shot=3)
    assert (task.title, task.few_shot, task.examples) == ("Sandbox chain, 3-shot", 3, shown_hash(data.examples))
    assert list(json.loads(Path("out", RESULTS).read_text())["results"]) == [f"{CHAIN}|3"]
    tokenizer = load_tokenizer(ModelSection())
    chat = shown_before(data.examples, data.questions[0])
    longest = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    assert longest > 3 * len(tokenizer(data.questions[0].text)["input_ids"])
    assert evaluate(adapter, [CHAIN], "none", limit=2, k=1).tasks[0].protocol_hash != task.protocol_hash
    before = Path("out", RESULTS).read_bytes()
    assert recount_folder("out").mistakes == ()
    assert rescore("out", lighteval=False) == read_results("out")
    assert Path("out", RESULTS).read_bytes() == before


def section(tasks, **settings):
    return checked(EvalSection, {"tasks": tasks, **settings})


def test_limits_of_single_tasks():
    tasks = ["aime24", {"name": "aime25", "limit": 3}, {"name": "math_500", "limit": None}]
    assert [one.limit for one in chosen_tasks(section(tasks), "")] == [None, 3, None]
    assert [one.limit for one in chosen_tasks(section(tasks, limit=32), "")] == [32, 3, None]
    kept = section(tasks, limit=32)
    assert kept.model_dump()["tasks"] == tasks
    assert section(**kept.model_dump()) == kept
    assert (section([]).limit_of_heldout, section([], limit=None).limit_of_heldout) == (256, None)
    assert _numbers_of_tasks("aime24=10, sandbox:chain=5", "") == {"aime24": 10, "sandbox:chain": 5}
    assert _numbers_of_tasks("50", "") == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", CHAIN, "--limit", "chains=3"], "--limit: 'chains' is not asked (there are: sandbox:chain)"),
        (["--tasks", CHAIN, "--few-shot", "many"], "--few-shot: 'many' is not a number (as in 3, or gsm8k=8,my=3)"),
        (["--tasks", "sums.jsonl", "--few-shot", "9"], "examples: 9, problems left to be asked: 0"),
        (["--tasks", "sums.jsonl", "--few-shot", "4", "--limit", "3"], "a limit of 3 is below the 4 examples"),
        (["--tasks", "heldout"], "lora is in no run (name the recipe instead, as in --tasks my.yaml)"),
        (["--tasks", "my.yaml", "--few-shot", "1"], "held-out problems are asked as in training, without examples"),
        (["--tasks", "sums.jsonl", "--columns", "question,answer=a"], "--columns: 'question' names no column (as in"),
    ],
)
def test_bad_requests_are_a_line(adapter, options, message):
    write("sums.jsonl", SUMS)
    Path("my.yaml").write_text("data: {train: sandbox:chain}\nrewards: {accuracy: 1}\n")
    with pytest.raises(PerlError) as caught:
        CliRunner().invoke(command, ["--adapter", str(adapter), *options, "--dry-run"], catch_exceptions=False)
    assert message in str(caught.value)


def test_an_absent_file_is_named_before_the_adapter_is_looked_for():
    Path("data").mkdir()
    write("data/gsm8k_test.jsonl", SUMS)
    message = "task gsm8k: data has no file gsm8k_train.jsonl"
    options = ["--adapter", "nowhere", "--tasks", "gsm8k", "--data", "data", "--few-shot", "1"]
    with pytest.raises(PerlError, match=message):
        CliRunner().invoke(command, [*options, "--dry-run"], catch_exceptions=False)
    with pytest.raises(PerlError, match=rf"BenchmarkScores\(tasks\[0\]\): {message.partition(': ')[2]}"):
        BenchmarkScores([{"name": "gsm8k", "few_shot": 1}], every=1, data="data")


MISTAKES_IN_A_RECIPE = [
    (
        "- sandbox:chain\n- name: my.jsonl\n  limit: 2\n  few_shot: 3",
        8,
        "[1].limit: a limit of 2 is below the 3 examples",
    ),
    (
        "- {name: my.jsonl, columns: {prompt: no}}",
        6,
        "[0]: row 1 of my.jsonl has no no, it has problem, answer (the column "
        "that holds the problem, as in columns: {prompt: NAME})",
    ),
    ("- sandbox:chain\n- sandbox:chian", 7, "[1]: there is no task 'sandbox:chian' (did you mean sandbox:chain?)"),
    ("- name: sandbox:chain\n  limt: 3", 7, "[0].limt: unknown key (did you mean limit?)"),
    ("- sandbox:chain\n- other.yaml", 7, "[1]: sandbox:addition is held out, hence scored already (leave it out)"),
]


@pytest.mark.parametrize(("tasks", "line", "message"), MISTAKES_IN_A_RECIPE)
def test_a_mistake_in_a_recipes_tasks_has_file_line_and_key(tasks, line, message):
    write("my.jsonl", SUMS)
    Path("other.yaml").write_text("data: {train: sandbox:addition}\n")
    head = "extends: quickstart\neval:\n  limit: 3\n  k: 2\n  tasks:\n"
    Path("my.yaml").write_text(head + "".join(f"    {row}\n" for row in tasks.splitlines()))
    with pytest.raises(PerlError) as caught:
        prepare(read_recipe("my.yaml", (), "out"))
    place = message if message.startswith("eval.") else f"eval.tasks{message}"
    assert str(caught.value).startswith(f"my.yaml:{line}: {place}")
    assert len(caught.value.mistakes) == 1


@pytest.mark.nightly
def test_a_recipe_names_files_limits_and_examples_and_its_heldout_problems_are_a_task():
    write("sums.jsonl", [{"q": row["problem"], "a": row["answer"]} for row in SUMS])
    recipe = {
        "extends": "quickstart",
        "train": {"max_steps": 2, "output_dir": "run"},
        "rollout": {"max_completion_length": 16},
        "eval": {
            **{"k": 2, "limit": 6, "max_completion_length": 16, "every": 1, "best": "sums/avg@2"},
            "tasks": [
                {"name": "sums.jsonl", "columns": {"prompt": "q", "answer": "a"}, "scorer": "exact", "few_shot": 2},
                {"name": CHAIN, "limit": 3},
            ],
        },
    }
    Path("my.yaml").write_text(yaml.safe_dump(recipe))
    perl.train("my.yaml")
    results = read_results("run/eval")
    found = {task.name: (task.score.n, task.few_shot, task.scorer) for task in results.tasks}
    assert found == {"sandbox:addition": (6, 0, "math"), "sums": (6, 2, "exact"), CHAIN: (3, 0, "math")}
    own = results.task("sandbox:addition")
    for name in ("heldout", "my.yaml", "run/recipe.yaml"):
        settings = {"limit": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        again = evaluate("run", [name], f"again/{name}", **settings).task("sandbox:addition")
        assert (again.title, again.protocol_hash, again.data) == (own.title, own.protocol_hash, own.data)
        assert (again.base, again.adapter, again.problems) == (own.base, own.adapter, own.problems)
    assert "sums/avg@2" in json.dumps(json.loads(Path("run/best/best.json").read_text()))
    assert recount_folder("again/heldout").mistakes == ()
    rescored = rescore("again/heldout", tasks="my.yaml", lighteval=False)
    assert rescored.task("sandbox:addition").problems == own.problems
    with pytest.raises(PerlError, match="sandbox:addition is named 2 times"):
        evaluate("run", ["heldout", "sandbox:addition"], "both")
