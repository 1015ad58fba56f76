"""A computation that should end at once, or fail instead of going on for ever."""

import signal
from contextlib import contextmanager


@contextmanager
def no_hang(seconds=5):
    """Interrupts a computation that would take minutes; one that ends takes milliseconds."""

    def give_up(*_):
        raise AssertionError("still computing")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
