"""Fixed rollouts: prompts and completions of random tokens, with rewards that a trainer is told.

kinds of groups -> groups by prompt -> a function that deals them out
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch

PAD, EOS, VOCABULARY = 0, 1, 64
# Of six rewards of 0.9 the single-precision mean is another number; of four it is not.
GENERATIONS = 6
LONGEST = 24

# The kinds of groups in each step. live: rewards that differ; dyadic, tenths: 1 or 0.9 for all; half: a third of the
# rewards is the group's mean; cut: no completion has ended.
Kinds = tuple[tuple[str, ...], ...]
MIXED: Kinds = (
    ("live", "dyadic", "half", "tenths"),
    ("cut", "tenths", "live", "dyadic"),
    ("live", "half", "dyadic", "cut"),
)
ROWS = GENERATIONS * len(MIXED[0])


@dataclass(frozen=True)
class Group:
    """A prompt's tokens, its completions, their rewards and the log-probabilities that they were sampled with."""

    prompt_ids: list[int]
    completion_ids: list[list[int]]
    rewards: list[float]
    log_probs: list[list[float]]

    @property
    def tool_mask(self) -> list[list[int]]:
        """In every second completion every third token is a tool's, never the first one."""
        return [[int(i % 2 == 0 or t % 3 != 1) for t in range(len(ids))] for i, ids in enumerate(self.completion_ids)]


@cache
def group(kind: str, number: int) -> Group:
    """Random tokens; completion lengths about lognormal, one of them always a single token."""
    generator = torch.Generator().manual_seed(1000 + number)

    def tokens(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    prompt = tokens(int(torch.randint(2, 12, (1,), generator=generator)))
    prompt = [*range(20, 40), *prompt] if kind == "begun" else prompt  # as examples before every question
    lengths = (1.7 + 0.8 * torch.randn(GENERATIONS, generator=generator)).exp().clamp(1, LONGEST).int().tolist()
    lengths[number % GENERATIONS] = 1
    if kind == "cut":
        completions = [tokens(LONGEST - i % 2) for i in range(GENERATIONS)]
    else:
        completions = [[*tokens(length - 1), EOS] for length in lengths]
    rewards = {
        "dyadic": [1.0] * GENERATIONS,
        "tenths": [0.9] * GENERATIONS,
        "half": [0.0, 0.5, 1.0, 0.5, 1.0, 0.0],
    }.get(kind) or torch.rand(GENERATIONS, generator=generator).tolist()
    # As from an engine that rounds differently; for every second completion as from another policy.
    means = (-4.2, -1.0) * (GENERATIONS // 2)
    log_probs = [
        [mean + 0.3 * math.sin(t) for t in range(len(ids))] for mean, ids in zip(means, completions, strict=True)
    ]
    return Group(prompt, completions, rewards, log_probs)


def rollout_table(kinds: Kinds) -> dict[str, Group]:
    """Groups by prompt, all different, each in the words of its tokens."""
    groups = [group(kind, i) for i, kind in enumerate(kind for step in kinds for kind in step)]
    found = {" ".join(f"t{token}" for token in one.prompt_ids): one for one in groups}
    assert len(found) == len(groups)
    return found


def rollout_function(table: dict[str, Group], *, log_probs: bool, tools: bool):
    """Deals out the table's completions, with their rewards as a column of the data."""

    def rollout(prompts, trainer):  # noqa: ARG001 (TRL's signature)
        rows = [(table[prompt], dealt) for prompt, dealt in zip(prompts, _occurrences(prompts), strict=True)]
        output = {
            "prompt_ids": [found.prompt_ids for found, _ in rows],
            "completion_ids": [found.completion_ids[i] for found, i in rows],
            "preset": [found.rewards[i] for found, i in rows],
            "logprobs": [found.log_probs[i] for found, i in rows] if log_probs else None,
        }
        if tools:
            output["env_mask"] = [found.tool_mask[i] for found, i in rows]
        return output

    return rollout


def _occurrences(prompts: list[str]) -> list[int]:
    """How often each prompt has come before."""
    seen: Counter[str] = Counter()
    before = []
    for prompt in prompts:
        before.append(seen[prompt])
        seen[prompt] += 1
    return before


def preset_reward(completions, preset, **_):  # noqa: ARG001 (TRL's signature)
    """The reward that came with the rollout."""
    return list(preset)
