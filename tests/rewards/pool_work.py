"""What worker processes are given to do in tests of their pool."""

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


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


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
    "loop": loop,
    "power": lambda: 5**5**5**5,
    "call": one_long_call,
    "unlimited": without_limits_of_its_own,
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


def values(outcomes):
    assert [outcome.status for outcome in outcomes] == ["done"] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]
