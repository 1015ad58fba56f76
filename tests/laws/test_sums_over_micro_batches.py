"""Micro-batches of any budget add up to the same step, and first fit needs few more of them than the best way would."""

import math
import random

import pytest
import torch

from perl.packing.micro_batches import Window, micro_batches, token_batches
from perl.packing.rows import Row

BUDGETS = [0, 1, 12, 20, 50, 1000]


def row(prompt: int, length: int, name: int = 0) -> Row:
    """A prompt of so many tokens that are its name, and a completion of so many."""
    return Row(torch.full((prompt,), name), torch.arange(length) + 2, torch.ones(length, dtype=torch.bool))


def window(seed: int) -> Window:
    """Twelve rows of three prompts."""
    choices, values = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = tuple(row(3 + 2 * (i % 3), choices.randint(1, 9), i % 3) for i in range(12))
    longest = max(len(r.completion) for r in rows)
    mask = torch.stack([(torch.arange(longest) < len(r.completion)).float() for r in rows])
    weights = torch.rand(12, longest, generator=values) * mask
    advantages = torch.randn(12, 1, generator=values)
    old = torch.randn(12, longest, generator=values)
    return Window(rows, mask, weights, advantages, {"old_per_token_logps": old}, torch.arange(12) // 4)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("packed", "share"), [(True, True), (True, False), (False, False)])
def test_weighted_sums_over_the_micro_batches_are_those_over_the_window(budget, packed, share):
    for seed in range(3):
        whole = window(seed)
        parts = micro_batches(whole, range(12), budget=budget, packed=packed, share=share)
        old = "old_per_token_logps"
        sums = [
            sum(part.weights_NT.double().sum() for part in parts),
            sum((part.weights_NT * part.advantages).double().sum() for part in parts),
            sum((part.weights_NT * part.advantages * part.values[old]).double().sum() for part in parts),
            sum(part.mask_NT.double().sum() for part in parts),
        ]
        expected = [
            whole.weights_NT.double().sum(),
            (whole.weights_NT * whole.advantages).double().sum(),
            (whole.weights_NT * whole.advantages * whole.values[old]).double().sum(),
            whole.mask_NT.double().sum(),
        ]
        torch.testing.assert_close(torch.stack(sums), torch.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_first_fit_needs_at_most_a_ninth_and_two_more_than_the_best_way(seed):
    """Johnson 1973: 11/9 OPT + 6/9. OPT by trying all ways."""
    choices = random.Random(seed)
    lengths = [choices.randint(1, 12) for _ in range(7)]
    rows = [row(1, length) for length in lengths]
    found = token_batches(rows, budget=14, packed=True, share=False)

    def best(left: list[int], bins: list[int], fewest: int) -> int:
        if len(bins) >= fewest:
            return fewest
        if not left:
            return len(bins)
        first, *rest = left
        for i, filled in enumerate(bins):
            if filled + first <= 14:
                fewest = best(rest, [*bins[:i], filled + first, *bins[i + 1 :]], fewest)
        return best(rest, [*bins, first], fewest)

    optimum = best(sorted(lengths, reverse=True), [], 8)
    assert optimum >= math.ceil(sum(lengths) / 14)
    assert optimum <= len(found) <= 11 / 9 * optimum + 6 / 9
