"""What is unusual in the distance of engine and trainer: never what rounding does, always another policy."""

import math
import random

import pytest
import torch

from perl.policy.precision import tolerance_of
from perl.rollouts.parity_check import GapJudge

STEPS = 300
TOLERANCE, TOLERANCE_OF_HALF = tolerance_of(torch.float32, 28), tolerance_of(torch.bfloat16, 28)


def right_steps(kind, chance):
    """Mean differences of steps on-policy: of tokens whose logits were rounded, while the policy changes.

    Yields:
        The mean of one step.
    """
    noise = {"float32": 1e-6, "float32, exact at first": 1e-6, "bfloat16": 0.03, "bfloat16, one prompt": 0.02}[kind]
    tokens = 40 if kind == "bfloat16, one prompt" else 500
    for step in range(STEPS):
        if kind == "float32, exact at first" and step < 5:
            yield 0.0
            continue
        growing = noise * (1 + step / STEPS)  # sharper logits are larger, and so is what is rounded off them
        if kind.startswith("float32"):
            growing *= 10 ** chance.uniform(-1, 1)
        # A token that the policy is sure of is hardly changed by noise, the others are by all of it.
        yield sum(abs(chance.gauss(0, growing)) * (chance.random() < 0.8) for _ in range(tokens)) / tokens


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["float32", "float32, exact at first", "bfloat16", "bfloat16, one prompt"])
def test_no_right_step_is_unusual(kind, seed):
    chance = random.Random(seed)
    judge = GapJudge(TOLERANCE if kind.startswith("float32") else TOLERANCE_OF_HALF)
    for gap in right_steps(kind, chance):
        assert judge.is_usual(gap)
        judge.accept(gap)


@pytest.mark.parametrize(
    ("kind", "wrong"), [("float32", 5e-4), ("float32", 0.02), ("bfloat16", 0.15), ("bfloat16", 1.4)]
)
@pytest.mark.parametrize("step", [0, 1, 7, 100])
def test_the_rollouts_of_another_policy_are(kind, wrong, step):
    judge = GapJudge(TOLERANCE if kind == "float32" else TOLERANCE_OF_HALF)
    steps = right_steps(kind, random.Random(0))
    for _ in range(step):
        judge.accept(next(steps))
    if step == 0 and wrong < judge.tolerance:
        pytest.skip("nothing is known but the parity check's tolerance")
    for gap in (wrong, math.nan, math.inf):
        assert not judge.is_usual(gap)
        assert not judge.is_usual(gap, 2)
    assert judge.is_no_rounding(wrong) == (wrong > judge.tolerance)


def largest_usual(judge, steps_behind=0):
    """By bisection, to a millionth."""
    low, high = 0.0, 1e3
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if judge.is_usual(middle, steps_behind) else (low, middle)
    return low


def test_rollouts_that_are_behind_may_differ_by_ten_times_the_most_so_far_but_not_by_a_nat_and_far_more():
    judge = GapJudge(TOLERANCE)
    for _ in range(5):
        judge.accept(1e-6)
        judge.accept(1e-3, 1)
    most = min(1e-3, TOLERANCE)  # what was more than usual counts as the most that was usual
    for _ in range(4):
        most = max(most, min(1e-3, 10 * most))
    assert largest_usual(judge, 1) == pytest.approx(10 * most, rel=1e-5)
    assert not judge.is_usual(5.0, 1)
    assert judge.is_no_rounding(5.0, 1)  # whoever passes the parity check by then
    judge.accept(5.0, 1)  # one step of another policy does not make the next one usual
    assert largest_usual(judge, 1) == pytest.approx(10 * 10 * most, rel=1e-5)
    assert not judge.is_usual(1.0, 1)
    assert judge.is_no_rounding(40.0, 1)
