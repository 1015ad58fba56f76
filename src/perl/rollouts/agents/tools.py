"""Tools and environments by name: imported, and refused where a conversation could not use them.

``module:function``, ``file.py:Class`` -> functions, classes; an environment -> its tools
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from perl.errors import Mistake, RecipeError, did_you_mean
from perl.run.code import module_of_file
from perl.run.workers.worker import placed_line

Tool = Callable[..., Any]
_WITHOUT_NAMES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
NOT_TOOLS = ("reset", "get_reward")
"""Public methods of an environment that the policy does not call."""


def find(path: str, where: str) -> Any:  # noqa: ANN401 (a class or a function)
    """What ``module:Name`` or ``file.py:Name`` names; the current folder counts, as for ``python -m``.

    Args:
        path: As somebody wrote it.
        where: What in.

    Raises:
        PerlError: It cannot be imported, or has nothing of that name.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not name:
        raise RecipeError(f"{path!r} names no class or function", where, "module:Name or file.py:Name")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    of_file = module_name.endswith(".py")
    importable = module_of_file(module_name, where, "file.py:Name beside the recipe") if of_file else module_name
    try:
        module = importlib.import_module(importable)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        hint = "modules are looked up in the current folder and beside the recipe too"
        raise RecipeError(f"cannot import {module_name}: {placed_line(error)}", where, hint) from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        what = "has no" if found is None else "has no function or class"
        raise RecipeError(f"{module_name} {what} {name!r}", where, did_you_mean(name, known))
    return found


def methods_of(kind: type) -> list[str]:
    """The names of an environment's methods that are its tools, in TRL's order."""
    functions = (name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction))
    return [name for name in functions if name not in NOT_TOOLS and not name.startswith("_")]


def tools_of(environment: object) -> list[Tool]:
    """An environment's tools, bound to it; of a class, to be shown and not to be called."""
    if isinstance(environment, type):
        return [MethodType(getattr(environment, name), environment) for name in methods_of(environment)]
    return [getattr(environment, name) for name in methods_of(type(environment))]


def tool_mistakes(tools: Sequence[Tool], where: str) -> Iterator[Mistake]:
    """What keeps tools from being shown to a model.

    Args:
        tools: Functions, or methods.
        where: What named them.
    """
    for number, tool in enumerate(tools):
        if not inspect.isroutine(tool):
            yield Mistake(f"{tool!r:.60} is no function", where, "a function, which may call it")
            continue
        name = getattr(tool, "__qualname__", repr(tool))
        if tool.__name__ in [getattr(one, "__name__", "") for one in tools[:number]]:
            yield Mistake(f"two tools are called {tool.__name__}", where, "another name for one of them")
        try:
            schema = get_json_schema(tool)
        except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
            what = " ".join(str(error).split())
            example = "a type for each argument, and a docstring with a line for each under Args:"
            yield Mistake(f"{name} cannot be shown to a model: {what}", where, example)
            continue
        if not schema["function"]["description"].strip():
            yield Mistake(f"{name} does not say what it does", where, "a docstring whose first line says it")
        without = [one.name for one in inspect.signature(tool).parameters.values() if one.kind in _WITHOUT_NAMES]
        if without:
            what = f"{name} takes {', '.join(without)} without a name, and a call names its arguments"
            yield Mistake(what, where, "arguments with names, a list among them")
        if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
            yield Mistake(f"{name} yields, and a call has one answer", where, "return it")


def environment_mistakes(kind: Any, where: str, *, alone: bool) -> Iterator[Mistake]:  # noqa: ANN401 (what is named)
    """What keeps a class from being an environment.

    Args:
        kind: The class, or a function that makes one.
        where: What named it.
        alone: Whether there are no other tools.
    """
    if not inspect.isclass(kind):
        yield Mistake(f"{getattr(kind, '__name__', kind)} is no class", where, "a class; functions are agent.tools")
        return
    if why := _why_not(kind):
        yield Mistake(f"{kind.__name__} cannot be made: {why}", where, "an __init__ without arguments")
    if not inspect.isfunction(getattr(kind, "reset", None)):
        what = f"{kind.__name__} has no method reset, which begins a conversation"
        yield Mistake(what, where, "def reset(self, **row), which returns None, or text for the end of the question")
    own = getattr(kind, "get_reward", None)
    if inspect.isfunction(own) and (why := _why_not(own, None)):
        yield Mistake(f"{kind.__name__}.get_reward cannot be called: {why}", where, "def get_reward(self)")
    if alone and not methods_of(kind):
        yield Mistake(f"{kind.__name__} has no public method, hence no tool", where, "def look_up(self, name: str)")
    yield from tool_mistakes(tools_of(kind), where)


def reset_mistake(kind: type, row: Mapping[str, Any], where: str) -> Mistake | None:
    """Why an environment's ``reset`` cannot be called with a row of the data; None: it can."""
    why = _why_not(kind.reset, None, **row)  # type: ignore[attr-defined]
    hint = f"reset is called with each column: {', '.join(row)}; **row takes those that are left"
    return Mistake(f"{kind.__name__}.reset cannot be called with the data: {why}", where, hint) if why else None


def _why_not(function: Callable[..., Any], /, *given: object, **named: object) -> str:
    """Why a function cannot be called with these arguments; empty: it can, or it is in C and nobody knows."""
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""
