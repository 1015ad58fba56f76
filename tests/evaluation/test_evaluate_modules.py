"""The `evaluate` library's avg@k and pass@k: loaded from their folders without a network, they say what perl says.

They run in one process of their own: the library copies a metric's file to a cache whose place it reads when imported.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perl.evaluation.metrics import average_at_k, pass_at_k, pass_at_k_error, standard_error
from perl.rewards.verifier import check_all
from tests.conftest import CHECKOUT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("evaluate") is None, reason="evaluate is not installed")

METRICS = CHECKOUT / "eval" / "metrics"
GOLDS = ["1/2", "Since 6 * 7 = 42:\n#### 42", r"\boxed{x^2}", "7"]
COMPLETIONS = [
    [r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{2}", "I do not know"],
    [r"so \boxed{42}", r"so \boxed{24}", r"so \boxed{25}", r"so \boxed{26}"],
    [r"\boxed{x \cdot x}", r"\boxed{x^2}", r"\boxed{x^{2}}", r"\boxed{xx}"],
    [r"\boxed{8}", "", r"\boxed{}", r"\boxed{9}"],
]
SCRIPT = """
import json, sys
import evaluate

folder, cases = sys.argv[1], json.load(sys.stdin)
answers = []
for name, arguments in cases:
    metric = evaluate.load(f"{folder}/{name}")
    try:
        answers.append({"name": metric.name, "result": metric.compute(**arguments)})
    except ValueError as error:
        answers.append({"name": metric.name, "error": str(error)})
info = metric.info
features = {name: str(feature) for name, feature in info.features.items()}
print(json.dumps({"answers": answers, "features": features, "citation": info.citation, "doc": metric.compute.__doc__}))
"""
CASES = [
    ["avg_at_k", {"predictions": COMPLETIONS, "references": GOLDS}],
    ["avg_at_k", {"predictions": COMPLETIONS, "references": GOLDS, "k": 4}],
    ["avg_at_k", {"predictions": COMPLETIONS[:1], "references": GOLDS[:1]}],
    ["avg_at_k", {"predictions": COMPLETIONS, "references": GOLDS, "k": 8}],
    ["avg_at_k", {"predictions": [["1"], ["1", "2"]], "references": ["1", "2"]}],
    ["avg_at_k", {"predictions": COMPLETIONS[:1], "references": [""]}],
    *(["pass_at_k", {"predictions": COMPLETIONS, "references": GOLDS, "k": k}] for k in (1, 2, 4)),
    ["pass_at_k", {"predictions": COMPLETIONS, "references": GOLDS}],
    ["pass_at_k", {"predictions": COMPLETIONS, "references": GOLDS, "k": 8}],
    ["pass_at_k", {"predictions": [], "references": []}],
    ["avg_at_k", {"predictions": [], "references": []}],
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    cache = tmp_path_factory.mktemp("hf")
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(METRICS)],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        check=False,
        cwd=cache,
        env={name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        | {"HF_HOME": str(cache / "home"), "HF_MODULES_CACHE": str(cache / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr
    return process, cache


@pytest.fixture(scope="module")
def answers(ran) -> list[dict]:
    return json.loads(ran[0].stdout)["answers"]


@pytest.fixture(scope="module")
def right() -> list[list[bool]]:
    rows = []
    for gold, completions in zip(GOLDS, COMPLETIONS, strict=True):
        rows.append([verdict.right for verdict in check_all([gold] * 4, completions)])
    return rows


def test_the_completions_tell_the_metrics_apart(right):
    assert right == [
        [True, True, False, False],
        [True, False, False, False],
        [True, True, True, True],
        [False, False, False, False],
    ]


def test_avg_at_k_is_perls(answers, right):
    expected = {"avg@k": average_at_k(right), "avg@k_stderr": standard_error(right), "k": 4}
    assert answers[0] == answers[1] == {"name": "avg_at_k", "result": expected}
    assert expected["avg@k"] == 7 / 16
    alone = answers[2]["result"]
    assert (alone["avg@k"], alone["k"]) == (0.5, 4)
    assert math.isnan(alone["avg@k_stderr"])


def test_pass_at_k_is_perls_and_k_is_1_if_not_said(answers, right):
    for answer, k in zip(answers[6:10], (1, 2, 4, 1), strict=True):
        expected = {"pass@k": pass_at_k(right, k), "pass@k_stderr": pass_at_k_error(right, k), "k": k}
        assert answer == {"name": "pass_at_k", "result": expected}
    assert answers[8]["result"]["pass@k"] == 3 / 4


def test_a_k_that_the_completions_do_not_have_is_refused(answers):
    assert [answers[i]["error"] for i in (3, 4, 10)] == [
        "avg@8 needs 8 completions of every problem, there are 4 of one",
        "avg@2 needs 2 completions of every problem, there are 1 of one",
        "pass@8 needs 8 completions a problem, there are 4",
    ]


def test_no_problem_has_no_score(answers):
    assert all("at least one" in answer["error"] for answer in answers[11:])
    assert len(answers) == len(CASES) == 13


def test_completions_that_cannot_be_compared_are_not_right_and_said_to_be(ran, answers):
    assert answers[5]["result"]["avg@k"] == 0.0
    said = [line for line in ran[0].stderr.splitlines() if line.strip()]
    assert said == ["4 of 4 completions could not be compared with the gold answer and count as not right"]


def test_the_copies_lie_where_the_caches_were_told_to_be(ran):
    copies = {path.name for path in (ran[1] / "modules").rglob("*_at_k.py")}
    assert copies == {"avg_at_k.py", "pass_at_k.py"}
    assert {path.name for path in ran[1].iterdir()} == {"home", "modules"}


def test_a_metric_says_what_it_takes_and_whom_to_cite(ran):
    told = json.loads(ran[0].stdout)
    assert list(told["features"]) == ["predictions", "references"]
    assert "2411.00640" in told["citation"]
    assert "avg@k_stderr" in told["doc"]
