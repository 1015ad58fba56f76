"""Gaps of tokens are those of the logged group, row for row, whatever micro-batch they come in."""

import math

import pytest
import torch

from perl.packing.micro_batches import SHOWN
from perl.trainer.sampling.rollout_check import TokenGaps


class Letters:
    """A tokenizer whose token 0 is "a"."""

    def batch_decode(self, rows):
        return ["".join(chr(97 + number) for number in row) for row in rows]


def rollouts(rows=4, **further):
    """Completions of 3, 2, 1, 3, ... tokens; the engine's log-prob of token t of row n is -(n + t / 10)."""
    lengths = [3 - n % 3 for n in range(rows)]
    mask = torch.tensor([[int(t < length) for t in range(3)] for length in lengths])
    sampled = -(torch.arange(rows).unsqueeze(1) + torch.arange(3) / 10)
    ids = torch.arange(rows * 3).view(rows, 3) % 26
    return {"completion_ids": ids, "completion_mask": mask, "sampling_per_token_logps": sampled, **further}


def test_rows_of_the_group_are_found_in_any_order_and_the_others_are_not_kept():
    gaps, batch = TokenGaps(main=True), rollouts()
    gaps.begin(batch, generations=2)
    assert batch[SHOWN].flatten().tolist() == [1, 2, 0, 0]
    assert gaps.rows(Letters()) == {}  # no step has run them
    sampled, mask = batch["sampling_per_token_logps"], batch["completion_mask"]
    for rows in ([3, 1], [0, 2]):  # two micro-batches
        gaps.add(batch[SHOWN][rows], sampled[rows] + 0.5, sampled[rows], mask[rows])
    half = pytest.approx(0.5, abs=1e-5)
    assert gaps.rows(Letters()) == {
        0: {"tokens": ["a", "b", "c"], "gaps": [half, half, half]},
        1: {"tokens": ["d", "e"], "gaps": [half, half]},
    }
    gaps.begin(rollouts(), generations=2)  # the next rollouts
    assert gaps.rows(Letters()) == {}


def test_what_was_not_compared_is_none():
    gaps, batch = TokenGaps(main=True), rollouts(tool_mask=torch.tensor([[1, 0, 1]] * 4))
    batch["sampling_per_token_logps"][0, 2] = math.nan  # the engine gave no number
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] - 0.25
    batch["old_per_token_logps"][1] = 0.0  # a zero-advantage sample that nothing was computed for
    gaps.begin(batch, generations=4)
    found = gaps.rows(Letters())
    assert found[0]["gaps"] == [-0.25, None, None]
    assert found[2]["gaps"] == [-0.25]
    assert found.keys() == {0, 2, 3}


def test_nothing_is_kept_without_log_probs_of_an_engine_or_on_another_process():
    for gaps, batch in (
        (TokenGaps(main=True), {name: v for name, v in rollouts().items() if not name.startswith("sampling")}),
        (TokenGaps(main=False), rollouts()),
    ):
        names = batch.keys() | ({SHOWN} if "sampling_per_token_logps" in batch else set())
        gaps.begin(batch, generations=2)
        # The same columns on every process, or a checkpoint's rollouts could not be divided among others.
        assert batch.keys() == names
        assert not batch.get(SHOWN, torch.zeros(1)).any()
        gaps.add(batch.get(SHOWN), torch.zeros(4, 3), torch.ones(4, 3), torch.ones(4, 3))
        assert gaps.rows(Letters()) == {}
