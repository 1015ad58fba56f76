"""Functions in worker processes: items and values arrive, and what hangs or crashes costs its own item."""

import math
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from perl.run.workers.pool import WorkerPool, WorkerStartError
from tests.rewards.pool_work import values

if os.name != "posix":
    pytest.skip("worker processes are POSIX only", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_work")


def test_outcomes_come_in_the_order_of_the_items(pool_of):
    pool = pool_of("double", workers=3)
    assert values(pool.map(range(1000))) == [2 * item for item in range(1000)]
    assert values(pool.map(["a", [1], 0.5])) == ["aa", [1, 1], 1.0]
    assert pool.map([]) == []
    assert pool.killed == 0


def test_a_worker_sees_the_parents_environment_but_no_gpu(pool_of, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_PARENT", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (seen,) = values(pool_of("environment").map([0]))
    assert seen == ["1", "", "here", str(tmp_path.resolve()), ""]


def test_what_never_ends_is_ended_and_the_others_are_not(pool_of):
    endless = ["sleep", "loop", "power", "call", "unlimited"]
    pool = pool_of("act", workers=5)
    pool.start()
    items = ["pid", *endless, "pid", "pid"]
    outcomes = dict(zip(range(len(items)), pool.map(items, timeout_seconds=3.0), strict=True))
    assert [items[row] for row, outcome in outcomes.items() if outcome.status == "timeout"] == endless
    overran = [outcome for outcome in outcomes.values() if outcome.status == "timeout"]
    assert all(outcome.value is None and outcome.error and outcome.seconds > 0 for outcome in overran)
    assert {outcome.status for outcome in outcomes.values()} == {"done", "timeout"}


def test_a_crash_costs_the_item_that_caused_it(pool_of):
    errors = {
        "exit": "the worker ended with exit code 3",
        "segfault": "the worker was ended by SIGSEGV",
        "abort": "the worker was ended by SIGKILL",
        "child, exit": "the worker ended with exit code 3",
    }
    pool = pool_of("act", workers=2)
    items = [item for action in errors for item in ("pid", "pid", action, "pid")]
    found = list(zip(items, pool.map(items), strict=True))
    assert {item: outcome.error for item, outcome in found if outcome.status == "error"} == errors
    assert {item for item, outcome in found if outcome.status == "done"} == {"pid"}
    assert values(pool.map(["pid"]))
    assert pool.killed == 0


def test_an_exception_is_an_outcome_and_its_worker_goes_on(pool_of):
    errors = {
        "long message": "ValueError: no no no",
        "no message": "KeyError",
        "unprintable": "Unprintable",
        "system exit": "SystemExit: 4",
        "interrupt": "KeyboardInterrupt",
        "recursion": "RecursionError: maximum recursion depth",
        "nested": "RecursionError: maximum recursion depth",
        "set": "TypeError: Object of type set is not JSON serializable",
        "unheard of": "KeyError: 'unheard of'",
    }
    items = ["pid", *(item for action in errors for item in (action, "pid"))]
    outcomes = pool_of("act", workers=1).map(items)
    assert len(set(values(outcomes[::2]))) == 1
    for (action, error), failed in zip(errors.items(), outcomes[1::2], strict=True):
        assert (failed.status, failed.value) == ("error", None), action
        place = re.match(r"\w+\.py:\d+: ", failed.error)
        assert (place is None) == (action in ("set", "nested")), failed.error  # which the worker itself finds
        assert failed.error[place.end() if place else 0 :].startswith(error)
        assert len(failed.error) <= 250
        assert "\n" not in failed.error


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_is_bounded(pool_of):
    pool = pool_of("act", workers=1, memory_mib=100)
    first, failed, again = pool.map(["pid", "memory", "pid"])
    assert failed.status == "error"
    assert re.fullmatch(r"\w+\.py:\d+: MemoryError", failed.error)  # with the line that wanted so much
    assert first.value == again.value
    too_long, fine = pool.map(["0" * (200 << 20), "pid"])
    assert too_long.status == "error"
    assert fine.status == "done"


def test_whatever_json_holds_arrives_however_long(pool_of):
    long = "0123456789" * 500_000
    items = [long, "\ud800é\0", 2**70, 0.1, -math.inf, [1, [None, "a"]], True]
    *found, nan = values(pool_of("double").map([*items, math.nan]))
    assert found == [2 * item for item in items]
    assert math.isnan(nan)


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        ("", "no_such_module_at_all:f", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("f = 3", "broken:f", "TypeError: broken:f cannot be called"),
        ("import sys; sys.exit(2)", "broken:f", "SystemExit: 2"),
        ("import os; os._exit(5)", "broken:f", "ended with exit code 5"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_and_no_outcome(text, target, words):
    Path("broken.py").write_text(text, encoding="utf-8")
    pool = WorkerPool(target, workers=1)
    for call in (lambda: pool.map([1, 2]), pool.start):
        with pytest.raises(WorkerStartError) as caught:
            call()
        assert words in str(caught.value)
        assert target in str(caught.value)
    assert pool.map([]) == []


def test_the_time_of_imports_is_not_the_items():
    Path("heavy.py").write_text("import time\ntime.sleep(2)\ndef f(item):\n    return item\n", encoding="utf-8")
    pool = WorkerPool("heavy:f", timeout_seconds=1.0)
    assert values(pool.map([1, 2])) == [1, 2]
    pool.close()


def test_settings_that_make_no_sense_are_refused_and_a_limit_of_up_to_a_day_holds(pool_of):
    for settings in ({"workers": 0}, {"memory_mib": 0}):
        with pytest.raises(ValueError, match=f"not positive: .*{next(iter(settings))}=0"):
            WorkerPool("own_work:double", **settings)
    pool = pool_of("double", workers=1)
    for limit in (0.0, -1, math.inf, math.nan, 86_400.1, 1e10, 10**400, True, "5", [5.0], 1j):
        for refused in (
            lambda: WorkerPool("own_work:double", timeout_seconds=limit),  # noqa: B023 (called at once)
            lambda: pool.map([1], timeout_seconds=limit),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"timeout_seconds must be a positive number up to a day, 86400, not "):
                refused()
    for limit in (86_400, 86_400.0, 1):
        assert values(pool.map([1], timeout_seconds=limit)) == [2]


def test_threads_may_call_at_the_same_time(pool_of):
    pool = pool_of("double", workers=2)
    found = {}

    def call(first):
        found[first] = [pool.map(range(first, first + 10)) for _ in range(10)]

    threads = [threading.Thread(target=call, args=(first,)) for first in range(0, 60, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first in range(0, 60, 10):
        assert [values(outcomes) for outcomes in found[first]] == [[2 * n for n in range(first, first + 10)]] * 10
