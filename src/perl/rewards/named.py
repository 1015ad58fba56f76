"""The rewards that have a name in a recipe, and those that are refused by name.

name -> function, or why it is refused
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from perl.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from perl.rewards.countdown import countdown_reward
from perl.rewards.lengths import cosine_length_reward, length_penalty_reward, soft_overlong_reward
from perl.rewards.partial import partial_answer_reward
from perl.rewards.process.reward import process_reward
from perl.rewards.shaping import format_reward, repetition_penalty_reward, tag_count_reward

# Functions with TRL's signature; what a recipe may set are their keyword-only arguments, all others are columns.
NAMED_REWARDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "accuracy": accuracy_reward,
        "reasoning_accuracy": reasoning_accuracy_reward,
        "format": format_reward,
        "tag_count": tag_count_reward,
        "length_penalty": length_penalty_reward,
        "cosine_length": cosine_length_reward,
        "soft_overlong": soft_overlong_reward,
        "repetition_penalty": repetition_penalty_reward,
        "countdown": countdown_reward,
        "partial_answer": partial_answer_reward,
    }
)

# Lowest and highest score of each; a word is the argument that says it.
SCORES: Mapping[str, tuple[float | str, float | str]] = MappingProxyType(
    {
        "accuracy": (0.0, 1.0),
        "reasoning_accuracy": (0.0, 1.0),
        "format": (0.0, 1.0),
        "tag_count": (0.0, 1.0),
        "length_penalty": (-0.5, 0.5),
        "cosine_length": ("min_value_wrong", "max_value_correct"),
        "soft_overlong": (-1.0, 0.0),
        "repetition_penalty": ("max_penalty", 0.0),
        "countdown": (0.0, 1.0),
        "partial_answer": (0.0, 1.0),
    }
)

# Made from a recipe's arguments, since they hold a model.
MADE_REWARDS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType({"process_reward": process_reward})

REFUSED_REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "code": "running generated programs needs a sandbox, which this package is not; call yours (a container, E2B, "
        "SandboxFusion) from a custom reward, package.module:function with workers: N",
    }
)

# Those that judge answers: their gold answers are checked before training, their verifier starts with the run.
JUDGES = (accuracy_reward, reasoning_accuracy_reward, length_penalty_reward, cosine_length_reward)

# Arguments that are the longest completion of the run unless a recipe sets them.
LENGTH_ARGUMENTS = ("max_len", "max_completion_len")
