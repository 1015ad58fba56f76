"""A recipe's rewards for a trainer that asks for one completion at a time, as verl does.

folder with rewards.json -> (completion, gold answer, columns) -> score and parts

It is called from many threads, whose own signal timers would not work: answers are judged in worker processes, as in
this package's trainer, and verdicts are the same.
"""

import asyncio
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perl.errors import RewardError
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import RewardSetting
from perl.rewards.custom import is_async
from perl.rewards.resolve import resolve_rewards

SETTINGS = "rewards.json"
PART, UNJUDGED = "reward/", "unjudged"
"""Before the name of each reward in what is scored: a reward may be called as the other trainer's own numbers are."""
BY_VERL = "soft_overlong"
"""A reward that the other trainer adds itself: it knows the length in tokens."""
Score = dict[str, float]


def settings_text(rewards: Mapping[str, RewardSetting], longest: int, own_names: Mapping[str, str]) -> str:
    """The text of :data:`SETTINGS`.

    Args:
        rewards: Of the recipe.
        longest: Tokens of a completion at most.
        own_names: Name in the data set -> where it is stored, of the columns that custom rewards get by it.
    """
    values = {
        "rewards": {name: setting.model_dump() for name, setting in rewards.items()},
        "max_completion_length": longest,
        "own_names": dict(own_names),
    }
    return json.dumps(values, indent=2) + "\n"


def scorer(folder: Path) -> Callable[[str, str, Mapping[str, Any]], Score]:
    """The rewards whose settings a folder holds.

    Args:
        folder: With :data:`SETTINGS`.

    Returns:
        A function of completion, gold answer and ``extra_info``, whose ``columns`` are the row's as JSON, and ``plain``
        whether its prompt is text. It gives the weighted sum as ``score``, each reward as ``reward/NAME``, and how many
        could not judge it as ``unjudged``: those count 0. It raises RewardError once a custom reward failed more often
        than its ``max_failures``.

    Raises:
        RecipeError: A reward is unknown here, or its module cannot be imported.
    """
    values = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    settings = {name: RewardSetting.model_validate(setting) for name, setting in values["rewards"].items()}
    rollout = RolloutSection(max_completion_length=values["max_completion_length"])
    here = os.getcwd()
    if here not in sys.path:  # or it would come in front of the modules that the job carries
        sys.path.append(here)
    rewards = [one for one in resolve_rewards(settings, rollout, values["own_names"]) if one.name != BY_VERL]

    def score(completion: str, gold: str, extra_info: Mapping[str, Any]) -> Score:
        # The arguments of a batch of one completion, as TRL hands them to a reward function.
        row: dict[str, Any] = json.loads(extra_info.get("columns") or "{}")
        asked = row.pop("prompt", None)
        written: Any = completion if extra_info.get("plain") else [{"role": "assistant", "content": completion}]
        row |= {"solution": gold} if gold else {}
        columns = {name: [value] for name, value in row.items()}
        arguments = {**columns, "prompts": [asked], "completions": [written]}
        found: dict[str, float | None] = {}
        for reward in rewards:
            values = reward.function(**arguments)
            if is_async(reward.function):
                with _starting:
                    loop = _started()
                values = asyncio.run_coroutine_threadsafe(values, loop).result()
            if reward.failures is not None and reward.failures.too_many:
                what = f"{reward.failures.count} samples failed: {reward.failures.newest}"
                raise RewardError(what, f"rewards.{reward.name}", "fix it, and go on")
            found[reward.function.__name__] = None if values[0] is None else float(values[0])
        weighted = zip(rewards, found.values(), strict=True)
        return {
            **{PART + name: value or 0.0 for name, value in found.items()},
            "score": float(sum(reward.weight * (value or 0.0) for reward, value in weighted)),
            UNJUDGED: float(sum(value is None for value in found.values())),
        }

    return score


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    """The one event loop of all threads: a client may be bound to the loop of its first use."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="perl-rewards", daemon=True).start()
    return loop


_starting = threading.Lock()
