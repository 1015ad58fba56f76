"""The user's reward functions: a sample that one cannot score is None, counted and named; the others keep theirs."""

import asyncio
import functools
import gc
import inspect
import logging
import math
import os
import sys
import warnings
from collections import defaultdict
from datetime import date
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch

from perl.errors import DataError, PerlError, RecipeError
from perl.rewards.own import Failures, guarded, in_workers, is_async, unsendable
from perl.rewards.pool import WorkerStartError

LONG = 120.0  # seconds; for what must be done, on whatever machine

MODULE = '''\
import asyncio
import os
import signal
import socket
import time

connection = far_end = None
went_on = []


def length(completions, factor=1, **_):
    """Characters."""
    return [None if text == "unknown" else factor * len(text) for text in completions]


async def slow(completions, **_):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


async def connected(completions, **_):
    """As a client that opens its connection at the first call and keeps it: the far end answers with the length."""
    global connection, far_end
    if connection is None:
        near, far_end = socket.socketpair()
        connection = await asyncio.open_connection(sock=near)
    far_end.sendall(b"%d\\n" % len(completions[0]))
    return [float(await connection[0].readline())]


async def go_on():
    await asyncio.sleep(0)
    went_on.append(1)


async def interrupted(completions, **_):
    """For "stop" the signal of the worker's CPU timer, with a task left behind; then how many such tasks went on."""
    if completions == ["stop"]:
        left = asyncio.create_task(go_on())
        signal.raise_signal(signal.SIGVTALRM)
    await asyncio.sleep(0.05)
    return [len(went_on)]


def act(completions, **_):
    (action,) = completions
    if action == "hang":
        time.sleep(10**6)
    if action == "die":
        os._exit(3)
    if action == "raise":
        raise ValueError("cannot score this")
    if action == "nan":
        return [float("nan")]
    if action == "two":
        return [1, 2]
    return [1]


def seen(completions, prompts, completion_ids, answer, whole, **others):
    assert (completions, prompts, completion_ids, answer, whole) == (
        [[{"role": "assistant", "content": "four"}]], ["2+2?"], [[7, 8]], [4], "all of it"
    )
    assert others == {"limit": 3}, others
    return [1]


class Judge:
    @staticmethod
    def score(completions, **_):
        return [7] * len(completions)
'''


class Log:
    """TRL's loggers: a metric is averaged, an extra column must be as long as the batch."""

    def __init__(self):
        self.metrics = defaultdict(list)
        self.columns = defaultdict(list)

    def arguments(self):
        return {
            "log_metric": lambda name, value: self.metrics[name].append(value),
            "log_extra": lambda column, values: self.columns[column].extend(values),
        }


def lengths(completions, **_):
    """Characters; fails for the batch as a whole if one is not text."""
    return [len(text) for text in completions]


@pytest.fixture
def failures():
    return Failures("own", most=2)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_workers.py").write_text(MODULE, encoding="utf-8")
    yield "own_workers"
    sys.modules.pop("own_workers", None)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING, logger="perl")
    return lambda: [record.getMessage() for record in caplog.records]


def test_values_of_a_function_that_can_score_are_its_own(failures, lines):
    calls = []

    def function(**others):
        calls.append(others)
        return [1, None, True, 0.5]

    log = Log()
    answer, state = [1, 2, 3, 4], object()
    reward = guarded(function, failures)
    scored = reward(completions=["a"] * 4, prompts=["p"] * 4, answer=answer, trainer_state=state, **log.arguments())
    assert scored == [1.0, None, 1.0, 0.5]
    assert [type(value) for value in scored] == [float, type(None), float, float]
    assert len(calls) == 1
    assert calls[0]["answer"] is answer
    assert calls[0]["trainer_state"] is state
    assert (failures, lines()) == (Failures("own", most=2), [])
    assert log.metrics == {"reward/own/failed_frac": [0.0]}


@pytest.mark.parametrize(
    "values",
    [
        (1, 2),
        iter([1, 2]),
        numpy.array([1.0, 2.0]),
        torch.tensor([1, 2]),
        [numpy.float32(1), torch.tensor(2.0)],
        [Fraction(1), numpy.int64(2)],
    ],
    ids=["tuple", "iterator", "numpy", "torch", "scalars", "fraction"],
)
def test_numbers_come_in_any_type(failures, values):
    scored = guarded(lambda **_: values, failures)(completions=["a", "b"])
    assert scored == [1.0, 2.0]
    assert [type(value) for value in scored] == [float, float]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "TypeError: returned NoneType, not a list of numbers"),
        (3.0, "TypeError: returned float"),
        ("1", "TypeError: returned str"),
        ({0: 1.0}, "TypeError: returned dict"),
        ([], "ValueError: returned 0 rewards for 1 samples"),
        ([1.0, 2.0], "ValueError: returned 2 rewards for 1 samples"),
        (["1"], "TypeError: returned '1', which is no number"),
        ([math.nan], "ValueError: returned nan, which is not finite"),
        ([-math.inf], "ValueError: returned -inf, which is not finite"),
        ([10**400], "OverflowError"),
        ([1j], "TypeError"),
        ([[1.0]], "TypeError"),
        ([torch.tensor([1.0, 2.0])], ""),  # torch has changed the type of its error
    ],
)
def test_what_is_no_reward_is_none_and_is_said(failures, lines, values, words):
    calls = []
    reward = guarded(lambda **_: calls.append(1) or values, failures)
    assert reward(completions=["a"], prompts=["2+2?"]) == [None]
    assert len(calls) == 1, "a batch of one sample is not scored twice"
    assert failures.count == 1
    assert failures.newest.startswith(f"reward own: {words}")
    assert failures.newest.endswith(" for the prompt '2+2?'")
    assert lines() == [failures.newest]


def test_only_the_samples_at_fault_are_none(failures, lines):
    reward = guarded(lengths, failures)
    scored = reward(completions=["a", None, "abc", 4], prompts=["p0", "p1", "p2", "p3"])
    assert scored == [1.0, None, 3.0, None]
    assert failures.count == 2
    assert not failures.too_many
    first, second = lines()
    assert "TypeError" in first
    assert "'p1'" in first
    assert "'p3'" in second
    assert failures.newest == second
    assert reward(completions=[None], prompts=["p"]) == [None]
    assert failures.too_many


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan], [1.0, "2"]])
def test_values_that_do_not_fit_the_batch_are_asked_for_again_sample_by_sample(failures, values):
    def function(completions, **_):
        return values if len(completions) == 2 else [float(len(completions[0]))]

    assert guarded(function, failures)(completions=["a", "abcd"], prompts=["", ""]) == [1.0, 4.0]
    assert failures.count == 0


def test_a_sample_alone_has_its_own_row_of_every_column(failures):
    calls = []

    def function(**arguments):
        calls.append(arguments)
        raise KeyError(arguments["completions"][0])

    chat = [[{"role": "user", "content": f"question {row}"}] for row in range(3)]
    columns = {"completions": ["a", "b", "c"], "prompts": chat, "answer": (1, 2, 3), "whole": [1, 2], "text": "xyz"}
    assert guarded(function, failures)(**columns) == [None] * 3
    assert calls[0] == columns
    assert calls[1:] == [
        {"completions": [c], "prompts": [chat[row]], "answer": (row + 1,), "whole": [1, 2], "text": "xyz"}
        for row, c in enumerate("abc")
    ]
    assert failures.newest == "reward own: KeyError: 'c' for the prompt 'question 2'"


def test_many_failures_are_few_lines(failures, lines):
    prompts = ["a\nlong  prompt " + "x" * 1000] * 100
    assert guarded(lengths, failures)(completions=[None] * 100, prompts=prompts) == [None] * 100
    assert failures.count == 100
    assert len(lines()) == 4
    assert lines()[-1] == "reward own: and 97 more"
    assert repr("a long prompt " + "x" * 46) in failures.newest
    assert all("\n" not in line and len(line) < 400 for line in lines())


def test_a_sample_without_a_prompt_is_named_by_its_row(failures):
    assert guarded(lengths, failures)(completions=["a", None]) == [1.0, None]
    assert failures.newest.endswith("for sample 1")


def test_an_empty_batch_has_no_rewards(failures):
    calls = []
    assert guarded(lambda **_: calls.append(1), failures)(completions=[], prompts=[]) == []
    assert (calls, failures.count) == ([], 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_fraction_that_failed_is_logged_for_every_batch(failures, asynchronous):
    async def own(completions, **_):
        return lengths(completions)

    log = Log()
    reward = guarded(own if asynchronous else lengths, failures)
    for completions in (["a", "b"], ["a", None], [None] * 4, [], ["a"]):
        scored = reward(completions=completions, prompts=[""] * len(completions), **log.arguments())
        if asynchronous:
            asyncio.run(scored)
    assert log.metrics == {"reward/own/failed_frac": [0.0, 0.5, 1.0, 0.0]}


def test_what_a_function_logs_counts_once_and_columns_stay_as_long_as_the_batch(failures):
    def function(completions, log_metric, log_extra, **_):
        log_extra("first", [str(text)[0] for text in completions])
        log_metric("characters", sum(len(str(text)) for text in completions))
        return lengths(completions)

    log = Log()
    reward = guarded(function, failures)
    assert reward(completions=["ab", "c"], prompts=["", ""], **log.arguments()) == [2.0, 1.0]
    assert log.columns == {"first": ["a", "c"]}
    assert log.metrics == {"characters": [3], "reward/own/failed_frac": [0.0]}
    assert reward(completions=["de", None, "f"], prompts=[""] * 3, **log.arguments()) == [2.0, None, 1.0]
    assert log.columns == {"first": ["a", "c", "d", None, "f"]}
    assert log.metrics["characters"] == [3, 2, 1]


def test_loggers_that_were_not_given_are_not_passed(failures):
    assert guarded(lambda completions: [len(completions)], failures)(completions=["a"]) == [1.0]
    seen = {}
    assert guarded(lambda **all_: seen.update(all_) or [1], failures)(completions=["a"], log_metric=None) == [1.0]
    assert seen == {"completions": ["a"], "log_metric": None}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RecipeError("ours")], ids=repr)
def test_what_is_no_failure_of_the_function_goes_on(failures, error):
    def function(**_):
        raise error

    async def asynchronous(**_):
        raise error

    with pytest.raises(type(error)) as caught:
        guarded(function, failures)(completions=["a", "b"])
    assert caught.value is error
    if isinstance(error, PerlError):  # asyncio.run itself reacts to the others
        with pytest.raises(RecipeError):
            asyncio.run(guarded(asynchronous, failures)(completions=["a", "b"]))
    assert failures.count == 0


def test_a_coroutine_stays_one_and_is_guarded_too(failures):
    calls = []

    async def function(completions, **_):
        await asyncio.sleep(0)
        calls.append(len(completions))
        return lengths(completions)

    reward = guarded(function, failures)
    assert inspect.iscoroutinefunction(reward)
    assert asyncio.run(reward(completions=["a", None, "abc"], prompts=["", "", ""])) == [1.0, None, 3.0]
    assert asyncio.run(reward(completions=[])) == []
    assert calls == [3, 1, 1, 1]
    assert failures.count == 1
    assert not inspect.iscoroutinefunction(guarded(lengths, failures))


class Judge:
    """Its objects are async although they are no coroutine functions."""

    async def __call__(self, completions, **_):
        return lengths(completions)

    async def score(self, completions, **_):
        return lengths(completions)

    @staticmethod
    def quick(completions, **_):
        return lengths(completions)


@functools.wraps(Judge.score)
def returns_a_coroutine(**arguments):
    return Judge()(**arguments)


def partial_of(function):
    return functools.wraps(function)(functools.partial(functools.partial(function, limit=3), other=4))


@pytest.mark.parametrize("wrapped", [lambda function: function, partial_of], ids=["itself", "partial"])
@pytest.mark.parametrize(
    ("function", "asynchronous"),
    [
        (Judge(), True),
        (Judge().score, True),
        (Judge().__call__, True),
        (Judge.quick, False),
        (lengths, False),
        (lambda completions, **_: lengths(completions), False),
    ],
    ids=["object", "method", "call", "static", "function", "lambda"],
)
def test_async_is_what_must_be_awaited(failures, function, asynchronous, wrapped):
    own = wrapped(function)
    assert is_async(own) is asynchronous
    reward = guarded(own, failures)
    assert inspect.iscoroutinefunction(reward) is asynchronous  # what TRL asks for
    scored = reward(completions=["ab", None], prompts=["", ""])
    assert (asyncio.run(scored) if asynchronous else scored) == [2.0, None]
    assert failures.count == 1


def test_a_class_is_not_async_because_its_objects_are():
    assert not is_async(Judge)


def test_a_function_that_returns_a_coroutine_is_told_to_be_async(failures, lines):
    assert not is_async(returns_a_coroutine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert guarded(returns_a_coroutine, failures)(completions=["a"], prompts=["2+2?"]) == [None]
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    reason = "TypeError: returned a coroutine; define the function itself with async def"
    assert lines() == [f"reward own: {reason} for the prompt '2+2?'"]


def test_a_guarded_function_still_shows_its_name_and_arguments(failures):
    reward = guarded(lengths, failures)
    assert (reward.__name__, reward.__doc__) == ("lengths", lengths.__doc__)
    assert list(inspect.signature(reward).parameters) == ["completions", "_"]

    assert guarded(Judge(), failures).__name__ == "own"


def test_workers_score_as_the_function_does(failures, module):
    completions = ["", "a", "unknown", "abc"] * 5
    reward = in_workers(f"{module}:length", {"factor": 2}, failures, workers=2, timeout_seconds=LONG)
    columns = {"completions": completions, "prompts": [""] * 20, "factor": [9] * 20}
    assert reward(**columns) == [0.0, 2.0, None, 6.0] * 5
    assert reward(completions=[], prompts=[]) == []
    assert reward.__name__ == "length"
    assert failures == Failures("own", most=2)


@pytest.mark.parametrize(("name", "value"), [("slow", 2.0), ("Judge.score", 7.0)])
def test_workers_run_coroutines_and_functions_of_classes(failures, module, name, value):
    reward = in_workers(f"{module}:{name}", {}, failures, workers=1, timeout_seconds=LONG)
    assert not inspect.iscoroutinefunction(reward)
    assert reward(completions=["ab", "cd"]) == [value] * 2


def test_what_an_async_reward_keeps_open_serves_all_samples_of_a_worker(failures, module):
    reward = in_workers(f"{module}:connected", {}, failures, workers=1, timeout_seconds=LONG)
    assert reward(completions=["a", "ab", "abc"]) == [1.0, 2.0, 3.0]
    assert reward(completions=["abcd"]) == [4.0]
    assert failures.newest == ""


def test_an_async_sample_that_is_interrupted_does_not_go_on_in_the_next_ones_time(failures, module):
    reward = in_workers(f"{module}:interrupted", {}, failures, workers=1, timeout_seconds=LONG)
    assert reward(completions=["fine", "stop", "fine"]) == [0.0, None, 0.0]
    assert failures.newest.startswith("reward own: timeout: interrupted after")


def test_a_reward_in_workers_logs_for_every_batch_what_failed_and_what_hung(failures, module):
    log = Log()
    reward = in_workers(f"{module}:length", {}, failures, workers=1, timeout_seconds=LONG)
    for completions in (["a", "b"], ["a", 1], [], ["a"]):
        reward(completions=completions, **log.arguments())
    assert log.metrics == {"reward/own/failed_frac": [0.0, 0.5, 0.0], "reward/own/timeout_frac": [0.0, 0.0, 0.0]}


def test_a_worker_gets_a_samples_columns_and_nothing_of_the_trainer(failures, module):
    chat = [[{"role": "assistant", "content": "four"}]] * 2
    columns = {"completions": chat, "prompts": ["2+2?"] * 2, "completion_ids": [[7, 8]] * 2, "answer": [4, 4]}
    reward = in_workers(f"{module}:seen", {"limit": 3}, failures, workers=1, timeout_seconds=LONG)
    assert reward(**columns, whole="all of it", trainer_state=lambda: 0, **Log().arguments()) == [1.0, 1.0]
    assert failures.newest == ""


def test_samples_that_hang_or_crash_or_fail_are_none(failures, module, lines):
    reward = in_workers(f"{module}:act", {}, failures, workers=2, timeout_seconds=3.0)
    log = Log()
    actions = ["fine", "hang", "fine", "die", "raise", "nan", "two", "fine"]
    assert reward(completions=actions, prompts=actions, **log.arguments()) == [1.0, None, 1.0, *[None] * 4, 1.0]
    assert failures.count == 5
    assert failures.too_many
    assert log.metrics == {"reward/own/failed_frac": [5 / 8], "reward/own/timeout_frac": [1 / 8]}
    said = lines()
    assert [line.rpartition(" ")[2] for line in said] == ["'hang'", "'die'", "'raise'", "more"]
    assert said[0].startswith("reward own: timeout: ")
    assert "ended with exit code 3" in said[1]
    assert "ValueError: cannot score this" in said[2]
    assert "returned 2 rewards for 1 samples" in failures.newest
    assert reward(completions=["fine"], prompts=["p"], **log.arguments()) == [1.0]
    assert log.metrics == {"reward/own/failed_frac": [5 / 8, 0.0], "reward/own/timeout_frac": [1 / 8, 0.0]}


def test_a_column_that_cannot_be_sent_is_named(failures, module):
    reward = in_workers(f"{module}:length", {}, failures, workers=1, timeout_seconds=LONG)
    with pytest.raises(DataError, match=r"^rewards\.own_workers:length: column 'judge' is no JSON value") as caught:
        reward(completions=["a", "b"], prompts=["", ""], answer=[1, 2], judge=[None, lambda: 1])
    assert len(str(caught.value).splitlines()) == 1
    assert reward(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, None),
        ({"text": "é", "number": 0.5, "none": None, "list": [1, (2, {"a": True})]}, None),
        ({"a": 1, "b": {1}, "c": b""}, "column 'b' is no JSON value: TypeError: Object of type set is not JSON ser"),
        ({"when": [date(2024, 1, 2)]}, "column 'when' is no JSON value: TypeError: Object of type date is not JSON"),
        ({"x": numpy.float32(1)}, "column 'x' is no JSON value: TypeError: Object of type float32 is not JSON"),
    ],
    ids=["empty", "json", "second", "nested", "numpy"],
)
def test_the_first_column_that_no_worker_can_get_is_named(row, problem):
    found = unsendable(row)
    assert found is None if problem is None else found.startswith(problem)


def test_the_import_of_the_users_module_takes_no_samples_time(failures, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = f"import os, time\nif os.getpid() != {os.getpid()}:\n    time.sleep(3)\n{MODULE}"
    Path("heavy_rewards.py").write_text(text, encoding="utf-8")
    reward = in_workers("heavy_rewards:length", {}, failures, workers=1, timeout_seconds=2.0)
    assert reward(completions=["a"]) == [1.0]


def test_a_module_that_cannot_be_imported_stops_the_run(failures):
    reward = in_workers("no_such_module_at_all:f", {}, failures, workers=1, timeout_seconds=LONG)
    with pytest.raises(WorkerStartError, match="No module named 'no_such_module_at_all'"):
        reward(completions=["a"])
    assert failures.count == 0
