"""Evaluations stand beside each other if they were asked the same in the same way, and else only on demand."""

import json
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.comparing.evaluations import compare, compare_adapters
from perl.evaluation.comparing.text import as_dict, as_markdown, as_plain
from tests.evaluations import results, task_result
from tests.oracles import evaluation as by_hand

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


def assert_paired(difference, first, other):
    """It is the other's completions less the first's, problem by problem."""
    first, other = by_hand.marks(first), by_hand.marks(other)
    found = difference.mean, difference.stderr, difference.low, difference.high
    assert found == pytest.approx(by_hand.difference(first, other))
    assert difference.p_value == pytest.approx(by_hand.p_value(first, other))


def test_the_base_stands_once_and_every_adapter_beside_it():
    comparison = compare([FIRST, OTHER])
    assert comparison.tasks == {"sums": "Sums"}
    assert comparison.notes == ()
    expected = {"base": BASE, "runs/lora": LORA, "runs/dora": DORA}
    assert [policy.name for policy in comparison.policies] == list(expected)
    for name, policy in by_name(comparison).items():
        score = policy.scores["sums"]
        found = score.accuracy, score.stderr, score.low, score.high
        assert found == pytest.approx(by_hand.estimate(by_hand.shares(by_hand.marks(expected[name]))))


def test_the_first_is_compared_with_each_other_problem_by_problem():
    comparison = compare([FIRST, OTHER])
    differences = {name: policy.differences for name, policy in by_name(comparison).items()}
    assert comparison.first == "runs/lora"
    assert {name: list(found) for name, found in differences.items()} == {
        "base": [],
        "runs/lora": [],
        "runs/dora": ["sums"],
    }
    assert_paired(differences["runs/dora"]["sums"], LORA, DORA)


@pytest.mark.parametrize(
    ("change", "paired"),
    [
        ({"problems": SUMS_OF_DORA.problems[::-1]}, True),  # by their ids, not by their order
        ({"problems": SUMS.problems[1:]}, False),
        ({"data": {**SUMS.data, "sha256": "f" * 64}}, False),
    ],
    ids=["another order", "other ids", "other data"],
)
def test_only_the_same_problems_are_paired_in_whatever_order_they_stand(change, paired):
    comparison = compare([FIRST, replace(OTHER, tasks=(replace(SUMS_OF_DORA, **change),))])
    assert ("Difference" in as_markdown(comparison)) is paired
    differences = by_name(comparison)["runs/dora"].differences
    if paired:
        assert_paired(differences["sums"], LORA, DORA)
    else:
        assert differences == {}


OTHER_DATA = replace(
    task_result("sums", ["10"] * 20, ["11"] * 20, max_new_tokens=64, protocol_hash="x"),
    data={**SUMS.data, "sha256": "f" * 64},
)


@pytest.mark.parametrize(
    ("other", "settings"),
    [
        (hotter(OTHER, top_p=1.0, top_k=20), ["top_p 0.95 and 1", "top_k 0 and 20"]),
        (hotter(OTHER, seed=9), ["the prompt or the version of the task"]),
        (
            replace(OTHER, tasks=(OTHER_DATA,)),
            ["max_new_tokens 512 and 64", "k 4 and 2", "data sha256 0123456789ab and ffffffffffff"],
        ),
        (replace(OTHER, protocol=replace(OTHER.protocol, seed=5)), None),  # another draw of the same protocol
    ],
    ids=["nucleus", "hash alone", "data, k and limit", "seed"],
)
def test_other_protocols_are_refused_with_exactly_the_settings_that_differ(other, settings):
    if settings is None:
        assert compare([FIRST, other]).notes == ()
        return
    with pytest.raises(PerlError) as caught:
        compare([FIRST, other])
    message, _, hint = str(caught.value).partition(" (")
    assert message == f"Sums was evaluated otherwise in runs/lora and in runs/dora: {', '.join(settings)}"
    assert "--force" in hint


def test_with_force_the_others_are_marked_and_the_difference_is_said():
    comparison = compare([FIRST, OTHER, hotter(results(SUMS, name="runs/hot"), temperature=1.0)], force=True)
    assert by_name(comparison)["runs/hot (temperature 1)"].otherwise == ("sums",)
    marked = [line for line in as_plain(comparison).splitlines() if " †" in line]
    hot = "runs/hot (temperature 1)"
    assert [line.split("  ")[0] for line in marked] == [f"base of {hot}", hot]
    text = as_markdown(comparison)
    assert "- Sums was evaluated otherwise in runs/lora and in runs/hot: temperature 0.6 and 1" in text
    assert "†: another protocol" in text
    assert "†" not in as_markdown(compare([FIRST, OTHER], force=True))


def test_results_without_a_common_task_are_refused_or_left_out():
    lone = results(PRODUCTS, name="runs/lone")
    with pytest.raises(PerlError, match=r"no task in common .*runs/lora: sums; runs/lone: products"):
        compare([FIRST, lone])
    left = compare([FIRST, OTHER, lone])
    assert [policy.name for policy in left.policies] == ["base", "runs/lora", "runs/dora"]
    assert left.notes == ("Left out, since no other was asked the same tasks: runs/lone.",)


def test_json_holds_the_numbers_and_null_where_there_is_none():
    facts = json.loads(json.dumps(as_dict(compare([FIRST, OTHER])), allow_nan=False))
    assert (facts["tasks"], facts["first"]) == ({"sums": "Sums"}, "runs/lora")
    assert [policy["name"] for policy in facts["policies"]] == ["base", "runs/lora", "runs/dora"]
    for policy, texts in zip(facts["policies"], (BASE, LORA, DORA), strict=True):
        expected = {str(k): by_hand.pass_at(by_hand.marks(texts), k).mean for k in (1, 2, 4)}
        assert policy["scores"]["sums"]["pass_at"] == pytest.approx(expected)
    difference = facts["policies"][2]["differences"]["sums"]
    assert difference.pop("p_value") == pytest.approx(by_hand.p_value(by_hand.marks(LORA), by_hand.marks(DORA)))
    assert difference.pop("p_corrected") == pytest.approx(by_hand.p_value(by_hand.marks(LORA), by_hand.marks(DORA)))
    assert difference.pop("shown") is False
    assert difference == pytest.approx(by_hand.difference(by_hand.marks(LORA), by_hand.marks(DORA))._asdict())


def test_adapters_of_one_call_stand_each_beside_its_own_base_with_how_they_were_asked_and_what_to_doubt():
    task = replace(SUMS, base=replace(SUMS.base, truncated=0.25))
    own_base = results(
        task_result("sums", LORA, DORA), name="runs/pissa", adapter_sha256="p" * 64, base="other/base", base_sha256="f"
    )
    doubtful = [replace(one, tasks=(replace(task, adapter=one.tasks[0].adapter),)) for one in (FIRST, OTHER)]
    found = compare_adapters([*doubtful, own_base])
    assert [policy.name for policy in found.policies if policy.differences] == ["runs/lora", "runs/dora", "runs/pissa"]
    assert_paired(by_name(found)["runs/pissa"].differences["sums"], LORA, DORA)
    assert found.first == "its base"
    assert found.notes[0].startswith("Protocol perl: temperature 0.6, top_p 0.95")
    assert found.notes[1].startswith("Cut off: 25.0 % of the completions of the base on Sums;")
    alone = [replace(one, tasks=(replace(one.tasks[0], base=None, difference=None),)) for one in (FIRST, OTHER)]
    assert compare_adapters(alone).first == "runs/lora"


def test_a_table_has_a_row_a_task_and_policy_with_the_k_that_they_share():
    third = results(SUMS, PRODUCTS, name="runs/third")
    lines = as_plain(compare([results(SUMS, PRODUCTS), OTHER, third])).split("\n\n")[0].splitlines()
    assert lines[0].split() == ["Policy", "Task", "avg@k", "difference", "[95", "%", "interval]", "p"]
    asked = [line.split()[1] for line in lines[1:]]
    assert asked == ["Sums"] * 4 + ["Products"] * 2
    assert len({len(line) for line in lines}) == 1
    assert "avg@4" in as_markdown(compare([FIRST, OTHER]))
