"""How many connections a process has open to all its servers at a time.

limit of open files -> connections for completions, for what takes long, for what is answered at once

A connection is an open file, of which a process often may have 1,024. HTTP/1.1 takes one for each request under way,
so what has no connection waits here. Completions last for minutes, loads may, and would keep the renewal of a label
waiting, which others take for the end of this run: each kind has a share of its own.
"""

import asyncio
import resource

# Of the files that the process may open, the rest is for data, pipes, devices; and of these, those for completions.
_SHARE, _OF_COMPLETIONS = 0.5, 0.75
# What may take longer than so many seconds takes long.
QUICK_SECONDS = 30.0
# Of which nobody needs more, and with which anything works.
_MOST, _LEAST = 4096, 16


class Connections:
    """The connections of one pool of servers.

    Attributes:
        completions: Requests for completions that may be under way at a time; who sends them counts them.
    """

    def __init__(self, open_files: int | None = None) -> None:
        """Divides them.

        Args:
            open_files: That this process may have; None: as the operating system says.
        """
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
        most = _MOST if allowed == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, int(allowed * _SHARE)))
        self.completions = int(most * _OF_COMPLETIONS)
        others = most - self.completions
        self._quick, self._slow = asyncio.Semaphore(others // 2), asyncio.Semaphore(others - others // 2)

    def one(self, seconds: float | None) -> asyncio.Semaphore:
        """A connection for a request other than a counted one, to hold while it is under way.

        Args:
            seconds: That it may take; None: any time.
        """
        return self._quick if seconds is not None and seconds <= QUICK_SECONDS else self._slow
