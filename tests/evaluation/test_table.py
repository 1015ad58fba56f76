"""The table says what was measured, how, and what speaks against it, for a paper and for a terminal."""

import math
from dataclasses import replace

import pytest

from perl.evaluation.metrics import Difference
from perl.evaluation.protocol import Protocol
from perl.evaluation.results import OtherScore
from perl.evaluation.table import WIDEST, difference_cell, is_shown, markdown, p_cell, percent, plain, score_cell
from tests.evaluations import results, task_result

# Three of four problems gain two of four completions, the last is always right: +0.375 on average.
BETTER = task_result("sums", ["0000", "1000", "1100", "1111"] * 5, ["1100", "1110", "1111", "1111"] * 5)
ALIKE = task_result("products", ["10", "01", "11"], ["01", "11", "10"])


def cells(text, row):
    """A line of a Markdown table by its headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return dict(zip(split[0], split[2 + row], strict=True))


def test_a_row_says_what_was_measured():
    found = cells(markdown(results(BETTER)), 0)
    # Base: 0, 25, 50, 100 %, five times: standard deviation 38.0, over the root of 20.
    error = math.sqrt(sum((x - 43.75) ** 2 for x in (0, 25, 50, 100)) * 5 / 19) / math.sqrt(20)
    assert found["avg@4 base"] == f"43.8 ± {error:.1f}"
    assert found["avg@4 adapter"].startswith("**81.2 ± ")
    assert found["difference [95 % interval]"].startswith("+37.5 [+")
    assert found["p"] == "<0.001"
    # Of 20 problems 15 are solved at least once by the base, all by the adapter; five tie half and half by vote.
    error = 100 * math.sqrt(0.75 * 0.25 / 19)
    assert found["pass@4"] == f"75.0 ± {error:.1f} → 100.0 [{100 * 0.025 ** (1 / 20):.1f}, 100.0]"
    error = 100 * math.sqrt(sum((x - 0.375) ** 2 for x in (0, 0, 0.5, 1)) * 5 / 19 / 20)
    assert found["maj@4"].startswith(f"37.5 ± {error:.1f} → 87.5 ± ")
    assert found["mean tokens"] == "10 → 1,234"
    assert (found["Task"], found["n"], found["truncated"], found["no answer"]) == (
        *("Sums", "20", "0.0 → 0.0", "0.0 → 0.0"),
    )


def test_the_better_one_is_bold_only_if_the_interval_excludes_zero():
    worse = replace(BETTER, base=BETTER.adapter, adapter=BETTER.base, difference=Difference(-0.4, 0.1, -0.6, -0.2, 0.0))
    touching = replace(BETTER, difference=Difference(0.4, 0.2, 0.0, 0.8, 0.05))
    denied = replace(BETTER, difference=Difference(0.125, 0.056, 0.006, 0.244, 0.125))
    assert is_shown(Difference(0.4, 0.2, 0.1, 0.8, 0.05))
    cases = ((BETTER, "avg@4 adapter"), (worse, "avg@4 base"), (touching, None), (denied, None), (ALIKE, None))
    for task, bold in cases:
        found = cells(markdown(results(task)), 0)
        assert [heading for heading, cell in found.items() if "**" in cell] == ([bold] if bold else [])
        marked = [line for line in plain(results(task)).splitlines() if line.startswith(task.title) and "*" in line]
        assert len(marked) == (1 if bold else 0)


def test_what_the_sample_cannot_tell_is_not_shown():
    """Six problems of which the adapter solves all and the base half of the completions; two of 16 that are gained."""
    for base, adapter, p in ((["10"] * 6, ["11"] * 6, 0.031), (["0"] * 2 + ["1"] * 14, ["1"] * 16, 0.5)):
        task = task_result("sums", base, adapter)
        assert task.difference.p_value == pytest.approx(p, abs=1e-3)
        assert task.difference.low < 0 < task.difference.mean < task.difference.high
        assert not is_shown(task.difference)
    four = task_result("sums", ["0"] * 5 + ["1"] * 11, ["1"] * 16)  # by flips of five signs
    assert four.difference.p_value == pytest.approx(2 / 2**5)
    assert "**" not in markdown(results(four))


def test_all_right_is_an_interval_and_no_error_of_nothing():
    text = markdown(results(task_result("sums", ["0"] * 30, ["1"] * 30)))
    found = cells(text, 0)
    assert (found["avg@1 base"], found["avg@1 adapter"]) == ("0.0 [0.0, 11.6]", "**100.0 [88.4, 100.0]**")
    assert "± 0.0" not in text
    assert "[ ]: 95 % interval, where problems came out alike and the standard error is 0.0" in text
    assert "[ ]" not in markdown(results(task_result("sums", ["10", "00", "01"] * 3, ["11", "01", "00"] * 3)))


def test_a_difference_that_only_its_p_value_denies_says_so():
    denied = replace(BETTER, difference=Difference(0.125, 0.056, 0.006, 0.244, 0.125))
    assert "No difference from the base is shown: p is above 0.05." in markdown(results(denied))
    both = markdown(results(denied, ALIKE))
    assert "No difference from the base is shown: p is above 0.05, or the 95 % interval includes 0." in both


def test_columns_of_a_policy_that_was_not_scored_are_absent():
    adapter_alone = cells(markdown(results(task_result("sums", None, ["10", "11"]))), 0)
    assert list(adapter_alone) == [
        *("Task", "n", "avg@2 adapter", "pass@2", "maj@2", "mean tokens", "truncated", "no answer")
    ]
    base_alone = results(task_result("sums", ["10", "11"]), name="base", adapter_sha256=None)
    assert "avg@2 base" in cells(markdown(base_alone), 0)
    assert "adapter" not in markdown(base_alone)
    assert "→" not in markdown(base_alone)


def test_one_completion_a_problem_has_no_pass_and_no_majority():
    text = markdown(results(task_result("sums", ["1", "0"], ["1", "1"])))
    assert "avg@1 base" in text
    assert "pass@" not in text
    assert "maj@" not in text


def test_tasks_with_different_k_say_theirs():
    text = markdown(results(BETTER, ALIKE))
    assert [cells(text, row)["k"] for row in (0, 1)] == ["4", "2"]
    assert {"avg@k base", "avg@k adapter", "pass@k", "maj@k"} <= set(cells(text, 0))
    odd = markdown(results(BETTER, task_result("odd", ["110"], ["111"])))
    assert [cells(odd, row)["k"] for row in (0, 1)] == ["4", "3"]
    assert "pass@k" in cells(odd, 0)


def test_a_single_problem_has_no_error_and_no_interval():
    found = cells(markdown(results(task_result("sums", ["10"], ["11"]))), 0)
    assert (found["avg@2 base"], found["avg@2 adapter"]) == ("50.0", "100.0")
    assert found["difference [95 % interval]"] == "+50.0"
    assert "nan" not in markdown(results(task_result("sums", ["10"], ["11"]))).lower()


def test_what_the_numbers_are_numbers_of_stands_below():
    text = markdown(results(BETTER))
    assert "- Protocol perl: temperature 0.6, top_p 0.95, max_new_tokens 512, k 4, no system prompt, seed 0." in text
    assert "- Engine: vllm 1.2, bfloat16, cpu, logp_diff 0.0012." in text
    assert "- Base: someone/base@r1; adapter: runs/lora, sha256 `0123456789ab`." in text
    assert "- Protocol hash: Sums `sums-0123456789a`." in text
    assert "±: standard error" in text


def test_the_limit_is_named_where_the_protocol_leaves_it_open():
    text = markdown(results(BETTER, replace(ALIKE, max_new_tokens=2048), protocol=Protocol()))
    assert "max_new_tokens the task's" in text
    assert "Cut off after so many tokens: Sums 512, Products 2,048." in text


def test_doubts_are_said_and_only_where_there_are_some():
    doubtful = replace(
        BETTER,
        base=replace(BETTER.base, truncated=0.25, unjudged=0.05),
        adapter=replace(BETTER.adapter, truncated=0.1),
        lighteval={"base": OtherScore({}, 0, 0), "adapter": OtherScore({}, 3, 1)},
    )
    text = markdown(results(doubtful))
    assert "- Not judged: 5.0 % of the completions of the base on Sums; they count as wrong." in text
    assert "- Cut off: 25.0 % of the completions of the base on Sums" in text
    assert text.count("Cut off: ") == text.count("Not judged: ") == 1  # 10 % is not more than 10 %
    assert "lighteval judges 4 of 80 completions of the adapter on Sums otherwise" in text
    assert "right only for lighteval: 1, only here: 3" in text
    for doubt in ("Not judged", "Cut off", "lighteval", "No difference"):
        assert doubt not in markdown(results(BETTER))


def test_no_difference_is_said_where_none_is_shown():
    assert "No difference from the base is shown: the 95 % interval includes 0." in markdown(results(ALIKE))
    assert "every 95 % interval includes 0" in markdown(results(ALIKE, replace(ALIKE, name="x", title="X")))
    assert "No difference" not in markdown(results(ALIKE, BETTER))
    single = markdown(results(task_result("sums", ["10"], ["11"])))
    assert "No difference from the base is shown: a single problem has no interval." in single


def test_a_terminal_shows_the_same_in_aligned_columns_of_no_great_width():
    text = plain(results(BETTER, ALIKE))
    assert "|" not in text
    assert "`" not in text
    assert all(len(line) <= WIDEST for line in text.splitlines())
    table = text.split("\n\n")[0].splitlines()
    assert [line.split()[-1] for line in table] == ["p", "<0.001", "1.000"]
    assert len(set(map(len, table))) == 1
    for numbers in ("43.8 ± ", "+37.5 [+", "75.0 ± 9.9 → 100.0 [83.2, 100.0]", "10 → 1,234", "sums-0123456789a"):
        assert numbers in text
        assert numbers in markdown(results(BETTER, ALIKE))


def test_a_narrow_table_is_not_split():
    text = plain(results(task_result("sums", None, ["1", "0"])))
    assert len(text.split("\n\n")[0].splitlines()) == 2
    assert text.split("\n\n")[1].startswith("Protocol")


def test_a_bar_in_a_title_does_not_end_its_cell():
    assert "| a \\| b |" in markdown(results(replace(BETTER, title="a | b")))


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (Difference(0.031, 0.01, 0.002, 0.06, 0.04), "+3.1 [+0.2, +6.0]"),
        (Difference(-0.031, 0.01, -0.06, -0.002, 0.04), "-3.1 [-6.0, -0.2]"),
        (Difference(-0.0001, 0.01, -0.02, 0.02, 0.9), "0.0 [-2.0, +2.0]"),
        (Difference(0.5, math.nan, math.nan, math.nan, 1.0), "+50.0"),
        (None, "-"),
    ],
)
def test_a_difference_bears_its_sign(difference, text):
    assert difference_cell(difference) == text


@pytest.mark.parametrize(("p", "text"), [(0.0009, "<0.001"), (0.001, "0.001"), (0.0214, "0.021"), (1.0, "1.000")])
def test_a_p_value_has_three_decimals(p, text):
    assert p_cell(Difference(0.0, 0.0, 0.0, 0.0, p)) == text


def test_what_was_not_scored_is_a_dash():
    assert score_cell(None) == p_cell(None) == "-"
    assert percent(1 / 3) == "33.3"
