"""When enough servers have done something that all are asked to do.

tasks, one for each server -> those that are not done yet, once more than half are

With many servers one is always slow. More than half of those that do not fail have to be done; the others then get as
long again as these took, and at least two seconds. Of one or two servers none is left out.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import TypeVar

LEAST_SECONDS = 2.0
"""That a server has at least, from the beginning."""
TIMES_AS_LONG = 2.0
"""As the faster half took, from the beginning, before a server is late."""

T = TypeVar("T")


async def enough(tasks: Collection[asyncio.Task[T]], good: Callable[[asyncio.Task[T]], bool]) -> set[asyncio.Task[T]]:
    """Waits for enough of them.

    Args:
        tasks: One for each server.
        good: Whether one that is done has succeeded; those that have not do not count.

    Returns:
        Those that are late; they go on.
    """
    clock = asyncio.get_running_loop().time
    began, until = clock(), None
    pending, succeeded, moved = set(tasks), 0, asyncio.Event()

    def ended(task: asyncio.Task[T]) -> None:
        nonlocal succeeded
        pending.discard(task)
        succeeded += good(task)
        moved.set()

    for task in tasks:
        task.add_done_callback(ended)
    while pending:
        left = None if until is None else until - clock()
        if left is not None and left <= 0:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(moved.wait(), left)
        moved.clear()
        if succeeded <= len(pending):
            until = None
        elif until is None:
            until = began + max(LEAST_SECONDS, TIMES_AS_LONG * (clock() - began))
    for task in pending:
        task.remove_done_callback(ended)
    return pending
