"""lighteval beside us: the same definitions, its verdicts next to ours, and nothing of it in the calling process."""

import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from perl.errors import MissingExtraError
from perl.evaluation.lighteval import score as lighteval_score
from perl.evaluation.lighteval.score import lighteval_installed, score_with_lighteval
from perl.evaluation.metrics import g_pass_at_k, mean_g_pass_at_k, pass_at_k
from perl.evaluation.task import TaskData, all_tasks, questions_hash
from perl.evaluation.task_data import load_task_data, question_of
from perl.recipe.assets import evaluation_tasks
from perl.rewards.verifier import check_all
from perl.sandbox import is_sandbox

needs_lighteval = pytest.mark.skipif(not lighteval_installed(), reason="lighteval is not installed")
PUBLIC_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
TASKS = all_tasks()
AS_LIGHTEVAL = ("aime24", "aime25", "math_500", "gsm8k")

AIME_ROW = {"problem": "What is $2+2$?", "answer": "204", "solution": "It is $\\boxed{204}$."}
MATH_ROW = {"problem": "Where?", "answer": "\\frac{3}{2}", "solution": "We get $\\boxed{\\frac{3}{2}}$."}
GSM_ROW = {"problem": "How many?", "answer": "18", "solution": "3*6 = <<3*6=18>>18"}
GPQA_ROW = {
    "Record ID": "rec1",
    "Question": "Which?",
    "Correct Answer": "this",
    **{f"Incorrect Answer {i}": f"that {i}" for i in (1, 2, 3)},
}

# What one process that has imported all of lighteval finds, printed at its end.
BESIDE_LIGHTEVAL = """
import json, sys, types
request = json.load(sys.stdin)
# In place of the modules that ask the network when they are imported; the rest is lighteval as it is.
for name in ("tiny_benchmarks", "mix_eval.main", "mt_bench.main"):
    sys.modules[f"lighteval.tasks.tasks.{name}"] = types.ModuleType(name)
import lighteval.pipeline
import torch
assert not torch.is_grad_enabled()
from lighteval.metrics.metrics_sample import GPassAtK, PassAtK
from lighteval.tasks.registry import Registry
from perl.evaluation.lighteval.tasks import lighteval_config, lighteval_row
from perl.evaluation.task import all_tasks
from perl.rewards.verifier import check_all

# What lighteval makes of each row, with its own prompt functions, and its own definitions.
tasks, definitions = all_tasks(), {}
for name, rows in request["rows"].items():
    config = lighteval_config(tasks[name])
    docs = [config.prompt_function(lighteval_row(tasks[name], row), name) for row in rows]
    fields = ("name", "hf_repo", "hf_subset", "evaluation_splits", "generation_size", "stop_sequence", "version")
    definitions[name] = {
        "asked": [[doc.query, doc.get_golds()] for doc in docs],
        "config": {field: getattr(config, field) for field in fields},
        "of": config.prompt_function.__module__,
    }

# What its registry finds in our modules.
found = {}
for path, task in request["modules"]:
    (config,) = Registry(tasks=f"{task}|0", custom_tasks=path).task_to_configs[task]
    doc = config.prompt_function(request["row"], task)
    found[task] = [config.hf_repo, config.hf_revision, doc.query, doc.get_golds()]

verdicts = [[v.status, v.extracted] for v in check_all(*zip(*request["pairs"]))]

thresholds, scores = request["thresholds"], []
for row in request["right"]:
    score = {}
    for k in request["pass_ks"]:
        score[f"pass@{k}"] = PassAtK(k=k, n=len(row), sample_scoring_function=lambda *_: 0.0).pass_at_k(row)
    general = GPassAtK(k=request["ks"], n=len(row), thresholds=thresholds, sample_scoring_function=lambda *_: 0.0)
    scores.append(score | general.g_pass_at_k(row))
print(json.dumps({"definitions": definitions, "found": found, "verdicts": verdicts, "scores": scores}, default=float))
"""

# Gold and completion of every kind that training meets.
PAIRS = [
    ("204", "so \\boxed{204}"), ("204", "so \\boxed{205}"), ("204", "I do not know"), ("1/2", "\\boxed{0.5}"),
    ("\\frac{1}{2}", "\\boxed{\\dfrac12}"), ("0.5", "\\boxed{50\\%}"), ("(1,2)", "\\boxed{(1, 2)}"),
    ("(1,2)", "\\boxed{(2,1)}"), ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"), ("x^2+2x+1", "\\boxed{(x+1)^2}"),
    ("x^2+2x+1", "\\boxed{(x-1)^2}"), ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"), ("2\\pi", "\\boxed{6.28}"),
    ("\\text{Evelyn}", "\\boxed{Evelyn}"), ("6 - 5i", "\\boxed{-5i+6}"), ("10{,}000", "\\boxed{10000}"),
    ("3 \\text{ cm}", "\\boxed{3}"), ("B", "Answer: B"), ("B", "Answer: C"), ("#### 18", "The answer is 18."),
    ("18", "#### 18"), ("18", "<think>\\boxed{7}</think>\\boxed{18}"), ("18", "<think>\\boxed{18}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}"),
    ("[0,1)", "\\boxed{[0,1)}"), ("[0,1)", "\\boxed{(0,1]}"), ("x=5", "\\boxed{5}"), ("-1", "\\boxed{-1.0}"),
    ("\\infty", "\\boxed{\\infty}"), ("4.5e33", "\\boxed{4.5 \\times 10^{33}}"),
]  # fmt: skip

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
    ("It adds up to $R$", False, True, "lighteval takes the last formula where no answer is announced"),
    ("<think>it is $\\boxed{R}$, or is it", False, True, "lighteval leaves reasoning that never ends in the text"),
    ("it is $\\boxed{R}$</think>I give up.", False, True, "lighteval leaves reasoning that the prompt began"),
]
LETTER_CASES = [
    ("So.\n\nAnswer: R", True, True, ""),
    ("So.\n\nAnswer: W", False, False, ""),
    ("I do not know", False, False, ""),
    ("<think>Answer: W</think>Answer: R", True, True, ""),
]


WORD_CASES = [
    ("It is $\\boxed{R}$.", True, True, ""),
    ("ANSWER: Evelyn", True, False, "lighteval finds no answer in words that stand outside of formulas"),
]
COMPLEX_CASES = [
    ("It is $\\boxed{R}$.", True, True, ""),
    ("ANSWER: 6 - 5i", True, False, "lighteval reads the first number of a formula without $ signs"),
]


def data_of(task, *rows):
    questions = tuple(question_of(TASKS[task], row, str(number)) for number, row in enumerate(rows))
    return TaskData(TASKS[task], questions, "rows.jsonl", None, questions_hash(questions))


def few_questions(task, *made):
    """Three rows of the public data whose golds are numbers, or rows made here where there is none."""
    if not PUBLIC_DATA.is_dir():
        return data_of(task, *made)
    data = load_task_data(TASKS[task], PUBLIC_DATA)
    chosen = tuple(question for question in data.questions if question.gold.isdigit())[:3]
    assert len(chosen) == 3
    return dataclasses.replace(data, questions=chosen)


@pytest.fixture(scope="module")
def scored():
    """Task -> data, cases, texts and lighteval's score, of all cases in one run."""
    if not lighteval_installed():
        pytest.skip("lighteval is not installed")
    cases = {
        "aime24": (few_questions("aime24", AIME_ROW, AIME_ROW | {"answer": "033"}), MATH_CASES),
        "math_500": (few_questions("math_500", MATH_ROW, MATH_ROW), MATH_CASES),
        "math_500_boxed": (few_questions("math_500_boxed", MATH_ROW, MATH_ROW), MATH_CASES),
        "gpqa_diamond": (data_of("gpqa_diamond", GPQA_ROW, GPQA_ROW | {"Question": "And which?"}), LETTER_CASES),
        "hmmt_feb_2025": (data_of("hmmt_feb_2025", MATH_ROW | {"answer": "\\text{Evelyn}"}), WORD_CASES),
        "minerva": (data_of("minerva", MATH_ROW | {"answer": "6 - 5i"}), COMPLEX_CASES),
        "sandbox:chain": (data_of("sandbox:chain", {"problem": "1+2=", "answer": "3"}), MATH_CASES[:2]),
    }
    texts = {
        task: [[filled(said, question.gold) for said, *_ in said_cases] for question in data.questions]
        for task, (data, said_cases) in cases.items()
    }
    scores = score_with_lighteval([data for data, _ in cases.values()], texts, "somebody/adapter")
    assert list(scores) == list(cases)
    return {task: (*cases[task], texts[task], scores[task]) for task in cases}


def filled(said, gold):
    wrong = "A" if gold != "A" else "B"
    return said.replace("ANSWER", "\0").replace("R", gold).replace("W", wrong).replace("\0", "ANSWER")


@needs_lighteval
def test_verdicts_agree_with_lightevals_but_where_it_is_known_not_to(scored):
    compared = 0
    for task, (data, cases, texts, score) in scored.items():
        for question, completions, theirs in zip(data.questions, texts, score.right, strict=True):
            ours = [verdict.right for verdict in check_all([question.gold] * len(completions), completions)]
            for case, our, their in zip(cases, ours, theirs, strict=True):
                said, our_expected, their_expected, reason = case
                assert (our, their) == (our_expected, their_expected), (task, said, reason)
                assert bool(reason) == (our != their)
                compared += 1
    assert compared >= 60


@needs_lighteval
def test_the_metrics_are_those_of_the_verdicts(scored):
    for task, (_, _, _, score) in scored.items():
        n, shares = len(score.right[0]), [statistics.fmean(row) for row in score.right]
        prefix = "gpqa_pass@k" if task == "gpqa_diamond" else "pass@k"
        assert score.metrics[f"avg@n:n={n}"] == pytest.approx(statistics.fmean(shares))
        assert score.metrics[f"{prefix}:k=1&n={n}"] == pytest.approx(statistics.fmean(shares))
        assert score.metrics[f"{prefix}:k={n}&n={n}"] == statistics.fmean(any(row) for row in score.right)
        if len(shares) > 1:
            error = statistics.stdev(shares) / math.sqrt(len(shares))
            assert score.metrics[f"avg@n:n={n}_stderr"] == pytest.approx(error)
        values = len({1, n}) + 1
        assert len(score.metrics) == (2 * values if len(shares) > 1 else values)


@needs_lighteval
def test_the_results_are_lightevals_and_name_no_folder_of_this_machine(scored):
    for task, (_, _, _, score) in scored.items():
        assert score.results["config_general"]["model_name"] == "somebody/adapter"
        assert score.results["config_tasks"][f"{task}|0"]["hf_repo"] == TASKS[task].repository.replace(":", "/")
        assert score.results["config_tasks"][f"{task}|0"]["version"] == TASKS[task].version
        assert "perl-lighteval-" not in json.dumps(score.results)


@pytest.fixture(scope="module")
def rows():
    """Task -> rows of its data, all there are where the public data is beside the checkout."""
    found = {"aime24": [AIME_ROW], "aime25": [AIME_ROW], "math_500": [MATH_ROW], "gsm8k": [GSM_ROW]}
    found |= {"amc23": [AIME_ROW], "gpqa_diamond": [GPQA_ROW]}
    if PUBLIC_DATA.is_dir():
        for task in AS_LIGHTEVAL:
            found[task] += [dict(question.row) for question in load_task_data(TASKS[task], PUBLIC_DATA).questions]
        assert sum(map(len, found.values())) > 1800
    return found


OURS = [
    (str(path), task.name)
    for stem, path in evaluation_tasks().items()
    for task in TASKS.values()
    if task.lighteval is None and task.name.split(":")[0].removesuffix("_boxed") == stem
]
ROW_OF_ALL = AIME_ROW | {key: str(value) for key, value in GPQA_ROW.items()}
PASS_KS, KS, THRESHOLDS = (1, 2, 4, 16), (2, 8, 16), (0.0, 0.25, 0.5, 0.75, 1.0)


def some_rights() -> list[list[bool]]:
    """Of 20 problems that differ in how hard they are, 16 completions each."""
    rng = random.Random(1)
    chances = [rng.random() for _ in range(20)]
    return [[rng.random() < chance for _ in range(16)] for chance in chances]


@pytest.fixture(scope="module")
def beside(rows):
    """What a process finds that has imported lighteval: its definitions, its metrics, our verdicts."""
    request = {"rows": rows, "modules": OURS, "row": ROW_OF_ALL, "pairs": PAIRS, "right": some_rights()}
    request |= {"pass_ks": PASS_KS, "ks": KS, "thresholds": THRESHOLDS}
    command = [sys.executable, "-c", BESIDE_LIGHTEVAL]
    result = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@needs_lighteval
def test_definitions_with_lightevals_names_are_lightevals(beside, rows):
    assert beside["definitions"].keys() == rows.keys()
    for name, told in beside["definitions"].items():
        task, config = TASKS[name], told["config"]
        assert told["of"].startswith("lighteval.") == (name in AS_LIGHTEVAL)
        assert config == {
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
    if task == "gsm8k":
        return f" {row['solution']}\n#### {gold}"
    return {"amc23": f"\\boxed{{{gold}}}"}.get(task, gold)


@needs_lighteval
def test_every_module_with_tasks_of_ours_is_a_custom_task_module_of_lighteval(beside):
    assert len(OURS) == 14
    for _, name in OURS:
        question = question_of(TASKS[name], ROW_OF_ALL, "")
        repository, revision, query, (gold,) = beside["found"][name]
        if is_sandbox(name):  # its problems are in a folder, which results call by its last part
            assert Path(repository).is_dir()
            repository = f"sandbox/{Path(repository).name}"
        assert repository == TASKS[name].repository.replace(":", "/")
        assert revision == TASKS[name].revision
        assert query == question.text
        assert gold in (question.gold, f"\\boxed{{{question.gold}}}")


@needs_lighteval
def test_verdicts_are_the_same_in_a_process_that_has_imported_lighteval(beside):
    assert len(PAIRS) == 30
    here = [[verdict.status, verdict.extracted] for verdict in check_all(*zip(*PAIRS, strict=True))]
    assert beside["verdicts"] == here
    assert {status for status, _ in here} >= {"right", "wrong", "no_answer"}


@needs_lighteval
def test_pass_at_k_and_g_pass_at_k_are_lightevals(beside):
    for row, theirs in zip(some_rights(), beside["scores"], strict=True):
        for k in PASS_KS:
            assert pass_at_k([row], k) == pytest.approx(theirs[f"pass@{k}"])
        for k in KS:
            assert mean_g_pass_at_k([row], k) == pytest.approx(theirs[f"mg-pass@{k}"])
            for threshold in THRESHOLDS:
                assert g_pass_at_k([row], k, threshold) == pytest.approx(theirs[f"g-pass@{k}_{threshold}"])


@needs_lighteval
def test_the_process_ends_with_its_parent(tmp_path):
    """The parent holds the other end of its standard input; what was asked here would never be read to its end."""
    os.mkfifo(tmp_path / lighteval_score.REQUEST)
    with subprocess.Popen(
        [sys.executable, "-m", "perl.evaluation.lighteval.process"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        said = child.communicate(timeout=120)[1]  # closes its input
    assert child.returncode == 1
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("questions", "texts", "installed", "error", "words"),
    [
        (2, [["a"]], True, ValueError, "aime24"),
        (2, [["a"], ["a", "b"]], True, ValueError, "aime24"),
        (2, [[], []], True, ValueError, "aime24"),
        (1, [["x"]], False, MissingExtraError, r"needs the package lighteval \(pip install 'perl-rl\[eval\]'\)"),
    ],
    ids=["too few", "not equally many", "none", "no lighteval"],
)
def test_what_lighteval_cannot_score_is_refused(monkeypatch, questions, texts, installed, error, words):
    if not installed:
        monkeypatch.setitem(sys.modules, "lighteval", None)  # no import finds it
        assert not lighteval_installed()
    with pytest.raises(error, match=words):
        score_with_lighteval([data_of("aime24", *[AIME_ROW] * questions)], {"aime24": texts}, "x")
