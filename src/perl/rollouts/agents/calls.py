"""One call of a tool: what it answers as text, and what became of it. Nothing that it does ends a step.

tool, arguments, seconds -> text for the policy, outcome

Functions that are not async run one after another in the thread that trains, as under TRL, and are interrupted at
their limit; async ones run together in a loop of their own.
"""

import asyncio
import concurrent.futures
import functools
import inspect
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch

from perl.errors import PerlError, warn
from perl.rollouts.agents.tools import Tool
from perl.run.workers.worker import placed_line

Outcome = Literal["answered", "unknown", "arguments", "error", "timeout", "given_up"]
OUTCOMES: tuple[Outcome, ...] = ("answered", "unknown", "arguments", "error", "timeout", "given_up")
"""What becomes of a call: there is no such tool, it does not take these arguments, it raised, it overran, or it was not
made any more because the tool overran too often among these conversations."""
MOST_TIMEOUTS = 3
# A call that catches what interrupts it is interrupted again.
_AGAIN_SECONDS, _SOON, _SWALLOWED = 1.0, 0.001, 3
_running: list[None] = []


class OutOfTimeError(BaseException):
    """Raised in a call that overran; no Exception, since functions catch those."""


class LostEnvironmentError(Exception):
    """An environment's process is no more, and its state with it."""


@dataclass(frozen=True)
class Answer:
    """What a call came to.

    Attributes:
        content: As text.
        fault: In one line, for a log; empty: it answered.
    """

    content: str
    outcome: Outcome
    fault: str = ""


class Caller:
    """Calls tools within their limit, and remembers which of them overran.

    Attributes:
        seconds: That a call may take.
        overran: By the name of a tool, how often it did so since this was emptied.
        loop: Of async tools; None: one that all callers share.
    """

    def __init__(self, seconds: float) -> None:
        """Nothing was called yet."""
        self.seconds = seconds
        self.overran: dict[str, int] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def answers(self, calls: Sequence[tuple[Mapping[str, Tool], Mapping[str, Any]]]) -> list[Answer]:
        """The answers of calls, in their order.

        Args:
            calls: The tools that a conversation has by name, and a call as TRL parses it.
        """
        found: dict[int, Answer] = {}
        waiting: dict[int, tuple[str, Awaitable[Any]]] = {}
        for place, (tools, call) in enumerate(calls):
            made = self._begun(tools, call)
            if isinstance(made, Answer):
                found[place] = made
            else:
                waiting[place] = made
        for place, (name, outcome) in self._awaited(waiting).items():
            found[place] = self._answer(name, outcome)
        return [found[place] for place in range(len(calls))]

    def within(self, function: Callable[[], Any]) -> Any:  # noqa: ANN401 (whatever it returns)
        """What a function returns, awaited if it must be; OutOfTimeError where it overran."""
        with limited(self.seconds):
            made = function()
        if inspect.isawaitable(made):
            ((_, outcome),) = self._awaited({0: ("", made)}).values()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        return made

    def _begun(self, tools: Mapping[str, Tool], call: Mapping[str, Any]) -> Answer | tuple[str, Awaitable[Any]]:
        """The answer of a function; of an async one what must be awaited."""
        name, about = called_name(call), call.get("function")
        arguments = about.get("arguments") if isinstance(about, dict) else None
        tool = tools.get(name)
        if tool is None:
            return _failed("unknown", f"Tool {name} not found.")  # TRL's words
        if self.overran.get(name, 0) >= MOST_TIMEOUTS:
            return _failed("given_up", f"{name} does not answer")
        try:
            with limited(self.seconds):
                made = tool(**(arguments or {}))
        except (PerlError, KeyboardInterrupt):
            raise
        except TypeError as error:
            inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            return self._answer(name, error) if inside else _failed("arguments", str(error))
        except BaseException as error:  # noqa: BLE001 (the user's function may raise anything)
            return self._answer(name, error)
        return (name, made) if inspect.isawaitable(made) else self._answer(name, made)

    def _awaited(self, waiting: Mapping[int, tuple[str, Awaitable[Any]]]) -> dict[int, tuple[str, Any]]:
        """What became of async calls, all of which run at once."""
        if not waiting:
            return {}

        async def kept(call: Awaitable[Any]) -> Any:  # noqa: ANN401
            try:
                return await call
            except BaseException as error:  # noqa: BLE001 (what the user's function raises must not reach the loop)
                return error

        async def one(call: Awaitable[Any]) -> Any:  # noqa: ANN401
            task = asyncio.ensure_future(kept(call))
            done, _ = await asyncio.wait({task}, timeout=self.seconds)
            if done:
                return task.result()
            task.cancel()
            return OutOfTimeError()

        async def every() -> list[Any]:
            return await asyncio.gather(*(one(call) for _, call in waiting.values()))

        with _as_it_was():
            future = asyncio.run_coroutine_threadsafe(every(), self.loop or _loop())
            try:
                outcomes = future.result(self.seconds + 1.0)
            except concurrent.futures.TimeoutError:  # one of them blocks the loop
                future.cancel()
                _loop.cache_clear()
                outcomes = [OutOfTimeError() for _ in waiting]
        return {place: (name, made) for (place, (name, _)), made in zip(waiting.items(), outcomes, strict=True)}

    def _answer(self, name: str, made: Any) -> Answer:  # noqa: ANN401 (what a tool returned or raised)
        if isinstance(made, OutOfTimeError):
            self.overran[name] = self.overran.get(name, 0) + 1
            return _failed("timeout", f"{name} did not answer within {self.seconds:g} s")
        try:
            if isinstance(made, BaseException):
                return Answer(str({"error": str(made)}), "error", placed_line(made))
            return Answer(_text_of(made), "answered")
        except Exception as error:  # noqa: BLE001 (the user's class)
            return _failed("error", f"what {name} returned is no text: {placed_line(error)}")


def called_name(call: Mapping[str, Any]) -> str:
    """The name in a call as TRL parses it; whatever a model has written."""
    about = call.get("function")
    return str(about.get("name", "unknown") if isinstance(about, dict) else call.get("name", "unknown"))


def _text_of(made: Any) -> str:  # noqa: ANN401 (what a tool returned)
    """Its text; of TRL's content parts, where all are text, theirs."""
    parts: list[Any] = made if isinstance(made, list) and made else [None]
    if all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return str(made)


def _failed(outcome: Outcome, fault: str) -> Answer:
    """As TRL tells a model of a call that failed."""
    return Answer(str({"error": fault}), outcome, fault)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupts what runs inside after so many seconds, in the main thread; in another one nothing can.

    Raises:
        OutOfTimeError: It overran.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    fired: list[None] = []

    def over(_signal: int, _frame: FrameType | None) -> None:
        fired.append(None)
        if len(fired) == _SWALLOWED:
            warn("PRL366", "tools: a call catches whatever interrupts it; agent.isolate: true could kill its process")
        raise OutOfTimeError

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, over)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    _running.append(None)
    try:
        with _as_it_was():
            yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        _running.pop()
        rest = max(left - (time.monotonic() - began), _SOON) if left else 0.0  # of whoever had set the timer
        signal.setitimer(signal.ITIMER_REAL, rest, interval)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Afterwards relative paths of the run are what they were, and gradients are recorded where they were."""
    here, recorded = os.getcwd(), torch.is_grad_enabled()
    try:
        yield
    finally:
        os.chdir(here)
        torch.set_grad_enabled(recorded)


def is_running() -> bool:
    """Whether a call is being made, within which what it calls itself is its own."""
    return bool(_running)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of async tools, in a thread of its own; a client that a tool keeps is bound to that of its first use."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="perl-tools", daemon=True).start()
    return loop
