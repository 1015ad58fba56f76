"""Evaluations stand beside each other if they were asked the same in the same way, and else only on demand."""

import json
import math
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.compare import as_dict, as_markdown, as_plain, compare
from perl.evaluation.metrics import paired_difference
from perl.evaluation.protocol import Protocol
from tests.evaluations import results, rows, task_result

BASE = ["0000", "1000", "1100", "1111"] * 5
LORA = ["1100", "1110", "1111", "1111"] * 5
DORA = ["1110", "1100", "1111", "1111"] * 5
SUMS, SUMS_OF_DORA = task_result("sums", BASE, LORA), task_result("sums", BASE, DORA)
PRODUCTS = task_result("products", None, ["10", "01"])
FIRST = results(SUMS)
OTHER = results(SUMS_OF_DORA, name="runs/dora", adapter_sha256="d" * 64)


def by_name(comparison):
    return {policy.name: policy for policy in comparison.policies}


def hotter(found, **settings):
    """The same results under another protocol."""
    protocol = replace(found.protocol, **settings)
    tasks = tuple(replace(task, protocol_hash=f"other-{task.protocol_hash}"[:16]) for task in found.tasks)
    return replace(found, protocol=protocol, tasks=tasks)


def test_the_base_stands_once_and_every_adapter_beside_it():
    comparison = compare([FIRST, OTHER])
    assert [policy.name for policy in comparison.policies] == ["base", "runs/lora", "runs/dora"]
    assert comparison.tasks == {"sums": "Sums"}
    scores = {name: policy.scores["sums"] for name, policy in by_name(comparison).items()}
    assert scores == {"base": SUMS.base, "runs/lora": SUMS.adapter, "runs/dora": SUMS_OF_DORA.adapter}
    assert comparison.notes == ()


def test_the_first_is_compared_with_each_other_problem_by_problem():
    comparison = compare([FIRST, OTHER])
    assert comparison.first == "runs/lora"
    expected = paired_difference(rows(LORA), rows(DORA))
    assert {name: dict(policy.differences) for name, policy in by_name(comparison).items()} == {
        "base": {},
        "runs/lora": {},
        "runs/dora": {"sums": expected},
    }


def test_problems_are_paired_by_their_ids_not_by_their_order():
    turned = replace(SUMS_OF_DORA, problems=SUMS_OF_DORA.problems[::-1])
    assert compare([FIRST, replace(OTHER, tasks=(turned,))]) == compare([FIRST, OTHER])


@pytest.mark.parametrize(
    "change", [{"problems": SUMS.problems[1:]}, {"data": {**SUMS.data, "sha256": "f" * 64}}], ids=["ids", "data"]
)
def test_other_problems_are_not_paired(change):
    comparison = compare([FIRST, replace(OTHER, tasks=(replace(SUMS_OF_DORA, **change),))])
    assert by_name(comparison)["runs/dora"].differences == {}
    assert "Difference" not in as_markdown(comparison)


def test_scores_that_do_not_differ_are_marked():
    alike = as_markdown(compare([FIRST, OTHER]))
    assert f"{100 * SUMS_OF_DORA.adapter.accuracy:.1f} ± " in alike
    assert alike.count(" ≈ |") == 1
    assert "- ≈: not shown to differ from runs/lora: the 95 % interval includes 0 or p is above 0.05." in alike
    worse = results(task_result("sums", BASE, ["0000"] * 20), name="runs/bad", adapter_sha256="e" * 64)
    assert "≈" not in as_markdown(compare([FIRST, worse]))


def test_a_base_alone_is_compared_as_any_other():
    alone = results(task_result("sums", BASE), name="base", adapter_sha256=None)
    for pair, first, less in (([FIRST, alone], "runs/lora", (LORA, BASE)), ([alone, FIRST], "base", (BASE, LORA))):
        comparison = compare(pair)
        assert [policy.name for policy in comparison.policies] == ["base", "runs/lora"]
        assert comparison.first == first
        [other] = [policy for policy in comparison.policies if policy.name != first]
        assert other.differences == {"sums": paired_difference(rows(less[0]), rows(less[1]))}


def test_a_base_that_scored_otherwise_stands_again():
    again = replace(OTHER, tasks=(task_result("sums", LORA, DORA),))
    assert [policy.name for policy in compare([FIRST, again]).policies][:2] == [
        "base of runs/lora",
        "base of runs/dora",
    ]


def test_other_bases_are_called_by_their_names():
    names = [p.name for p in compare([FIRST, replace(OTHER, subject={**OTHER.subject, "base": "a/b"})]).policies]
    assert names[:2] == ["base someone/base", "base a/b"]
    assert len(compare([FIRST, replace(OTHER, subject={**OTHER.subject, "base_sha256": "x"})]).policies) == 4


def test_runs_of_one_name_are_told_apart():
    comparison = compare([FIRST, results(SUMS_OF_DORA, adapter_sha256="d" * 64)])
    assert list(by_name(comparison)) == ["base", "runs/lora (0123456789ab)", "runs/lora (dddddddddddd)"]
    twice = compare([FIRST, FIRST])
    assert [p.name.split()[-1] for p in twice.policies] == ["base", "#1", "#2"]
    called_base = compare([results(SUMS, name="base"), OTHER])
    assert list(by_name(called_base)) == ["base", "base (0123456789ab)", "runs/dora"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 1.0}, "temperature 0.6 and 1"),
        ({"system_prompt": "Think hard."}, "system_prompt none and 'Think hard.'"),
        ({"top_p": 1.0, "top_k": 20}, "top_p 0.95 and 1, top_k 0 and 20"),
        ({"max_new_tokens": None}, "max_new_tokens 512 and none"),
        ({"seed": 9}, "the prompt or the version of the task"),
    ],
)
def test_other_protocols_are_refused_with_the_settings_that_differ(settings, said):
    with pytest.raises(PerlError) as caught:
        compare([FIRST, hotter(OTHER, **settings)])
    assert str(caught.value) == (
        f"Sums was evaluated otherwise in runs/lora and in runs/dora: {said} (--force compares them all the same)"
    )


def test_other_data_other_k_and_other_limits_are_said():
    other = task_result("sums", ["10"] * 20, ["11"] * 20, max_new_tokens=64, protocol_hash="x")
    other = replace(other, data={**other.data, "sha256": "f" * 64})
    with pytest.raises(PerlError) as caught:
        compare([FIRST, replace(OTHER, tasks=(other,))])
    for said in ("k 4 and 2", "max_new_tokens 512 and 64", "data sha256 0123456789ab and ffffffffffff"):
        assert said in str(caught.value)
    assert "temperature" not in str(caught.value)


def test_every_task_and_result_that_differs_is_said_at_once():
    tasks = (SUMS, replace(PRODUCTS, protocol_hash="p"))
    first = replace(FIRST, tasks=tasks)
    others = [hotter(replace(OTHER, tasks=tasks), temperature=t) for t in (1.0, 0.2)]
    with pytest.raises(PerlError) as caught:
        compare([first, *others])
    assert len(caught.value.mistakes) == 4


def test_another_seed_is_another_draw_of_the_same_protocol():
    assert compare([FIRST, replace(OTHER, protocol=replace(OTHER.protocol, seed=5))]).notes == ()


def test_with_force_the_others_are_marked_and_the_difference_is_said():
    comparison = compare([FIRST, OTHER, hotter(results(SUMS, name="runs/hot"), temperature=1.0)], force=True)
    assert by_name(comparison)["runs/hot"].otherwise == ("sums",)
    marked = [line for line in as_plain(comparison).splitlines() if line.rstrip().endswith("†") or " †  " in line]
    assert [line.split("  ")[0] for line in marked] == ["base of runs/hot", "runs/hot", "runs/hot"]
    text = as_markdown(comparison)
    assert "- Sums was evaluated otherwise in runs/lora and in runs/hot: temperature 0.6 and 1" in text
    assert "†: another protocol" in text
    assert "†" not in as_markdown(compare([FIRST, OTHER], force=True))


def test_results_without_a_common_task_are_refused():
    lone = results(PRODUCTS, name="runs/lone")
    with pytest.raises(PerlError, match=r"no task in common .*runs/lora: sums; runs/lone: products"):
        compare([FIRST, lone])
    with pytest.raises(PerlError, match="runs/lone has no task in common with the others"):
        compare([FIRST, OTHER, lone], force=True)
    with pytest.raises(PerlError, match="at least two"):
        compare([FIRST])


def test_a_task_of_one_result_alone_is_left_out_and_said():
    comparison = compare([FIRST, replace(OTHER, tasks=(SUMS_OF_DORA, PRODUCTS))])
    assert list(comparison.tasks) == ["sums"]
    assert comparison.notes == ("Only runs/dora was asked: Products.",)


def test_a_task_that_some_were_not_asked_is_a_dash_there():
    both = results(SUMS, PRODUCTS)
    comparison = compare([both, OTHER, replace(both, subject={**both.subject, "name": "runs/third"})])
    line = next(line for line in as_plain(comparison).splitlines() if line.startswith("runs/dora"))
    assert line.endswith("  -")


def test_other_engines_are_said():
    comparison = compare([FIRST, replace(OTHER, engine={"backend": "transformers", "dtype": "float32"})])
    assert comparison.notes == (
        "The engines are not the same: runs/lora vllm bfloat16, runs/dora transformers float32.",
    )


def test_json_holds_the_numbers_and_null_where_there_is_none():
    single = results(task_result("sums", ["10"], ["11"])), results(task_result("sums", ["10"], ["10"]), name="b")
    facts = json.loads(json.dumps(as_dict(compare(single)), allow_nan=False))
    assert facts["tasks"] == {"sums": "Sums"}
    assert facts["first"] == "runs/lora"
    base, first, other = facts["policies"]
    assert (base["name"], base["scores"]["sums"]["accuracy"]) == ("base", 0.5)
    assert first["scores"]["sums"]["pass_at"] == {"1": 1.0, "2": 1.0}
    difference = other["differences"]["sums"]
    assert difference["mean"] == -0.5
    assert difference["low"] is None
    assert difference["shown"] is False
    assert math.isnan(by_name(compare(single))["b"].differences["sums"].low)


def test_the_plain_table_is_aligned():
    lines = as_plain(compare([FIRST, OTHER])).split("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["Policy", "base", "runs/lora", "runs/dora"]
    assert len({len(line) for line in lines}) == 1
    assert lines[0].endswith("Sums (avg@4)")


def test_tasks_with_different_k_say_so():
    few = replace(OTHER, tasks=(task_result("sums", BASE, ["11"] * 20, protocol_hash="x"),), protocol=Protocol(k=2))
    assert "Sums (avg@k)" in as_markdown(compare([FIRST, few], force=True))
