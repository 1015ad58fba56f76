"""Functions in worker processes: what hangs or crashes costs its own item, and nothing outlives the parent."""

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from perl.rewards.pool import Outcome, WorkerPool, WorkerStartError

if os.name != "posix":
    pytest.skip("worker processes are POSIX only", allow_module_level=True)

LONG = 120.0  # seconds; for what must happen, on whatever machine

FUNCTIONS = '''\
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def double(item):
    return 2 * item


def pid(_):
    return os.getpid()


def environment(_):
    names = ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "OF_THE_PARENT"]
    return [*(os.environ[name] for name in names), os.getcwd(), sys.stdin.read()]


def noisy(item):
    print("a line of the function")
    os.write(1, b"bytes of the function\\n")
    return item


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def swallows():
    try:
        signal.raise_signal(signal.SIGVTALRM)
    except BaseException:
        return "made up"


def own_alarm():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1000)
    signal.alarm(0)
    return "its own alarm"


def open_files():
    command = [sys.executable, "-c", "import os; print(sorted(os.listdir('/dev/fd')))"]
    return subprocess.run(command, capture_output=True, text=True, close_fds=False).stdout


def leave_a_process():
    return subprocess.Popen(["sleep", "1000"]).pid


def leave_a_process_and_sleep():
    Path("child").write_text(str(leave_a_process()))
    time.sleep(10**6)


def leave_a_process_and_die():
    leave_a_process()
    os._exit(3)


def nested():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def without_limits_of_its_own():
    """As a library would that uses SIGALRM itself; then one call that no signal handler interrupts."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    one_long_call()


def one_long_call():
    return sum(itertools.repeat(1, 10**15))


def loop():
    while True:
        pass


def own_error(error):
    raise error


ACTIONS = {
    "sleep": lambda: time.sleep(10**6),
    "nap": lambda: time.sleep(2.5),  # longer than between two looks for the parent
    "loop": loop,
    "power": lambda: 5**5**5**5,
    "call": one_long_call,
    "unlimited": without_limits_of_its_own,
    "interrupted": lambda: signal.raise_signal(signal.SIGVTALRM),
    "swallows": swallows,
    "timer": lambda: signal.raise_signal(signal.SIGALRM),
    "alarm": own_alarm,
    "exit": lambda: os._exit(3),
    "system exit": lambda: sys.exit(4),
    "segfault": lambda: ctypes.string_at(0),
    "abort": lambda: signal.raise_signal(signal.SIGKILL),
    "recursion": lambda: ACTIONS["recursion"](),
    "memory": lambda: len(bytearray(10**10)),
    "long message": lambda: own_error(ValueError("no\\n" * 1000)),
    "no message": lambda: own_error(KeyError()),
    "unprintable": lambda: own_error(Unprintable()),
    "interrupt": lambda: own_error(KeyboardInterrupt()),
    "set": lambda: {1},
    "nested": nested,
    "files": open_files,
    "child": leave_a_process,
    "child, sleep": leave_a_process_and_sleep,
    "child, exit": leave_a_process_and_die,
    "pid": os.getpid,
}


def act(action):
    return ACTIONS[action]()


def act_after_a_sign(action):
    Path("begun").write_text(str(os.getpid()))
    return act(action)
'''


@pytest.fixture(autouse=True)
def _functions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_work.py").write_text(FUNCTIONS, encoding="utf-8")


@pytest.fixture
def pool_of():
    """Pools that are closed after the test."""
    pools = []

    def make(function, **settings):
        pools.append(WorkerPool(f"own_work:{function}", **{"timeout_seconds": LONG, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def wait_until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def is_known(pid):
    """Whether the system knows the process, be it as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(pid):
    """As above, but a zombie has ended: nobody may be there to wait for an orphan."""
    if not is_known(pid):
        return False
    if sys.platform != "linux":
        command = ["/bin/ps", "-o", "stat=", "-p", str(pid)]
        states = [subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()]
    else:  # its files are closed when the last of its threads has ended, which may be after the first one
        states = [state_of(thread) for thread in Path(f"/proc/{pid}/task").glob("*")]
    return any(state[:1] not in ("", "Z", "X") for state in states)


def state_of(thread):
    try:
        return (thread / "stat").read_text(encoding="utf-8").rpartition(")")[2].strip()
    except (FileNotFoundError, ProcessLookupError):  # ended just now
        return ""


def values(outcomes):
    assert [outcome.status for outcome in outcomes] == ["done"] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def run_script(text, **options):
    """A process that uses pools, with the test's import path."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{text}"
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, text=True, **options)


def test_outcomes_come_in_the_order_of_the_items(pool_of):
    pool = pool_of("double", workers=3)
    assert values(pool.map(range(1000))) == [2 * item for item in range(1000)]
    assert values(pool.map(["a", [1], 0.5])) == ["aa", [1, 1], 1.0]
    assert pool.map([]) == []
    assert pool.killed == 0


def test_no_item_starts_no_worker_and_one_item_starts_one(pool_of):
    pool = pool_of("pid", workers=8)
    assert pool.map([]) == []
    (first,) = values(pool.map([0]))
    for _ in range(20):
        assert values(pool.map([0])) == [first]


def test_started_workers_are_those_that_serve(pool_of):
    pool = pool_of("pid", workers=2)
    pool.start()
    pool.start()
    served = set(values(pool.map(range(200))))
    assert len(served) <= 2
    assert os.getpid() not in served


def test_a_worker_sees_the_parents_environment_but_no_gpu(pool_of, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_PARENT", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (seen,) = values(pool_of("environment").map([0]))
    assert seen == ["1", "", "here", str(tmp_path.resolve()), ""]


def test_what_a_function_prints_goes_to_stderr_and_neither_into_its_result_nor_among_ours(pool_of, capfd):
    assert values(pool_of("noisy").map([1, 2, 3])) == [1, 2, 3]
    output, errors = capfd.readouterr()
    assert errors.count("a line of the function\n") == errors.count("bytes of the function\n") == 3
    assert output == ""


@pytest.mark.parametrize("action", ["sleep", "loop", "power", "call", "unlimited"])
def test_what_never_ends_is_ended_and_the_others_are_not(pool_of, action):
    pool = pool_of("act", workers=2)
    pool.start()
    before, overran, after, last = pool.map(["pid", action, "pid", "pid"], timeout_seconds=3.0)
    assert overran.status == "timeout"
    assert overran.value is None
    assert overran.error
    assert overran.seconds > 0
    assert {before.status, after.status, last.status} == {"done"}


def test_a_worker_that_sleeps_past_the_limit_is_killed_and_replaced(pool_of):
    pool = pool_of("act", workers=1)
    (first,) = values(pool.map(["pid"]))
    (overran,) = pool.map(["sleep"], timeout_seconds=0.5)
    assert (overran.status, pool.killed) == ("timeout", 1)
    assert overran.seconds >= 0.5
    assert not is_known(first)
    assert values(pool.map(["pid"])) != [first]


def test_a_worker_that_its_own_timer_ended_overran(pool_of):
    """The signal that the kernel sends where the parent is too late, without the wait for it."""
    pool = pool_of("act", workers=1)
    overran, fine = pool.map(["timer", "pid"])
    assert (overran.status, overran.error) == ("timeout", "the worker was ended by SIGALRM")
    assert fine.status == "done"
    assert pool.killed == 1


@pytest.mark.parametrize("action", ["interrupted", "swallows"])
def test_a_function_that_is_interrupted_keeps_its_worker_and_has_no_result(pool_of, action):
    """The signal of the CPU timer, without the wait for it."""
    pool = pool_of("act", workers=1)
    first, interrupted, again = pool.map(["pid", action, "pid"])
    assert interrupted.status == "timeout"
    assert interrupted.error.startswith("interrupted after")
    assert first.value == again.value
    assert pool.killed == 0


def test_a_function_with_an_alarm_of_its_own_does_not_lift_the_limit(pool_of):
    first, second = pool_of("act", workers=1).map(["alarm", "sleep"], timeout_seconds=3.0)
    assert first == Outcome("done", "its own alarm", seconds=first.seconds)
    assert second.status == "timeout"


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("exit", "the worker ended with exit code 3"),
        ("segfault", "the worker was ended by SIGSEGV"),
        ("abort", "the worker was ended by SIGKILL"),
        ("child, exit", "the worker ended with exit code 3"),
    ],
)
def test_a_crash_costs_the_item_that_caused_it(pool_of, action, error):
    pool = pool_of("act", workers=2)
    outcomes = pool.map(["pid"] * 5 + [action] + ["pid"] * 5)
    assert [(outcome.status, outcome.error) for outcome in outcomes if outcome.status != "done"] == [("error", error)]
    assert outcomes[5].status == "error"
    assert values(pool.map(["pid"]))
    assert pool.killed == 0


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("long message", "ValueError: no no no"),
        ("no message", "KeyError"),
        ("unprintable", "Unprintable"),
        ("system exit", "SystemExit: 4"),
        ("interrupt", "KeyboardInterrupt"),
        ("recursion", "RecursionError: maximum recursion depth"),
        ("nested", "RecursionError: maximum recursion depth"),
        ("set", "TypeError: Object of type set is not JSON serializable"),
        ("unheard of", "KeyError: 'unheard of'"),
    ],
)
def test_an_exception_is_an_outcome_and_its_worker_goes_on(pool_of, action, error):
    first, failed, again = pool_of("act", workers=1).map(["pid", action, "pid"])
    assert (failed.status, failed.value) == ("error", None)
    assert failed.error.startswith(error)
    assert len(failed.error) <= 250
    assert "\n" not in failed.error
    assert first.value == again.value


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_is_bounded(pool_of):
    pool = pool_of("act", workers=1, memory_mib=100)
    first, failed, again = pool.map(["pid", "memory", "pid"])
    assert (failed.status, failed.error) == ("error", "MemoryError")
    assert first.value == again.value
    too_long, fine = pool.map(["0" * (200 << 20), "pid"])
    assert too_long.status == "error"
    assert fine.status == "done"


def test_numbers_and_text_that_json_is_short_of_arrive(pool_of):
    nan, infinite, text = values(pool_of("double").map([float("nan"), -float("inf"), "\ud800é\0"]))
    assert nan != nan
    assert infinite == -float("inf")
    assert text == "\ud800é\0" * 2


def test_a_long_item_and_a_long_value_arrive(pool_of):
    text = "0123456789" * 500_000
    assert values(pool_of("double").map([text, 1])) == [text * 2, 2]


def test_an_item_that_is_no_json_is_the_callers_mistake(pool_of):
    pool = pool_of("double")
    with pytest.raises(TypeError, match="item 1 is no JSON value"):
        pool.map([1, lambda: 1, 3])
    assert values(pool.map([1, 2, 3])) == [2, 4, 6]


def test_a_worker_that_died_while_it_was_idle_costs_nothing(pool_of):
    pool = pool_of("pid", workers=1)
    (first,) = values(pool.map([0]))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    (second,) = values(pool.map([0]))
    assert first != second
    assert pool.killed == 0


def test_a_started_worker_that_died_before_its_first_item_costs_nothing():
    Path("waiting.py").write_text(f"from pathlib import Path\n{FUNCTIONS}\nPath('worker').write_text(str(os.getpid()))")
    pool = WorkerPool("waiting:pid", workers=1, timeout_seconds=LONG)
    pool.start()
    first = int(Path("worker").read_text())
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    (second,) = values(pool.map([0]))
    assert first != second
    pool.close()


def test_a_worker_does_not_mind_ctrl_c(pool_of):
    pool = pool_of("pid", workers=1)
    (first,) = values(pool.map([0]))
    os.kill(first, signal.SIGINT)
    assert values(pool.map([0])) == [first]


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        ("", "no_such_module_at_all:f", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("", "broken:f", "AttributeError: module 'broken' has no attribute 'f'"),
        ("f = 3", "broken:f", "TypeError: broken:f cannot be called"),
        ("raise ValueError('not today')", "broken:f", "ValueError: not today"),
        ("import sys; sys.exit(2)", "broken:f", "SystemExit: 2"),
        ("import os; os._exit(5)", "broken:f", "ended with exit code 5"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_and_no_outcome(text, target, words):
    Path("broken.py").write_text(text, encoding="utf-8")
    pool = WorkerPool(target)
    for call in (lambda: pool.map([1, 2]), pool.start):
        with pytest.raises(WorkerStartError) as caught:
            call()
        assert words in str(caught.value)
        assert target in str(caught.value)
    assert pool.map([]) == []


def test_an_import_that_never_ends_is_an_error(monkeypatch):
    Path("endless.py").write_text("import time\ntime.sleep(10**6)\n", encoding="utf-8")
    monkeypatch.setattr("perl.rewards.pool.START_SECONDS", 0.5)
    with pytest.raises(WorkerStartError, match="not ready"):
        WorkerPool("endless:f").map([1])


def test_the_time_of_imports_is_not_the_items():
    Path("heavy.py").write_text("import time\ntime.sleep(2)\ndef f(item):\n    return item\n", encoding="utf-8")
    pool = WorkerPool("heavy:f", timeout_seconds=1.0)
    assert values(pool.map([1, 2])) == [1, 2]
    pool.close()


@pytest.mark.parametrize("settings", [{"workers": 0}, {"memory_mib": 0}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match="not positive"):
        WorkerPool("own_work:double", **settings)


@pytest.mark.parametrize(
    "limit",
    [0.0, -1, math.inf, math.nan, 86_400.1, 1e10, 10**400, True, "5", [5.0], 1j],
    ids=lambda limit: repr(limit)[:9],
)
def test_a_limit_that_no_timer_can_hold_is_refused(limit):
    for refused in (
        lambda: WorkerPool("own_work:double", timeout_seconds=limit),
        lambda: WorkerPool("own_work:double").map([1], timeout_seconds=limit),
    ):
        with pytest.raises(ValueError, match=r"timeout_seconds must be a positive number of at most 86400, not "):
            refused()


@pytest.mark.parametrize("limit", [86_400, 86_400.0, 1])
def test_a_limit_of_up_to_a_day_holds(pool_of, limit):
    assert values(pool_of("double", workers=1).map([1], timeout_seconds=limit)) == [2]


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


def test_a_closed_pool_leaves_no_process_and_can_be_used_again(pool_of):
    pool = pool_of("act", workers=2)
    used = set(values(pool.map(["pid"] * 50)))
    pool.map(["exit", "pid"])
    used |= set(values(pool.map(["pid"] * 50)))
    pool.close()
    pool.close()
    assert not any(map(is_known, used))
    again = set(values(pool.map(["pid"] * 50)))
    assert again.isdisjoint(used)


def test_a_pool_that_is_forgotten_leaves_no_process():
    pool = WorkerPool("own_work:pid")
    used = set(values(pool.map(range(50))))
    del pool
    gc.collect()
    assert not any(map(is_known, used))


def test_processes_that_a_function_started_end_with_its_worker(pool_of):
    pool = pool_of("act", workers=1)
    (left,) = values(pool.map(["child"]))
    assert is_running(left)
    pool.close()
    wait_until(lambda: not is_running(left))


def test_the_channel_is_open_in_no_other_process(pool_of):
    list_files = [sys.executable, "-c", "import os; print(sorted(os.listdir('/dev/fd')))"]

    def open_files():
        return subprocess.run(list_files, capture_output=True, text=True, check=True, close_fds=False).stdout

    before = open_files()
    pool = pool_of("act")
    pool.start()
    assert open_files() == before
    assert values(pool.map(["files"])) == ["['0', '1', '2', '3']\n"]  # the last one is the listed folder


@pytest.mark.parametrize("action", ["sleep", "call", "unlimited"])
def test_a_busy_worker_does_not_outlive_a_parent_that_is_killed(action):
    parent = run_script(
        "from perl.rewards.pool import WorkerPool\n"
        f"WorkerPool('own_work:act_after_a_sign', timeout_seconds=2.0).map([{action!r}])\n"
    )
    with parent:
        wait_until(lambda: Path("begun").is_file() and Path("begun").read_text())
        parent.kill()
    worker = int(Path("begun").read_text())
    wait_until(lambda: not is_running(worker))


def test_a_worker_with_time_left_does_not_outlive_a_parent_that_is_killed():
    """Nor does what its function started."""
    parent = run_script(
        "from perl.rewards.pool import WorkerPool\n"
        "WorkerPool('own_work:act_after_a_sign', timeout_seconds=3600).map(['child, sleep'])\n"
    )
    with parent:
        wait_until(lambda: Path("child").is_file() and Path("child").read_text())
        worker, child = int(Path("begun").read_text()), int(Path("child").read_text())
        assert is_running(worker)
        assert is_running(child)
        parent.kill()
    wait_until(lambda: not is_running(worker))
    wait_until(lambda: not is_running(child))


def test_a_worker_started_by_a_thread_outlives_the_thread(pool_of):
    """The parent is the process: a worker that took the thread for it would be gone."""
    pool = pool_of("act", workers=1)
    thread = threading.Thread(target=pool.start)
    thread.start()
    thread.join()
    first, slept, last = pool.map(["pid", "nap", "pid"])
    assert first.value == last.value
    assert slept.status == "done"


def test_an_idle_worker_does_not_outlive_a_parent_that_is_killed():
    script = (
        "from perl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool('own_work:pid', workers=1, timeout_seconds=3600)\n"
        "print(pool.map([0])[0].value, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with run_script(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    wait_until(lambda: not is_running(worker))


def test_workers_end_when_python_does_without_a_warning():
    script = (
        "from perl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool('own_work:pid', workers=1)\n"
        "print(pool.map([0])[0].value)\n"
    )
    with run_script(script, stdout=subprocess.PIPE) as parent:
        output, errors = parent.communicate()
    assert (parent.returncode, errors) == (0, "")
    assert not is_running(int(output))


def test_ctrl_c_ends_the_call_and_the_pool_goes_on():
    script = (
        "import json, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        "from perl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool('own_work:act_after_a_sign', workers=2, timeout_seconds=3600)\n"
        "try:\n"
        "    pool.map(['sleep', 'sleep', 'pid'])\n"
        "except KeyboardInterrupt:\n"
        "    print(json.dumps([outcome.status for outcome in pool.map(['pid', 'pid', 'pid'])]))\n"
    )
    with run_script(script, stdout=subprocess.PIPE, start_new_session=True) as parent:
        wait_until(lambda: Path("begun").is_file() and Path("begun").read_text())
        worker = int(Path("begun").read_text())
        os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate()
    assert (parent.returncode, errors, output) == (0, "", '["done", "done", "done"]\n')
    assert not is_running(worker)


def test_a_forked_process_has_workers_of_its_own():
    script = (
        "import os\n"
        "from perl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool('own_work:pid', workers=2)\n"
        "def served(): return {outcome.value for outcome in pool.map(range(100))}\n"
        "pool.start()\n"
        "before = served()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(0 if served().isdisjoint(before) else 1)\n"
        "_, status = os.waitpid(child, 0)\n"
        "after = served()\n"
        "print(status, len(before | after) <= 2)\n"
    )
    with run_script(script, stdout=subprocess.PIPE) as parent:
        output, errors = parent.communicate()
    assert (parent.returncode, errors, output) == (0, "", "0 True\n")


def test_a_process_forked_while_a_thread_waits_for_an_answer_can_call_too():
    script = (
        "import os, threading, time\n"
        "from pathlib import Path\n"
        "from perl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool('own_work:act_after_a_sign', workers=1, timeout_seconds=4.0)\n"
        "thread = threading.Thread(target=lambda: pool.map(['sleep']))\n"
        "thread.start()\n"
        "while not Path('begun').is_file(): time.sleep(0.01)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if pool.map(['pid'])[0].status == 'done' and Path('begun').write_text('') == 0 else 1)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(status, thread.is_alive())\n"
        "thread.join()\n"
        "print(pool.killed)\n"
    )
    script = f"import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n{script}"  # of fork beside threads
    with run_script(script, stdout=subprocess.PIPE) as parent:
        output, errors = parent.communicate()
    assert (parent.returncode, errors) == (0, "")
    assert output.splitlines() in (["0 True", "1"], ["0 False", "1"])
