"""Environments that cannot end a step: what their ``reset`` or ``get_reward`` raises voids one conversation.

class, seconds -> the same class, guarded; Agent: all that a conversation needs of a recipe's section

TRL makes and resets environments itself, and asks each for its tools and its reward; a guarded class is a subclass of
the user's under the same name, so that reward functions find what they expect.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perl.errors import Mistake, PerlError, RecipeError, raise_all
from perl.recipe.agent_section import AgentSection
from perl.rollouts.agents.calls import Caller, OutOfTimeError, is_running
from perl.rollouts.agents.isolated import STARTS, isolated
from perl.rollouts.agents.tools import (
    NOT_TOOLS,
    Tool,
    environment_mistakes,
    find,
    methods_of,
    reset_mistake,
    tool_mistakes,
    tools_of,
)
from perl.run.code import code_digest
from perl.run.workers.worker import placed_line

_GUARDED = "_perl_guarded"
VOID = "_perl_void"
"""Of a guarded environment: why its conversation does not count; empty: it does."""


def guarded(
    factory: Callable[[], Any], seconds: float, own_names: Mapping[str, str] = MappingProxyType({})
) -> Callable[[], Any]:
    """What makes environments whose faults are kept in :data:`VOID` instead of raised.

    Args:
        factory: The user's: a class, or a function that makes an instance; one that is guarded stays as it is.
        seconds: That a reset or a reward may take.
        own_names: As of :class:`Agent`.
    """
    if hasattr(factory, _GUARDED):
        return factory

    @functools.wraps(factory, updated=())
    def make() -> Any:  # noqa: ANN401 (the user's class)
        try:
            environment = factory()
        except PerlError:
            raise
        except (Exception, SystemExit) as error:  # the user's class may raise anything
            what = f"{getattr(factory, '__name__', factory)} cannot be made: {placed_line(error)}"
            raise RecipeError(what, "environment_factory", "an __init__ without arguments") from error
        kind = type(environment)
        if inspect.isfunction(getattr(kind, "reset", None)):  # else TRL refuses it
            try:
                names = tuple(own_names.items())
                environment.__class__ = _guarded_class(kind, seconds, names)  # type: ignore[arg-type]
            except TypeError as error:
                what = f"{kind.__name__} has __slots__, or is not written in Python: what fails in it cannot be kept"
                raise RecipeError(what, "environment_factory", "a plain class of Python") from error
        return environment

    setattr(make, _GUARDED, True)
    return make


@functools.cache
def _guarded_class(kind: type, seconds: float, own_names: tuple[tuple[str, str], ...]) -> type:
    caller = Caller(seconds)

    def reset(self: Any, **row: Any) -> Any:  # noqa: ANN401
        setattr(self, VOID, "")
        getattr(self, STARTS, lambda: None)()
        row |= _own(row, dict(own_names))
        found = _kept(self, "reset", lambda: kind.reset(self, **row), caller)  # type: ignore[attr-defined]
        if found is None or isinstance(found, str) or (isinstance(found, list) and found):
            return found
        setattr(self, VOID, f"{kind.__name__}.reset returned {found!r:.60}, which is neither None nor text")
        return None

    def get_reward(self: Any) -> float | None:  # noqa: ANN401
        if is_running():  # a tool asks for it
            own: float | None = kind.get_reward(self)  # type: ignore[attr-defined]
            return own
        if getattr(self, VOID, ""):
            return 0.0  # it does not count, and TRL would show the whole conversation for a None
        found = _kept(self, "get_reward", lambda: kind.get_reward(self), caller)  # type: ignore[attr-defined]
        if getattr(self, VOID, ""):
            return 0.0
        if found is None or (isinstance(found, int | float) and abs(found) <= sys.float_info.max):
            return None if found is None else float(found)
        setattr(self, VOID, f"{kind.__name__}.get_reward returned {found!r:.60}, which is no finite number")
        return 0.0

    members: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "reset": reset}
    if inspect.isfunction(getattr(kind, "get_reward", None)):
        members["get_reward"] = get_reward
    return type(kind.__name__, (kind,), members)


def _own(row: Mapping[str, Any], own_names: Mapping[str, str]) -> dict[str, Any]:
    """What a row's columns are called in the data, and the gold answer as ``answer``, beside what is stored."""
    names = {"answer": "solution", **own_names}
    return {name: row[stored] for name, stored in names.items() if stored in row and name not in row}


def _kept(environment: Any, method: str, call: Callable[[], Any], caller: Caller) -> Any:  # noqa: ANN401
    """What a method returns; None where it raised or overran, which is kept."""
    name = f"{type(environment).__name__}.{method}"
    try:
        return caller.within(call)
    except (PerlError, KeyboardInterrupt):
        raise
    except OutOfTimeError:
        setattr(environment, VOID, f"{name} did not answer within {caller.seconds:g} s")
    except BaseException as error:  # noqa: BLE001 (the user's method may raise anything)
        setattr(environment, VOID, f"{name} failed: {placed_line(error)}")
    return None


@dataclass(frozen=True)
class Agent:
    """A recipe's tools and environments, found.

    Attributes:
        section: Of the recipe.
        tools: Functions.
        environments: By the name in the data's column ``environment``; None is that of all rows.
        own_names: Name of a column in the data set -> where it is stored; ``reset`` gets both.
    """

    section: AgentSection
    tools: tuple[Tool, ...]
    environments: Mapping[str | None, type]
    own_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """In one line, for a plan."""
        kinds = [f"{kind.__name__} ({', '.join(methods_of(kind))})" for kind in self.environments.values()]
        names = ", ".join([*(tool.__name__ for tool in self.tools), *kinds])
        section = self.section
        turn = "" if section.max_turn_length is None else f" of {section.max_turn_length} tokens"
        alone = ", in processes of their own" if section.isolate else ""
        return f"{names}; up to {section.max_turns} turns{turn}, a call up to {section.call_timeout:g} s{alone}"

    @property
    def several(self) -> bool:
        """Whether the data says which environment a row has."""
        return isinstance(self.section.environment, dict)

    @property
    def factory(self) -> Any:  # noqa: ANN401 (TRL's)
        """What TRL takes as ``environment_factory``, guarded; None: there is none."""
        made = {name: self._guarded(kind) for name, kind in self.environments.items()}
        return made if self.several else made.get(None)

    def shown_to(self, row: Mapping[str, Any]) -> list[Tool]:
        """The tools of a row of the data, as the chat template takes them."""
        kind = self.environments.get(row.get("environment") if self.several else None)
        return [*self.tools, *([] if kind is None else tools_of(kind))]

    def begun(self, row: Mapping[str, Any]) -> tuple[object | None, Any]:
        """A new environment for a row, guarded and reset, and what it says at first; None: there is none."""
        kind = self.environments.get(row.get("environment") if self.several else None)
        if kind is None:
            return None, None
        environment = self._guarded(kind)()
        given = {name: value for name, value in row.items() if not (self.several and name == "environment")}
        return environment, environment.reset(**given)

    def tools_by_name(self, environment: object | None) -> dict[str, Tool]:
        """The tools of a conversation."""
        own = [] if environment is None else tools_of(environment)
        return {tool.__name__: tool for tool in (*self.tools, *own)}

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Refuses data that an environment cannot be reset with.

        Raises:
            RecipeError: Names the environment and what it lacks.
        """
        for row in rows:
            name = row.get("environment") if self.several else None
            if self.several and name not in self.environments:
                what = f"a row has the environment {name!r}; there are {', '.join(map(str, self.environments))}"
                raise RecipeError(what, "agent.environment", "the column environment names one of them")
        for name, kind in self.environments.items():
            own = next((row for row in rows if not self.several or row.get("environment") == name), None)
            given = {**(own or {}), **_own(own or {}, self.own_names)}
            given = {key: value for key, value in given.items() if not (self.several and key == "environment")}
            mistake = None if own is None else reset_mistake(kind, given, "agent.environment")
            raise_all(RecipeError, [mistake] if mistake else [])

    def _guarded(self, kind: type) -> Callable[[], Any]:
        seconds = self.section.call_timeout
        if self.section.isolate:
            methods = (*methods_of(kind), *NOT_TOOLS)
            kind = isolated(kind, methods, VOID, seconds, OutOfTimeError)
        return guarded(kind, seconds, self.own_names)

    @property
    def digests(self) -> dict[str, str]:
        """What each class and function is called and what its code says, for cards and for a run that goes on."""
        found = [find(path, "agent") for path in self.section.paths]
        return {f"{one.__module__}:{one.__qualname__}": code_digest(f"{one.__module__}:x") for one in found}


def find_agent(section: AgentSection, own_names: Mapping[str, str] = MappingProxyType({})) -> Agent:
    """The tools and environments of a recipe's section.

    Args:
        section: Of the recipe.
        own_names: Name of a column in the data set -> where it is stored, as in :class:`perl.data.ProblemSet`.

    Raises:
        RecipeError: With every mistake: what cannot be imported, or could not be shown to a model.
    """
    named = section.environment
    places: list[tuple[str | None, str, str]] = [(None, named, "agent.environment")] if isinstance(named, str) else []
    if isinstance(named, dict):
        places = [(name, path, f"agent.environment.{name}") for name, path in named.items()]
    mistakes: list[Mistake] = []
    environments: dict[str | None, type] = {}
    tools: list[Tool] = []
    for number, path in enumerate(section.tools):
        try:
            tools.append(find(path, f"agent.tools[{number}]"))
        except PerlError as error:
            mistakes += error.mistakes
    mistakes += tool_mistakes(tools, "agent.tools")
    for name, path, where in places:
        try:
            kind = find(path, where)
        except PerlError as error:
            mistakes += error.mistakes
            continue
        mistakes += environment_mistakes(kind, where, alone=not tools)
        environments[name] = kind
        shared = {tool.__name__ for tool in tools} & {*methods_of(kind)}
        mistakes += [Mistake(f"two tools are called {one}", where, "another name for one of them") for one in shared]
    raise_all(RecipeError, mistakes)
    return Agent(section, tuple(tools), environments, own_names)
