"""The table says what was measured, how, and what speaks against it, for a paper and for a terminal."""

import math
import re
from dataclasses import replace

import pytest

from perl.evaluation.scoring.metrics import Difference
from perl.evaluation.scoring.results import OtherScore
from perl.evaluation.scoring.table import difference_cell, markdown, p_cell, plain
from tests.evaluations import results, task_result
from tests.oracles import evaluation as by_hand

# Three of four problems gain two of four completions, the last is always right: +0.375 on average.
BASE, ADAPTER = ["0000", "1000", "1100", "1111"] * 5, ["1100", "1110", "1111", "1111"] * 5
BETTER = task_result("sums", BASE, ADAPTER)
ALIKE = task_result("products", ["10", "01", "11"], ["01", "11", "10"])


def cells(text, row):
    """A line of a Markdown table by its headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return dict(zip(split[0], split[2 + row], strict=True))


def numbers_of(cell) -> list[float]:
    """The numbers of a cell, in percent."""
    return [float(number) for number in re.findall(r"[+-]?[\d.]+", cell.replace("**", ""))]


def printed(*values) -> list[float]:
    """Shares as a cell has them, but for how they are rounded."""
    return pytest.approx([100 * value for value in values], abs=0.05 + 1e-9)


def test_a_row_says_what_was_measured():
    found = cells(markdown(results(BETTER)), 0)
    base, adapter = by_hand.marks(BASE), by_hand.marks(ADAPTER)
    scores = [by_hand.estimate(by_hand.shares(right)) for right in (base, adapter)]
    assert numbers_of(found["avg@4 base"]) == printed(scores[0].mean, scores[0].stderr)
    assert numbers_of(found["avg@4 adapter"]) == printed(scores[1].mean, scores[1].stderr)
    gain = by_hand.difference(base, adapter)
    assert numbers_of(found["difference [95 % interval]"]) == printed(gain.mean, gain.low, gain.high)
    assert found["p"] == "<0.001"
    # Of the adapter all problems are solved at least once: an interval stands in place of an error of 0.
    solved = [by_hand.pass_at(right, 4) for right in (base, adapter)]
    expected = solved[0].mean, solved[0].stderr, solved[1].mean, solved[1].low, solved[1].high
    assert numbers_of(found["pass@4"]) == printed(*expected)
    votes = [by_hand.majority([["1" if r else "2" for r in row] for row in right], right) for right in (base, adapter)]
    assert numbers_of(found["maj@4"]) == printed(*(number for one in votes for number in (one.mean, one.stderr)))
    assert found["mean tokens"] == "10 → 1,234"
    assert (found["Task"], found["n"], found["truncated"], found["no answer"]) == (
        *("Sums", "20", "0.0 → 0.0", "0.0 → 0.0"),
    )


def test_of_several_tasks_a_difference_is_shown_by_a_p_value_that_is_corrected_for_their_number():
    """Nine wins of ten and no loss have p = 2 / 2**9; among more, each must be as rare as one of so many."""
    won = task_result("won", ["00"] * 10, ["11"] * 9 + ["00"])
    assert won.difference.p_value == pytest.approx(2 / 2**9)
    others = [replace(ALIKE, name=f"alike-{i}", title=f"Alike {i}") for i in range(19)]
    for count, p, bold in ((0, "0.004", True), (9, "0.039", True), (13, "0.055", False)):
        found = results(won, *others[:count])
        text = markdown(found)
        assert cells(text, 0)["p"] == p
        assert ("**" in text) is bold
        assert next(line.split()[-1] for line in plain(found).splitlines() if line.startswith("Won ")) == p
        legend = f"p: sign flips by problem, Holm over {count + 1} tasks" if count else "p: sign flips by problem"
        assert f"{legend}{';' if bold else '; a →'}" in text
        assert ("No difference from the base is shown" in text) is not bold
        kept = found.as_dict()["perl"]["tasks"]["won"]["difference"]["p_value"]
        assert kept == pytest.approx(2 / 2**9)  # the file has the task's own


def test_all_right_is_an_interval_and_no_error_of_nothing():
    text = markdown(results(task_result("sums", ["0"] * 30, ["1"] * 30)))
    found = cells(text, 0)
    rare = 0.025 ** (1 / 30)  # so rare are 30 rights of 30 at this share
    assert numbers_of(found["avg@1 base"]) == printed(0, 0, 1 - rare)
    assert numbers_of(found["avg@1 adapter"]) == printed(1, rare, 1)
    assert "± 0.0" not in text
    assert "[ ]: 95 % interval, where problems came out alike and the standard error is 0.0" in text
    assert "[ ]" not in markdown(results(task_result("sums", ["10", "00", "01"] * 3, ["11", "01", "00"] * 3)))


DENIED_BY_P = replace(BETTER, difference=Difference(0.125, 0.056, 0.006, 0.244, 0.125))
NOT_SHOWN = "No difference from the base is shown: "


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ([DENIED_BY_P, ALIKE], "p is above 0.05, or the 95 % interval includes 0."),
        ([task_result("sums", ["10"], ["11"])], "a single problem has no interval."),
        ([ALIKE, BETTER], None),
        ([BETTER], None),
    ],
)
def test_that_no_difference_is_shown_is_said_with_its_reason(tasks, reason):
    text = markdown(results(*tasks))
    assert (f"{NOT_SHOWN}{reason}" in text) if reason is not None else "No difference" not in text


def test_doubts_are_said_and_only_where_there_are_some():
    doubtful = replace(
        BETTER,
        base=replace(BETTER.base, truncated=0.25, unjudged=0.05),
        adapter=replace(BETTER.adapter, truncated=0.1),
        lighteval={"base": OtherScore(0.5, None, 0, 0), "adapter": OtherScore(0.5, None, 3, 1)},
    )
    text = markdown(results(doubtful))
    assert "- Not judged: 5.0 % of the completions of the base on Sums; they count as wrong." in text
    assert "- Cut off: 25.0 % of the completions of the base on Sums" in text
    assert text.count("Cut off: ") == text.count("Not judged: ") == 1  # 10 % is not more than 10 %
    assert "lighteval judges 4 of 80 completions of the adapter on Sums otherwise" in text
    assert "right only for lighteval: 1, only here: 3" in text
    for doubt in ("Not judged", "Cut off", "lighteval", "No difference"):
        assert doubt not in markdown(results(BETTER))


def test_a_task_that_asks_as_lighteval_does_shows_its_score_or_says_that_there_is_none():
    own = {who: OtherScore(mean, 0.0125, 0, 0) for who, mean in (("base", 0.25), ("adapter", 0.75))}
    named = replace(BETTER, title="Sums (lighteval's prompt)")
    found = cells(markdown(results(replace(named, lighteval=own))), 0)
    assert found["avg@4 by lighteval"] == "25.0 ± 1.2 → 75.0 ± 1.2"
    assert "25.0 ± 1.2 → 75.0 ± 1.2" in plain(results(replace(named, lighteval=own)))
    beside = replace(ALIKE, lighteval={})
    assert cells(markdown(results(replace(named, lighteval=own), beside)), 1)["avg@k by lighteval"] == "-"
    without = markdown(results(named))
    assert "by lighteval" not in cells(without, 0)
    assert "- Asked as lighteval asks, and not scored by lighteval itself: Sums (lighteval's prompt)." in without
    # Of other tasks nobody expects it; what it judges otherwise is said of them too.
    assert "by lighteval" not in markdown(results(replace(BETTER, lighteval=own)))


@pytest.mark.parametrize(
    ("difference", "gain", "p"),
    [
        (Difference(0.031, 0.01, 0.002, 0.06, 0.0009), "+3.1 [+0.2, +6.0]", "<0.001"),
        (Difference(-0.031, 0.01, -0.06, -0.002, 0.001), "-3.1 [-6.0, -0.2]", "0.001"),
        (Difference(-0.0001, 0.01, -0.02, 0.02, 0.0214), "0.0 [-2.0, +2.0]", "0.021"),
        (Difference(0.5, math.nan, math.nan, math.nan, 1.0), "+50.0", "1.000"),
        (None, "-", "-"),
    ],
)
def test_a_difference_bears_its_sign_and_its_p_value_three_decimals(difference, gain, p):
    assert (difference_cell(difference), p_cell(difference)) == (gain, p)
