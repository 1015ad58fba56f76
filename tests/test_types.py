"""Records refuse what does not belong together, and cannot be changed."""

import dataclasses

import pytest

from perl import types
from perl.types import Completion, Group, Prompt

PROMPT = Prompt("1+1=", (6, 78, 6, 96), "2")
COMPLETION = Completion((7, 1), "2", truncated=False)


@pytest.mark.parametrize("rewards", [(), (1.0,), (1.0, 0.0, 1.0)])
def test_a_group_has_a_reward_for_each_completion(rewards):
    with pytest.raises(ValueError, match=f"2 completions but {len(rewards)} rewards"):
        Group(PROMPT, (COMPLETION, COMPLETION), rewards)
    assert Group(PROMPT, (COMPLETION, COMPLETION), (1.0, 0.0)).rewards == (1.0, 0.0)


def test_records_are_frozen():
    records = [r for r in vars(types).values() if dataclasses.is_dataclass(r)]
    assert len(records) == 5
    assert all(record.__dataclass_params__.frozen for record in records)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROMPT.solution = "3"
