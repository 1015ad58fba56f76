"""From the ``rewards`` section to functions and weights.

name or package.module:function, weight, arguments -> Reward

Knows nothing of models; imports the user's module, never evaluates text.
"""

import functools
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perl.errors import Problem, RecipeError, did_you_mean
from perl.recipe.sections import RewardSetting
from perl.rewards.builtin import accuracy_reward, format_reward

# TRL's signature: completions, prompts and columns by name -> one number (or None) a completion; may be a coroutine.
RewardFunction = Callable[..., Any]

NAMED_REWARDS: dict[str, Callable[..., Any]] = {"accuracy": accuracy_reward, "format": format_reward}


@dataclass(frozen=True)
class Reward:
    """A reward function, its share of the sum, and the name it is logged under."""

    name: str
    function: RewardFunction
    weight: float


def resolve_rewards(settings: Mapping[str, RewardSetting]) -> list[Reward]:
    """The functions behind a recipe's rewards, in the recipe's order.

    Raises:
        RecipeError: A name is unknown, a module cannot be imported, or an argument does not exist.
    """
    rewards = []
    short_names = Counter(_function_name(name) for name in settings)
    for name, setting in settings.items():
        found = _find(name)
        if isinstance(found, Problem):
            raise RecipeError(found.message, f"rewards.{name}", found.hint)
        short = _function_name(name)
        log_name = short if short_names[short] == 1 else name
        rewards.append(Reward(name, _named(found, log_name, setting.args), setting.weight))
    return rewards


def reward_problems(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Problem]]:
    """What is wrong with the names in a recipe's ``rewards`` section, by key path."""
    problems: list[tuple[tuple[str, ...], Problem]] = []
    for name, setting in sections.get("rewards", {}).items():
        found = _find(name)
        if isinstance(found, Problem):
            problems.append((("rewards", name), found))
            continue
        for argument in setting.args:
            known = [p.name for p in inspect.signature(found).parameters.values() if p.kind is not p.VAR_KEYWORD]
            if argument not in known:
                problem = Problem(f"{name} has no argument {argument!r}", hint=did_you_mean(argument, known))
                problems.append((("rewards", name, "args", argument), problem))
    return problems


def _find(name: str) -> Callable[..., Any] | Problem:
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        hint = did_you_mean(name, NAMED_REWARDS)
        return Problem(f"no reward {name!r}", hint=f"{hint} your own is package.module:function")
    try:
        module = _import_from_here(module_name)
    except Exception as error:  # noqa: BLE001 (the user's module may raise anything)
        return Problem(f"cannot import {module_name}: {error}", hint="modules are looked up in the current folder too")
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        return Problem(f"{module_name} has no function {function_name!r}", hint=did_you_mean(function_name, functions))
    return function


def _function_name(name: str) -> str:
    return name.rpartition(":")[2]


def _import_from_here(module_name: str) -> Any:  # noqa: ANN401 (a module)
    """Imports as ``python -m`` would: the current folder counts, which a console script leaves out."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(module_name)


def _named(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> RewardFunction:
    """The function with its arguments bound, under the name that TRL will log."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def reward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return await function(*args, **{**kwargs, **arguments})
    else:

        @functools.wraps(function)
        def reward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return function(*args, **{**kwargs, **arguments})

    reward.__name__ = name
    return reward
