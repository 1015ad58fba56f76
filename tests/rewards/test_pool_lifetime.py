"""When worker processes start and end: one that is gone is replaced, and nothing outlives the parent."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perl.run.workers.pool import WorkerPool
from tests.rewards.pool_work import FUNCTIONS, LONG, values

if os.name != "posix":
    pytest.skip("worker processes are POSIX only", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_work")


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


def run_script(text, **options):
    """A process that uses pools, with the test's import path."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{text}"
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, text=True, **options)


def test_workers_start_as_items_need_them_and_serve_all_that_follows(pool_of):
    pool = pool_of("pid", workers=8)
    assert pool.map([]) == []
    (first,) = values(pool.map([0]))
    assert {*values([pool.map([0])[0] for _ in range(20)])} == {first}
    pool = pool_of("pid", workers=2)
    pool.start()
    pool.start()
    served = set(values(pool.map(range(200))))
    assert len(served) <= 2
    assert os.getpid() not in served


def test_a_worker_that_sleeps_past_the_limit_is_killed_and_replaced(pool_of):
    pool = pool_of("act", workers=1)
    (first,) = values(pool.map(["pid"]))
    (overran,) = pool.map(["sleep"], timeout_seconds=0.5)
    assert (overran.status, pool.killed) == ("timeout", 1)
    assert overran.seconds >= 0.5
    slow = pool_of("act", workers=1, patience=3.0, warm_up=["pid"])
    stalled, loops = slow.map(["sleep", "loop"], timeout_seconds=0.5)
    assert (stalled.status, loops.status) == ("stalled", "timeout")
    assert stalled.seconds >= 1.5
    assert not is_known(first)
    assert values(pool.map(["pid"])) != [first]


def test_a_worker_that_died_while_it_was_idle_costs_nothing():
    Path("waiting.py").write_text(f"from pathlib import Path\n{FUNCTIONS}\nPath('worker').write_text(str(os.getpid()))")
    pool = WorkerPool("waiting:pid", workers=1, timeout_seconds=LONG)
    pool.start()
    first = int(Path("worker").read_text())
    assert values(pool.map([0])) == [first]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    (second,) = values(pool.map([0]))
    assert first != second
    assert pool.killed == 0
    pool.close()


def test_a_pool_that_is_closed_or_forgotten_leaves_no_process(pool_of):
    pool = pool_of("act", workers=2)
    used = set(values(pool.map(["pid"] * 50)))
    pool.map(["exit", "pid"])
    used |= set(values(pool.map(["pid"] * 50)))
    pool.close()
    pool.close()
    assert not any(map(is_known, used))
    again = set(values(pool.map(["pid"] * 50)))  # a closed pool can be used again
    assert again.isdisjoint(used)
    forgotten = WorkerPool("own_work:pid")
    used = set(values(forgotten.map(range(50))))
    del forgotten
    gc.collect()
    assert not any(map(is_known, used))


def test_processes_that_a_function_started_end_with_its_worker(pool_of):
    pool = pool_of("act", workers=1)
    (left,) = values(pool.map(["child"]))
    assert is_running(left)
    pool.close()
    wait_until(lambda: not is_running(left))


@pytest.mark.parametrize(
    ("action", "limit"),
    [
        *(("call", 2.0), ("child, sleep", 3600.0)),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (("sleep", 2.0), ("unlimited", 2.0), ("pid", 3600.0))
        ),
    ],
)
def test_no_worker_and_nothing_that_it_started_outlives_a_parent_that_is_killed(action, limit):
    parent = run_script(
        "from perl.run.workers.pool import WorkerPool\n"
        f"pool = WorkerPool('own_work:act_after_a_sign', workers=1, timeout_seconds={limit})\n"
        f"pool.map([{action!r}])\n"
        "print('idle', flush=True)\n"
        "sys.stdin.read()\n",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    sign = Path("child" if action.startswith("child") else "begun")
    with parent:
        if action == "pid":
            assert parent.stdout.readline() == "idle\n"
        wait_until(lambda: sign.is_file() and sign.read_text())
        processes = {int(Path(name).read_text()) for name in ("begun", sign.name)}
        if limit > LONG:
            assert all(map(is_running, processes))
        parent.kill()
    wait_until(lambda: not any(map(is_running, processes)))


def test_workers_end_when_python_does_without_a_warning():
    script = (
        "from perl.run.workers.pool import WorkerPool\n"
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
        "from perl.run.workers.pool import WorkerPool\n"
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
