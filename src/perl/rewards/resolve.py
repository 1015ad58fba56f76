"""From the ``rewards`` section to functions and weights.

name or package.module:function, weight, arguments -> Reward

Imports the user's module, never evaluates text.
"""

import functools
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from perl.errors import Mistake, RecipeError, did_you_mean
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import RewardSetting
from perl.rewards.custom import NOT_FOR_WORKERS, Failures, guarded, in_workers
from perl.rewards.named import JUDGES, LENGTH_ARGUMENTS, MADE_REWARDS, NAMED_REWARDS, REFUSED_REWARDS, sign_mistakes
from perl.rewards.process.reward import check_process_reward
from perl.rewards.verifier import Judging

# TRL's signature: completions, prompts and columns by name -> one number (or None) a completion; may be a coroutine.
RewardFunction = Callable[..., Any]

# Of a custom reward, where the recipe does not set them.
_MAX_FAILURES = 16
_TIMEOUT_SECONDS = 10.0

GOLD = "solution"
"""Where the gold answer is stored."""
T = TypeVar("T")
_Located = tuple[tuple[str, ...], Mistake]


@dataclass(frozen=True)
class Reward:
    """A reward function, its share of the sum, and the name it is logged under.

    Attributes:
        needs: Columns of the data set that the function insists on.
        by_name: Arguments that get the column of the same name, if it exists.
        takes_all: Whether it accepts whatever other columns there are.
        judging: How it compares answers with gold answers; None if it compares none.
        in_workers: Whether each sample is sent to a worker process by itself.
        failures: Of a custom reward; None for a named one.
    """

    name: str
    function: RewardFunction
    weight: float
    needs: tuple[str, ...] = ()
    takes_all: bool = True
    judging: Judging | None = None
    in_workers: bool = False
    failures: Failures | None = None
    by_name: tuple[str, ...] = ()


def resolve_rewards(
    settings: Mapping[str, RewardSetting], rollout: RolloutSection, own_names: Mapping[str, str] = MappingProxyType({})
) -> list[Reward]:
    """The functions behind a recipe's rewards, in the recipe's order.

    Named rewards get the gold answer as ``solution``. Custom ones get each column of the data set under its own name,
    the gold answer as ``answer`` and, where the data set has no column of that name, as ``solution``.

    Args:
        settings: The recipe's ``rewards``.
        rollout: Has the longest completion, where a reward's argument is that.
        own_names: Name of a column in the data set -> where it is stored, as in :class:`perl.data.ProblemSet`.

    Raises:
        RecipeError: A name is unknown, a module cannot be imported, or an argument does not exist.
    """
    rewards = []
    short_names = Counter(_function_name(name) for name in settings)
    for name, setting in settings.items():
        found = _find(name)
        if isinstance(found, Mistake):
            raise RecipeError(found.message, f"rewards.{name}", found.hint)
        short = _function_name(name)
        log_name = short if short_names[short] == 1 else name
        rewards.append(_reward(name, found, setting, rollout, log_name, own_names))
    return rewards


def judging_of(rewards: list[Reward]) -> Judging | None:
    """How the first reward that judges answers does it."""
    return next((reward.judging for reward in rewards if reward.judging is not None), None)


def reward_mistakes(sections: Mapping[str, Any]) -> list[_Located]:
    """What is wrong with a recipe's ``rewards`` section, by key path."""
    mistakes: list[_Located] = []
    for name, setting in sections.get("rewards", {}).items():
        found = _find(name)
        if isinstance(found, Mistake):
            mistakes.append((("rewards", name), found))
        elif name in MADE_REWARDS:
            mistakes += _only_for_custom(name, setting, [])
            if setting.columns:
                mistakes.append(
                    (("rewards", name, "columns"), Mistake(f"{name} takes no columns", hint="leave it out"))
                )
            for mistake in check_process_reward(setting.args):
                argument = (mistake.where,) if mistake.where in setting.args else ()
                message = mistake.message if argument else f"{mistake.where} {mistake.message}"
                mistakes.append((("rewards", name, "args", *argument), Mistake(message, hint=mistake.hint)))
        else:
            mistakes += _mistakes_of(name, found, setting, sections.get("rollout", RolloutSection()))
    return mistakes + sign_mistakes(sections)


def _mistakes_of(
    name: str, function: Callable[..., Any], setting: RewardSetting, rollout: RolloutSection
) -> Iterator[_Located]:
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    settable = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] if name in NAMED_REWARDS else known
    wrong = [argument for argument in setting.args if argument not in settable]
    for argument in wrong:
        hint = did_you_mean(argument, settable)
        if argument in known:
            hint = f"it is a column; another one: columns: {{{argument}: NAME}}"
        yield ("rewards", name, "args", argument), Mistake(f"{name} has no argument {argument!r}", hint=hint)
    for argument in setting.columns:
        if argument not in known or argument in setting.args:
            mistake = Mistake(f"{name} takes no column {argument!r}", hint=did_you_mean(argument, known))
            yield ("rewards", name, "columns", argument), mistake
    insists = [p.name for p in parameters if p.default is p.empty and p.name in NOT_FOR_WORKERS]
    if setting.workers is not None and insists:
        hint = "give it a default, or leave workers out"
        yield ("rewards", name, "workers"), Mistake(f"a worker has no {', '.join(insists)} for {name}", hint=hint)
    if name in NAMED_REWARDS:
        yield from _mistakes_of_named(name, setting, settable, valid=not wrong, rollout=rollout)


def _mistakes_of_named(
    name: str, setting: RewardSetting, settable: list[str], *, valid: bool, rollout: RolloutSection
) -> Iterator[_Located]:
    """Arguments that are missing or impossible: the function is called without completions to find out."""
    yield from _only_for_custom(name, setting, settable)
    function = NAMED_REWARDS[name]
    arguments = _arguments(function, setting, rollout)
    parameters = inspect.signature(function).parameters.values()
    missing = [
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in arguments
    ]
    for argument in missing:
        yield ("rewards", name), Mistake(f"{name} needs the argument {argument}", hint=f"args: {{{argument}: ...}}")
    if missing or not valid:
        return
    columns = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    try:
        function(**{column: [] for column in columns}, **arguments)
    except (ValueError, TypeError) as error:
        yield ("rewards", name, "args"), Mistake(f"{name}: {error}")


def _only_for_custom(name: str, setting: RewardSetting, settable: list[str]) -> Iterator[_Located]:
    for key in ("workers", "timeout_seconds", "max_failures"):
        if getattr(setting, key) is not None:
            hint = f"args: {{{key}: ...}}" if key in settable else "leave it out"
            yield ("rewards", name, key), Mistake("is for custom rewards", hint=hint)


def _reward(
    name: str,
    function: Callable[..., Any],
    setting: RewardSetting,
    rollout: RolloutSection,
    log_name: str,
    own_names: Mapping[str, str],
) -> Reward:
    """The reward with its arguments bound, under the name that TRL will log."""
    if name in MADE_REWARDS:
        return Reward(name, MADE_REWARDS[name](**setting.args), setting.weight)
    arguments = _arguments(function, setting, rollout)
    parameters = inspect.signature(function).parameters.values()
    needs = [
        setting.columns.get(p.name, p.name)
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments
    ]
    bind, failures = _binding(arguments, setting.columns, own_names), None
    if name in NAMED_REWARDS:
        bound = _bound(function, _binding(arguments, setting.columns))
    else:
        failures = Failures(log_name, _MAX_FAILURES if setting.max_failures is None else setting.max_failures)
        if setting.workers is None:
            bound = guarded(function, failures, bind)
        else:
            limit = setting.timeout_seconds or _TIMEOUT_SECONDS
            worked = in_workers(name, arguments, failures, workers=setting.workers, timeout_seconds=limit)
            bound = _bound(worked, _binding({}, setting.columns, own_names))
    bound.__name__ = log_name
    judges = function in JUDGES
    limits = {name: arguments[name] for name in ("timeout_seconds", "workers") if name in arguments}
    return Reward(
        name,
        bound,
        setting.weight,
        needs=tuple(dict.fromkeys([*needs, *setting.columns.values()])),
        by_name=tuple(p.name for p in parameters if p.name not in arguments and p.name not in setting.columns),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        judging=Judging(solution=setting.columns.get("solution", "solution"), **limits) if judges else None,
        in_workers=setting.workers is not None,
        failures=failures,
    )


def _arguments(function: Callable[..., Any], setting: RewardSetting, rollout: RolloutSection) -> dict[str, Any]:
    """The recipe's arguments, and the longest completion where a function needs it and the recipe does not set it."""
    parameters = inspect.signature(function).parameters
    lengths = {
        name: rollout.max_completion_length
        for name in LENGTH_ARGUMENTS
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    }
    return {**(lengths if function in NAMED_REWARDS.values() else {}), **setting.args}


def _find(name: str) -> Callable[..., Any] | Mistake:
    if name in NAMED_REWARDS or name in MADE_REWARDS:
        return {**NAMED_REWARDS, **MADE_REWARDS}[name]
    if name in REFUSED_REWARDS:
        return Mistake(f"no reward {name!r}", hint=REFUSED_REWARDS[name])
    module_name, colon, function_name = name.partition(":")
    if not colon:
        hint = did_you_mean(name, [*NAMED_REWARDS, *MADE_REWARDS])
        custom = "a custom reward is package.module:function"
        return Mistake(
            f"no reward {name!r}", hint=f"{hint} {custom.capitalize()}" if hint.endswith("?") else f"{hint}; {custom}"
        )
    try:
        # As `python -m` would: the current folder counts, which a console script leaves out.
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's module may raise anything)
        hint = "modules are looked up in the current folder and beside the recipe too"
        return Mistake(f"cannot import {module_name}: {error}", hint=hint)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        return Mistake(f"{module_name} has no function {function_name!r}", hint=did_you_mean(function_name, functions))
    try:
        inspect.signature(function)
    except (ValueError, TypeError):
        return Mistake(f"{name} has no signature to call it by", hint="wrap it in a function with TRL's signature")
    return function


def _function_name(name: str) -> str:
    return name.rpartition(":")[2]


def _binding(
    arguments: Mapping[str, Any], columns: Mapping[str, str], own_names: Mapping[str, str] | None = None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """TRL's arguments -> the function's: columns under the names that it knows, and what the recipe sets.

    With ``own_names`` columns of the data set have theirs; what the recipe maps is named as it is stored.
    """

    def bind(given: Mapping[str, Any]) -> dict[str, Any]:
        renamed = {argument: given[column] for argument, column in columns.items() if column in given}
        return {**given, **({} if own_names is None else by_own_names(given, own_names)), **renamed, **arguments}

    return bind


def by_own_names(given: Mapping[str, T], own_names: Mapping[str, str]) -> dict[str, T]:
    """What a custom reward gets beside what is stored: columns under their own names, the gold answer as ``answer``.

    Args:
        given: By the names that are stored.
        own_names: Name in the data set -> where it is stored.
    """
    found = {name: given[stored] for name, stored in own_names.items() if stored in given}
    if GOLD in given and "answer" not in given:
        found["answer"] = given[GOLD]
    return found


def _bound(function: Callable[..., Any], bind: Callable[[Mapping[str, Any]], dict[str, Any]]) -> RewardFunction:
    @functools.wraps(function)
    def reward(*args: Any, **given: Any) -> Any:  # noqa: ANN401
        return function(*args, **bind(given))

    return reward
