"""What a recipe's rewards give to texts that are right, wrong and empty, before a model is loaded.

Recipe, problems -> means by kind of text, and what is wrong with each reward

Custom rewards are called in a worker process, so that one that hangs is stopped and none keeps what it counted here.
"""

import asyncio
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset

from perl.data import OF_TRL, ProblemSet
from perl.errors import Mistake, PerlError, RecipeError, raise_all, warn
from perl.recipe import Recipe
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import RewardSetting
from perl.rewards import Reward, resolve_rewards
from perl.rewards.answers import gold_answer
from perl.rewards.custom import Failures, row_of, unsendable
from perl.rewards.named import MADE_REWARDS
from perl.rewards.resolve import GOLD, by_own_names
from perl.rewards.workers.pool import WorkerPool

ROWS = 16
"""Problems that are tried, evenly spaced."""
RIGHT = ("boxed", "sentence", "tagged")
"""Kinds of texts that hold the gold answer; a reward may ask for one form and give nothing to the others."""
# A worker's time for a text, where the recipe sets none: in training the function may take as long as it likes.
_TIMEOUT_SECONDS = 60.0
_OF_A_GPU = re.compile(r"cuda|nvidia|gpu|accelerator", re.IGNORECASE)


@dataclass(frozen=True)
class RewardTrial:
    """What became of one reward.

    Attributes:
        means: By kind of text: ``boxed``, ``sentence``, ``tagged`` (right), ``wrong``, ``empty``; ``text`` where there
            are no gold answers. Empty if it was skipped or always failed.
        skipped: Why it was not called.
        problem: What is wrong with it.
        useless: Whether no text got a number, by a failure that training would meet too: there nothing limits the time
            of a call, and a GPU may be at hand, which a worker lacks.
    """

    name: str
    means: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    problem: str = ""
    useless: bool = False

    def line(self) -> str:
        """For a person to read."""
        means = ", ".join(f"{kind} {mean:.3g}" for kind, mean in self.means.items())
        return f"reward {self.name}: {'; '.join(filter(None, (means, self.problem, self.skipped)))}"


def try_rewards(recipe: Recipe, problems: ProblemSet) -> list[RewardTrial]:
    """Calls each reward on texts for some training problems; what is wrong with their sum is that of the last trial.

    Args:
        recipe: Names the rewards.
        problems: With ``solution``, where they have gold answers.
    """
    count = len(problems.train)
    rows = problems.train.select(range(0, count, -(-count // ROWS)))
    rewards = resolve_rewards(recipe.rewards, recipe.rollout, problems.own_names)
    trials = [_tried(reward, recipe.rewards[reward.name], rows, problems.own_names) for reward in rewards]
    problem = _problem_of_sum(rewards, trials)
    return [*trials[:-1], replace(trials[-1], problem=problem)] if problem else trials


def check_rewards_work(recipe: Recipe, problems: ProblemSet) -> None:
    """Refuses custom rewards that give no text a number, and warns of those that cannot tell right from wrong.

    Rewards of weight 0 are not tried.

    Raises:
        RecipeError: With a line for each that always fails.
    """
    counted = {name: setting for name, setting in recipe.rewards.items() if setting.weight}
    if all(":" not in name for name in counted):
        return
    trials = try_rewards(replace(recipe, rewards=counted), problems)
    failed = [
        Mistake(one.problem, f"rewards.{one.name}", "`perl reward check` tries it") for one in trials if one.useless
    ]
    raise_all(RecipeError, failed)
    for one in trials:
        if one.problem:
            warn("PRL348", "reward %s", f"{one.name} {one.problem}")


def _tried(reward: Reward, setting: RewardSetting, rows: Dataset, own_names: Mapping[str, str]) -> RewardTrial:
    columns = rows[:]
    prompts = columns.pop("prompt")
    own = {} if reward.failures is None else by_own_names(columns, own_names)
    missing = [name for name in reward.needs if name not in {**columns, **own, "prompts": (), "completions": ()}]
    refused = [name for name in missing if name not in OF_TRL]
    if refused or not reward.takes_all:
        column = f"needs {', '.join(refused)}, which the data does not have"
        return RewardTrial(reward.name, problem=column if refused else "must accept **kwargs", useless=True)
    skipped = _why_skipped(reward, missing, columns)
    if skipped:
        return RewardTrial(reward.name, skipped=f"not tried, {skipped}")
    texts = _texts(columns.get(GOLD), len(prompts))
    given = {**columns, "prompts": prompts}
    try:
        if reward.failures is None:
            called = {kind: _Called(_values(reward, _of(given, one))) for kind, one in texts.items()}
        else:
            arguments = {kind: _of(given, one) for kind, one in texts.items()}
            called = _in_a_worker(reward.name, setting, own_names, arguments)
    except (PerlError, ValueError, TypeError) as error:  # a column of the data that holds something else
        return RewardTrial(reward.name, problem=f"failed: {error}", useless=True)
    return _judged(reward, called)


def _why_skipped(reward: Reward, missing: Sequence[str], columns: Mapping[str, Any]) -> str:
    """Why a reward can be called in training only."""
    if reward.name in MADE_REWARDS:
        return "it loads a model"
    if missing:
        return f"it needs {', '.join(missing)}"
    row = {name: values[0] for name, values in columns.items()}
    return "" if reward.failures is None else unsendable(row) or ""


def _texts(golds: Sequence[str] | None, count: int) -> dict[str, list[str]]:
    """Texts of each kind for each problem; wrong ones have the answer of another problem."""
    if golds is None:
        return {"text": ["The answer is \\boxed{42}."] * count, "empty": [""] * count}
    answers = [gold_answer(gold) for gold in golds]
    others = [
        next((other for other in (*answers[i:], *answers) if other != one), f"{one}1") for i, one in enumerate(answers)
    ]
    return {
        "boxed": [f"\\boxed{{{one}}}" for one in answers],
        "sentence": [f"Let me think step by step.\n\nThe answer is {one}" for one in answers],
        "tagged": [f"<think>\nLet me think step by step.\n</think>\n<answer>{one}</answer>" for one in answers],
        "wrong": [f"Let me think step by step.\n\nThe answer is \\boxed{{{one}}}." for one in others],
        "empty": [""] * count,
    }


def _of(given: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call with texts of one kind, as messages where the prompts are some."""
    plain = isinstance(given["prompts"][0], str)
    completions = [text if plain else [{"role": "assistant", "content": text}] for text in texts]
    return {**given, "completions": completions}


def _values(reward: Reward, arguments: Mapping[str, Any]) -> list[float | None]:
    values = reward.function(**arguments)

    async def awaited() -> Any:  # noqa: ANN401 (what a reward returns)
        return await values

    return list(asyncio.run(awaited()) if inspect.isawaitable(values) else values)


def _in_a_worker(
    name: str, setting: RewardSetting, own_names: Mapping[str, str], arguments: Mapping[str, Mapping[str, Any]]
) -> dict[str, "_Called"]:
    """Calls a custom reward with one text, and unless that took too long with those of each kind."""
    alone = {**setting.model_dump(), "workers": None, "timeout_seconds": None}
    limit = setting.timeout_seconds or _TIMEOUT_SECONDS
    pool = WorkerPool(
        f"{__name__}:{call_in_worker.__name__}", workers=1, timeout_seconds=limit, imports=[name.partition(":")[0]]
    )
    found: dict[str, _Called] = {}
    try:
        for kind, every in (("one text", _alone(next(iter(arguments.values())))[0]), *arguments.items()):
            [outcome] = pool.map([(name, alone, dict(own_names), every, setting.workers is not None)])
            count = len(every["completions"])
            if outcome.status == "done":
                found[kind] = _Called(*outcome.value)
            else:
                found[kind] = _Called([None] * count, count, f"{outcome.status}: {outcome.error}")
                break
    finally:
        pool.close()
    return {kind: called for kind, called in found.items() if kind != "one text"} or found


def call_in_worker(item: tuple[str, dict[str, Any], dict[str, str], dict[str, Any], bool]) -> list[Any]:
    """A custom reward's values, how many texts it failed on, and the newest failure; what the worker runs.

    Args:
        item: The reward's name and settings, names of columns, arguments, and whether it is called for one at a time.
    """
    name, setting, own_names, arguments, singly = item
    [reward] = resolve_rewards({name: RewardSetting.model_validate(setting)}, RolloutSection(), own_names)
    failures = reward.failures or Failures(name, 0)
    failures.lines = 0
    calls = _alone(arguments) if singly else [arguments]
    values = [value for call in calls for value in _values(reward, call)]
    return [values, failures.count, failures.newest.removeprefix(f"reward {failures.name}: ")]


def _alone(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a call with each text alone."""
    rows = len(arguments["completions"])
    return [row_of(arguments, row, rows) for row in range(rows)]


@dataclass(frozen=True)
class _Called:
    """What a reward gave to some texts, how many it failed on, and how."""

    values: list[float | None]
    failed: int = 0
    newest: str = ""


def _judged(reward: Reward, called: Mapping[str, _Called]) -> RewardTrial:
    numbers = {kind: [v for v in one.values if v is not None and not math.isnan(v)] for kind, one in called.items()}
    means = {kind: math.fsum(one) / len(one) for kind, one in numbers.items() if one}
    every, count = [v for one in numbers.values() for v in one], sum(len(one.values) for one in called.values())
    failed = sum(one.failed for one in called.values())
    newest = next((one.newest for one in called.values() if one.newest), "")
    problem = ""
    if not every:
        problem = f"failed for all texts that it was tried on: {newest}" if failed else "gives None to all texts"
    elif failed:
        problem = f"failed for {failed} of {count} texts: {newest}"
    elif reward.failures is not None and reward.weight and len(every) == count and _all_alike(called):
        problem = f"gives {every[0]:g} to all {count} texts, right, wrong and empty ones"
    useless = not every and bool(failed) and not newest.startswith("timeout") and not _OF_A_GPU.search(newest)
    return RewardTrial(reward.name, means, problem=problem, useless=useless)


def _all_alike(called: Mapping[str, _Called]) -> bool:
    """Whether right texts, wrong ones and empty ones all got the same."""
    return "wrong" in called and len({value for one in called.values() for value in one.values}) == 1


def _problem_of_sum(rewards: Sequence[Reward], trials: Sequence[RewardTrial]) -> str:
    """Whether the weighted sum of the rewards does not favour right answers; named rewards alone are not doubted."""
    used = [(reward.weight, trial) for reward, trial in zip(rewards, trials, strict=True) if reward.weight]
    judged = all("wrong" in trial.means and not trial.problem for _, trial in used)
    if not judged or all(reward.failures is None for reward in rewards) or not used:
        return ""
    kinds = [kind for kind in ("wrong", "empty") if any(kind in trial.means for _, trial in used)]
    sums = {kind: sum(weight * trial.means.get(kind, 0.0) for weight, trial in used) for kind in (*RIGHT, *kinds)}
    best, other = max(sums[kind] for kind in RIGHT), max(kinds, key=sums.__getitem__)
    if best > sums[other]:
        return ""
    return f"the sum of the rewards is {best:.3g} for right answers at best, and {sums[other]:.3g} for {other} ones"
