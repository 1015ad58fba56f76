"""Whatever a tool does there is an answer for the policy, and an outcome to be counted."""

import asyncio
import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time

import pytest
import torch

from perl.errors import RecipeError
from perl.recipe.agent_section import AgentSection
from perl.rollouts.agents.calls import MOST_TIMEOUTS, Caller
from perl.rollouts.agents.environments import VOID, find_agent, guarded
from perl.rollouts.agents.isolated import isolated

LIMIT = 0.5


def call(name="tool", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def without_line(text):
    return re.sub(r"(?<=\.py):\d+", "", text) if isinstance(text, str) else text


async def later(value=7, seconds=0.0):
    await asyncio.sleep(seconds)
    return value


async def blocking():
    time.sleep(60)


async def cancelled():
    raise asyncio.CancelledError


def given_up():
    raise asyncio.CancelledError


async def elsewhere():
    os.chdir("/")
    return os.getcwd()


def ungraded():
    torch.set_grad_enabled(False)


async def leaving():
    sys.exit(3)


async def late():
    raise TimeoutError("of its own")


def stubborn():
    for _ in range(2):
        with contextlib.suppress(BaseException):  # as a careless tool does
            time.sleep(60)
    time.sleep(60)


class Unprintable:
    def __str__(self):
        raise ValueError("no")


def fail():
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("tool", "arguments", "outcome", "content"),
    [
        (lambda: 12, {}, "answered", "12"),
        (lambda: b"\xff", {}, "answered", r"b'\xff'"),
        (lambda: float("nan"), {}, "answered", "nan"),
        (lambda: None, {}, "answered", "None"),
        (lambda: [{"type": "text", "text": "a"}], {}, "answered", "a"),
        (lambda: [{"type": "book", "title": "a"}], {}, "answered", "[{'type': 'book', 'title': 'a'}]"),
        (cancelled, {}, "error", "{'error': ''}"),
        (given_up, {}, "error", "{'error': ''}"),
        (elsewhere, {}, "answered", "/"),
        (ungraded, {}, "answered", "None"),
        (leaving, {}, "error", "{'error': '3'}"),
        (late, {}, "error", "{'error': 'of its own'}"),
        (stubborn, {}, "timeout", "{'error': 'tool did not answer within 0.5 s'}"),
        (later, {"value": 3}, "answered", "3"),
        (lambda: later(4), {}, "answered", "4"),
        (lambda: time.sleep(60), {}, "timeout", "{'error': 'tool did not answer within 0.5 s'}"),
        (later, {"seconds": 60}, "timeout", "{'error': 'tool did not answer within 0.5 s'}"),
        (blocking, {}, "timeout", "{'error': 'tool did not answer within 0.5 s'}"),
        (fail, {}, "error", "{'error': \"'gone'\"}"),
        (lambda: exit(3), {}, "error", "{'error': '3'}"),
        (lambda: int("x"), {}, "error", "{'error': \"invalid literal for int() with base 10: 'x'\"}"),
        (lambda: len(3), {}, "error", "{'error': \"object of type 'int' has no len()\"}"),
        (Unprintable, {}, "error", "{'error': 'what tool returned is no text: test_calls.py: ValueError: no'}"),
        (later, {"c": 1}, "arguments", "{'error': \"later() got an unexpected keyword argument 'c'\"}"),
    ],
)
def test_every_call_is_answered(tool, arguments, outcome, content):
    here = os.getcwd()
    [answer] = Caller(LIMIT).answers([({"tool": tool}, call(**arguments))])
    assert (answer.outcome, without_line(answer.content)) == (outcome, content)
    assert (os.getcwd(), torch.is_grad_enabled()) == (here, True)


def test_calls_are_answered_in_order_and_one_that_hangs_again_and_again_is_not_made_any_more():
    tools = {"hang": lambda: time.sleep(60), "later": later}
    caller = Caller(0.1)
    begun = time.monotonic()
    calls = [(tools, call("hang"))] * (MOST_TIMEOUTS + 50) + [(tools, call("later", value=n)) for n in range(3)]
    answers = caller.answers([*calls, (tools, call("none")), (tools, {"type": "other", "name": "x"})])
    outcomes = [answer.outcome for answer in answers]
    expected = ["timeout"] * MOST_TIMEOUTS + ["given_up"] * 50 + ["answered"] * 3 + ["unknown"] * 2
    assert outcomes == expected
    assert [answer.content for answer in answers[-5:-2]] == ["0", "1", "2"]
    assert time.monotonic() - begun < 20


def test_a_timer_of_the_script_goes_on_and_so_does_that_around_a_call():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 50.0)
    try:
        environment = guarded(type("Sure", (Counting,), {"get_reward": lambda _: 1.0}), LIMIT)()
        environment.reset()
        tools = {"ask": lambda: (environment.get_reward(), time.sleep(60))}
        assert Caller(LIMIT).answers([(tools, call("ask"))])[0].outcome == "timeout"
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_a_call_is_made_without_a_limit():
    found = []
    thread = threading.Thread(target=lambda: found.extend(Caller(0.1).answers([({"tool": lambda: 5}, call())])))
    thread.start()
    thread.join()
    assert found[0].content == "5"


class Counting:
    def reset(self, **row):
        if row.get("fails") == "raise":
            raise ValueError("no such row")
        if row.get("fails") == "hang":
            time.sleep(60)
        self.row, self.count = row, 0
        return row.get("says")

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: How much.
        """
        self.count += number
        return self.count

    def die(self) -> None:
        """Ends its process."""
        os._exit(3)

    def hang(self) -> None:
        """Never answers."""
        time.sleep(60)

    async def get_reward(self):
        return {"nan": float("nan"), "text": "1", "huge": 10**400, None: float(self.count)}[self.row.get("reward")]


@pytest.mark.parametrize(
    ("row", "void"),
    [
        ({}, ""),
        ({"says": "more"}, ""),
        ({"fails": "raise"}, "Counting.reset failed: test_calls.py: ValueError: no such row"),
        ({"fails": "hang"}, "Counting.reset did not answer within 0.5 s"),
        ({"says": 3}, "Counting.reset returned 3, which is neither None nor text"),
        ({"reward": "nan"}, "Counting.get_reward returned nan, which is no finite number"),
        ({"reward": "huge"}, f"Counting.get_reward returned {10**59}, which is no finite number"),
        ({"reward": "text"}, "Counting.get_reward returned '1', which is no finite number"),
    ],
)
def test_an_environment_that_fails_voids_its_conversation(row, void):
    environment = guarded(Counting, LIMIT)()
    assert isinstance(environment, Counting)
    said = environment.reset(**row)
    assert said == (row.get("says") if not void else None)
    assert environment.get_reward() == 0.0
    assert without_line(getattr(environment, VOID)) == void
    environment.reset()  # the next conversation
    assert environment.get_reward() == 0.0


def test_an_isolated_environment_is_killed_where_it_overruns_and_starts_anew():
    section = AgentSection(environment=f"{__name__}:Counting", isolate=True, call_timeout=2.0)
    agent = find_agent(section)
    environment, said = agent.begun({"says": "more"})
    tools, caller = agent.tools_by_name(environment), Caller(2.0)
    assert (said, sorted(tools)) == ("more", ["add", "die", "hang"])
    assert [caller.answers([(tools, call("add", number=2))])[0].content for _ in range(2)] == ["2", "4"]
    assert environment.get_reward() == 4.0
    for name, outcome, why in (("hang", "timeout", "was killed: hang did not"), ("die", "error", "ended by itself")):
        environment.reset()
        process = environment._process._running
        [answer] = caller.answers([(tools, call(name))])
        assert answer.outcome == outcome
        assert why in getattr(environment, VOID)
        assert process.poll() is not None
        assert environment.get_reward() == 0.0
    environment.reset(fails="raise")
    assert "no such row" in getattr(environment, VOID)
    assert isolated.cache_info().currsize > 0
    process = environment._process._running
    del environment, tools
    process.wait(20)  # with the last one that uses it


def without_types(a, b):
    """Multiplies.

    Args:
        a: One.
        b: The other.
    """


def without_words(a: int) -> int:
    """Doubles."""


class NoReset:
    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: How much.
        """


class NeedsArguments(Counting):
    def __init__(self, db):
        self.db = db


class NeedsCompletions(Counting):
    def get_reward(self, completions):
        """Needs what it is not given."""


def nameless(*numbers: int):
    """Adds.

    Args:
        numbers: Some.
    """


def one_by_one():
    """Counts."""
    yield 1


PARTIAL = functools.partial(fail)


class NoTools:
    def reset(self, **_):
        """Nothing."""


class Needy(NoReset):
    def reset(self, *, gold):
        """Needs a column."""


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"environment": "no_such_module:X"}, "agent.environment: cannot import no_such_module"),
        ({"environment": f"{__name__}:Countin"}, "agent.environment: .* has no 'Countin'.*did you mean Counting"),
        ({"environment": "no.py:X"}, "agent.environment: no such file: no.py"),
        ({"environment": f"{__name__}:NeedsArguments"}, "agent.environment: NeedsArguments cannot be made: missing a"),
        ({"environment": f"{__name__}:NeedsCompletions"}, "NeedsCompletions.get_reward cannot be called: missing a"),
        ({"environment": f"{__name__}:LIMIT"}, "has no function or class 'LIMIT'"),
        ({"tools": [f"{__name__}:nameless"]}, "agent.tools: nameless takes numbers without a name"),
        ({"tools": [f"{__name__}:one_by_one"]}, "agent.tools: one_by_one yields, and a call has one answer"),
        ({"tools": [f"{__name__}:PARTIAL"]}, "agent.tools: .*is no function"),
        ({"environment": "X"}, "agent.environment: 'X' names no class or function"),
        ({"environment": f"{__name__}:NoReset"}, "agent.environment: NoReset has no method reset"),
        ({"environment": f"{__name__}:NoTools"}, "agent.environment: NoTools has no public method"),
        ({"environment": f"{__name__}:fail"}, "agent.environment: fail is no class"),
        ({"environment": {"a": f"{__name__}:NoReset"}}, "agent.environment.a: NoReset has no method reset"),
        ({"tools": [f"{__name__}:without_types"]}, "agent.tools: without_types cannot be shown to a model"),
        ({"tools": [f"{__name__}:without_words"]}, "agent.tools: without_words cannot be shown to a model"),
        ({"tools": [f"{__name__}:fail", "json:dumps"]}, "agent.tools: fail cannot be shown"),
        ({"tools": [f"{__name__}:other.x"]}, r"agent.tools\[0\]: .* has no 'other.x'"),
    ],
)
def test_what_no_conversation_could_use_is_refused_by_name(section, line):
    with pytest.raises(RecipeError, match=line):
        find_agent(AgentSection(**section))


def test_data_that_an_environment_cannot_be_reset_with_is_refused():
    agent = find_agent(AgentSection(environment=f"{__name__}:Needy"))
    agent.check([{"gold": 1}])
    with pytest.raises(RecipeError, match=r"Needy.reset cannot be called with the data: .*'gold'.*each column: prompt"):
        agent.check([{"prompt": "x"}])
    several = find_agent(AgentSection(environment={"a": f"{__name__}:Counting"}))
    with pytest.raises(RecipeError, match="a row has the environment 'b'; there are a"):
        several.check([{"environment": "a"}, {"environment": "b"}])
