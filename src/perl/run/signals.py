"""Signals of this process, handled for a while; one that it was told to ignore when it was started stays ignored.

signals, handler -> the same signals as they were before

``nohup`` starts a program with SIGHUP ignored, and a shell without a terminal starts ``command &`` with SIGINT ignored.
Both mean that the program is to go on.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals inside the block, but those that are ignored; only the main thread can.

    Args:
        numbers: Which.
        handler: As :func:`signal.signal` takes it.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [number for number, found in before.items() if found is not signal.SIG_IGN]
    try:
        for number in ours:
            signal.signal(number, handler)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)
