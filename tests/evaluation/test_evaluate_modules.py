"""The `evaluate` library's avg@k and pass@k: loaded from their folders without a network, they say what perl says.

They run in one process of their own: the library copies a metric's file to a cache whose place it reads when imported.
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.documents.printed import REMARK
from tests.oracles import evaluation as by_hand

pytestmark = pytest.mark.skipif(importlib.util.find_spec("evaluate") is None, reason="evaluate is not installed")

METRICS = CHECKOUT / "eval" / "metrics"
GOLDS = ["1/2", "Since 6 * 7 = 42:\n#### 42", r"\boxed{x^2}", "7"]
COMPLETIONS = [
    [r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{2}", "I do not know"],
    [r"so \boxed{42}", r"so \boxed{24}", r"so \boxed{25}", r"so \boxed{26}"],
    [r"\boxed{x \cdot x}", r"\boxed{x^2}", r"\boxed{x^{2}}", r"\boxed{xx}"],
    [r"\boxed{8}", "", r"\boxed{}", r"\boxed{9}"],
]
RIGHT = by_hand.marks(["1100", "1000", "1111", "0000"])
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
WHOLE = {"predictions": COMPLETIONS, "references": GOLDS}
ONE_BY_ONE = [{"predictions": [row], "references": [gold]} for row, gold in zip(COMPLETIONS, GOLDS, strict=True)]
MESSAGE = {"role": "assistant", "content": r"\boxed{4}"}
# Arguments of a metric, and the words of a refusal.
REFUSED = [
    ("avg_at_k", {**WHOLE, "k": 8}, "avg@8 needs 8 completions of every problem, there are 4 of one"),
    (
        "avg_at_k",
        {"predictions": [["1"], ["1", "2"]], "references": ["1", "2"]},
        "avg@2 needs 2 completions of every problem, there are 1 of one",
    ),
    ("pass_at_k", {**WHOLE, "k": 8}, "pass@8 needs 8 completions a problem, there are 4"),
    ("pass_at_k", {"predictions": [], "references": []}, "at least one"),
    ("avg_at_k", {"predictions": [], "references": []}, "at least one"),
    *(
        (name, {"predictions": predictions, "references": references}, reason)
        for name in ("pass_at_k", "avg_at_k")
        for predictions, references, reason in (
            (
                [["4"], ["4", [MESSAGE]]],
                ["4", "4"],
                "completion 2 of problem 2 is a list, not a text; give what the model",
            ),
            (
                [[MESSAGE]],
                ["4"],
                "completion 1 of problem 1 is a dict, not a text; give what the model wrote, of chat messages",
            ),
            ([["4", None]], ["4"], "completion 2 of problem 1 is nothing, not a text; give what the model wrote"),
            (["4"], ["4"], "predictions of problem 1 are a text; give a list of its k completions"),
            ([["4"]], [4], "the reference of problem 1 is an int; give one answer as a text"),
            ([["4"]], [["4"]], "the reference of problem 1 is a list; give one answer as a text"),
        )
    ),
]
CASES = [
    ("avg_at_k", WHOLE),
    ("avg_at_k", {**WHOLE, "k": 4}),
    *(("avg_at_k", one) for one in ONE_BY_ONE),
    ("pass_at_k", WHOLE),
    *(("pass_at_k", {**WHOLE, "k": k}) for k in (1, 2, 4)),
    ("avg_at_k", {"predictions": COMPLETIONS[:1], "references": [""]}),
    *((name, arguments) for name, arguments, _ in REFUSED),
]


def environment(cache: Path) -> dict[str, str]:
    """Of a process whose caches lie in a folder, without a network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_HOME": str(cache / "home"), "HF_MODULES_CACHE": str(cache / "modules"), "HF_HUB_OFFLINE": "1"}


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
        env=environment(cache),
    )
    assert process.returncode == 0, process.stderr
    return process, cache


@pytest.fixture(scope="module")
def answers(ran) -> list[dict]:
    found = json.loads(ran[0].stdout)["answers"]
    assert [answer["name"] for answer in found] == [name for name, _ in CASES]
    return found


def test_one_by_one_they_are_refused_too_and_a_copy_as_in_a_wheel_says_the_same(tmp_path):
    """From `perl/assets/eval`, where a wheel has them: a folder that is no checkout."""
    assets = tmp_path / "perl" / "assets" / "eval" / "metrics"
    shutil.copytree(METRICS, assets)
    script = """
import json, sys
import evaluate
metric = evaluate.load(sys.argv[1] + "/avg_at_k")
metric.add(prediction=["\\\\boxed{4}", "5"], reference="4")
metric.add_batch(predictions=[["\\\\boxed{7}", "7"]], references=["7"])
print(json.dumps(metric.compute()))
try:
    metric.add(prediction=[[{"role": "assistant", "content": "4"}]], reference="4")
except ValueError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(assets)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(tmp_path),
    )
    assert ran.returncode == 0, ran.stderr
    found, refused = ran.stdout.splitlines()
    assert json.loads(found) == {"avg@k": 0.5, "avg@k_stderr": 0.0, "k": 2}
    assert refused.startswith("completion 1 of problem 1 is a list, not a text;")


def results_of(answers, name) -> list[dict]:
    return [answer["result"] for answer in answers if answer["name"] == name and "result" in answer]


def test_avg_at_k_is_the_share_of_right_completions(answers):
    whole, with_k, *one_by_one, _ = results_of(answers, "avg_at_k")
    expected = by_hand.estimate(by_hand.shares(RIGHT))
    assert whole == with_k == pytest.approx({"avg@k": expected.mean, "avg@k_stderr": expected.stderr, "k": 4})
    assert [found["avg@k"] for found in one_by_one] == pytest.approx([float(s) for s in by_hand.shares(RIGHT)])
    assert all(math.isnan(found["avg@k_stderr"]) for found in one_by_one)


def test_pass_at_k_is_the_share_of_choices_and_k_is_1_if_not_said(answers):
    for found, k in zip(results_of(answers, "pass_at_k"), (1, 1, 2, 4), strict=True):
        expected = by_hand.pass_at(RIGHT, k)
        assert found == pytest.approx({"pass@k": expected.mean, "pass@k_stderr": expected.stderr, "k": k})


def test_what_cannot_be_scored_is_refused(answers):
    reasons = [reason for *_, reason in REFUSED]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert [reason for reason, error in zip(reasons, errors, strict=True) if reason not in error] == []
    assert not any("\n" in error for error in errors)


def test_completions_that_cannot_be_compared_are_not_right_and_said_to_be(ran, answers):
    assert results_of(answers, "avg_at_k")[-1]["avg@k"] == 0.0
    said = [line for line in ran[0].stderr.splitlines() if line.strip() and not REMARK.match(line)]
    assert said == ["4 of 4 completions could not be compared with the gold answer and count as not right [PRL304]"]


def test_the_copies_lie_where_the_caches_were_told_to_be(ran):
    copies = {path.name for path in (ran[1] / "modules").rglob("*_at_k.py")}
    assert copies == {"avg_at_k.py", "pass_at_k.py"}
    assert {path.name for path in ran[1].iterdir()} == {"home", "modules"}


def test_a_metric_says_what_it_takes_and_whom_to_cite(ran):
    told = json.loads(ran[0].stdout)
    assert list(told["features"]) == ["predictions", "references"]
    assert "2411.00640" in told["citation"]
    assert "avg@k_stderr" in told["doc"]
