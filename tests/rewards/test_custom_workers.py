"""The user's reward functions in worker processes: what cannot be sent, hangs or crashes costs its own sample."""

import inspect
import sys
from datetime import date
from pathlib import Path

import numpy
import pytest

from perl.errors import DataError
from perl.rewards.custom import Failures, in_workers, unsendable
from perl.run.workers.pool import WorkerStartError
from perl.run.workers.worker import imported
from tests.rewards.loggers import Log

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


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_workers.py").write_text(MODULE, encoding="utf-8")
    yield "own_workers"
    sys.modules.pop("own_workers", None)


def test_workers_score_as_the_function_does(failures, module):
    completions = ["", "a", "unknown", "abc"] * 5
    reward = in_workers(f"{module}:length", {"factor": 2}, failures, workers=2, timeout_seconds=LONG)
    columns = {"completions": completions, "prompts": [""] * 20, "factor": [9] * 20}
    assert reward(**columns) == imported(f"{module}:length")(**columns | {"factor": 2})
    assert reward(completions=[], prompts=[]) == []
    assert reward.__name__ == "length"
    for name, scores in (("slow", [2.0, 3.0]), ("Judge.score", [7.0, 7.0])):
        other = in_workers(f"{module}:{name}", {}, failures, workers=1, timeout_seconds=LONG)
        assert not inspect.iscoroutinefunction(other)
        assert other(completions=["ab", "cde"]) == scores
    assert failures == Failures("own", most=2)


def test_what_an_async_reward_keeps_open_serves_all_samples_of_a_worker(failures, module):
    reward = in_workers(f"{module}:connected", {}, failures, workers=1, timeout_seconds=LONG)
    assert reward(completions=["a", "ab", "abc"]) == [1.0, 2.0, 3.0]
    assert reward(completions=["abcd"]) == [4.0]
    assert failures.newest == ""


def test_an_async_sample_that_is_interrupted_does_not_go_on_in_the_next_ones_time(failures, module):
    reward = in_workers(f"{module}:interrupted", {}, failures, workers=1, timeout_seconds=LONG)
    assert reward(completions=["fine", "stop", "fine"]) == [0.0, None, 0.0]
    assert failures.newest.startswith("reward own: timeout: interrupted after")


def test_a_worker_gets_a_samples_columns_and_nothing_of_the_trainer(failures, module):
    chat = [[{"role": "assistant", "content": "four"}]] * 2
    columns = {"completions": chat, "prompts": ["2+2?"] * 2, "completion_ids": [[7, 8]] * 2, "answer": [4, 4]}
    reward = in_workers(f"{module}:seen", {"limit": 3}, failures, workers=1, timeout_seconds=LONG)
    assert reward(**columns, whole="all of it", trainer_state=lambda: 0, **Log().arguments()) == [1.0, 1.0]
    assert failures.newest == ""


def test_samples_that_hang_or_crash_or_fail_are_none_and_their_fractions_are_logged(failures, module, lines):
    reward = in_workers(f"{module}:act", {}, failures, workers=2, timeout_seconds=3.0)
    log = Log()
    batches = [["fine", "hang", "fine", "die", "raise", "nan", "two", "fine"], [], ["fine"], ["fine", "two"]]
    for actions in batches:
        scored = reward(completions=actions, prompts=actions, **log.arguments())
        assert scored == [1.0 if action == "fine" else None for action in actions]
    assert failures.count == sum(action != "fine" for actions in batches for action in actions)
    assert failures.too_many
    failed, timeouts = log.metrics["reward/own/failed_frac"], log.metrics["reward/own/timeout_frac"]
    assert set(log.metrics) == {"reward/own/failed_frac", "reward/own/timeout_frac"}
    for actions, lost, hung in zip(filter(None, batches), failed, timeouts, strict=True):
        assert lost == sum(action != "fine" for action in actions) / len(actions)
        assert hung == sum(action == "hang" for action in actions) / len(actions)
    said = lines()
    assert [line.rpartition(" ")[2] for line in said] == ["'hang'", "'die'", "'raise'", "more", "'two'"]
    assert said[0].startswith("reward own: timeout: ")
    assert "ended with exit code 3" in said[1]
    assert "ValueError: cannot score this" in said[2]
    assert said[3].endswith("and 2 more")
    assert "returned 2 rewards for 1 samples" in failures.newest


def test_a_column_that_cannot_be_sent_is_named(failures, module):
    reward = in_workers(f"{module}:length", {}, failures, workers=1, timeout_seconds=LONG)
    with pytest.raises(DataError, match=r"^rewards\.own_workers:length: column 'judge' is not a JSON value") as caught:
        reward(completions=["a", "b"], prompts=["", ""], answer=[1, 2], judge=[None, lambda: 1])
    assert len(str(caught.value).splitlines()) == 1
    assert reward(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, None),
        ({"text": "é", "number": 0.5, "none": None, "list": [1, (2, {"a": True})]}, None),
        ({"when": [date(2024, 1, 2)]}, "column 'when' is not a JSON value: TypeError: Object of type date is not JSON"),
        ({"x": numpy.float32(1)}, "column 'x' is not a JSON value: TypeError: Object of type float32 is not JSON"),
    ],
    ids=["empty", "json", "nested", "numpy"],
)
def test_the_first_column_that_no_worker_can_get_is_named(row, problem):
    found = unsendable(row)
    assert found is None if problem is None else found.startswith(problem)


def test_a_module_that_cannot_be_imported_stops_the_run(failures):
    reward = in_workers("no_such_module_at_all:f", {}, failures, workers=1, timeout_seconds=LONG)
    with pytest.raises(WorkerStartError, match="No module named 'no_such_module_at_all'"):
        reward(completions=["a"])
    assert failures.count == 0
