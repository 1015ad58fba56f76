"""What is unusual in the distance of engine and trainer: never what rounding does, always another policy."""

import math
import random

import pytest
import torch

from perl.policy.precision import tolerance_of
from perl.rollouts.gap import GapJudge

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


@pytest.mark.parametrize("seed", range(5))
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
    assert not judge.is_usual(wrong)
    assert judge.is_no_rounding(wrong) == (wrong > judge.tolerance)


def test_what_is_no_number_is_unusual():
    judge = GapJudge(TOLERANCE)
    for gap in (math.nan, math.inf):
        assert not judge.is_usual(gap)
        assert not judge.is_usual(gap, 2)


def test_rollouts_that_are_behind_are_compared_with_those_as_far_behind_and_checked_seldom():
    judge = GapJudge(TOLERANCE)
    for _ in range(5):
        judge.accept(1e-6)
    checks, chance = 0, random.Random(0)
    for step in range(1, 301):
        learned = 0.03 * min(1.0, step / 50) * chance.uniform(0.5, 1.5)  # the learning rate warms up
        checks += not judge.is_usual(learned, 2)
        judge.accept(learned, 2)
    assert 1 <= checks <= 3
    assert not judge.is_usual(0.01)  # those that are not behind differ by rounding alone
    assert not judge.is_usual(1.0, 2)
    assert not judge.is_no_rounding(1.0, 2)


def test_after_a_passed_check_as_much_again_is_usual():
    judge = GapJudge(TOLERANCE)
    for _ in range(5):
        judge.accept(1e-6)
    assert not judge.is_usual(1e-3)
    judge.accept(1e-3)
    assert judge.is_usual(1.5e-3)
    assert not judge.is_usual(3e-3)


def test_one_step_of_another_policy_does_not_make_the_next_one_usual_where_rollouts_are_behind():
    judge = GapJudge(TOLERANCE)
    for _ in range(5):
        judge.accept(1e-6)
        judge.accept(1e-3, 1)
    assert not judge.is_usual(5.0, 1)
    assert judge.is_no_rounding(5.0, 1)  # whoever passes the parity check by then
    judge.accept(5.0, 1)
    assert not judge.is_usual(1.0, 1)
    assert judge.is_no_rounding(40.0, 1)
