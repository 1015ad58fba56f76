"""What can go wrong between a client and a Hub, asked for by a test.

request -> what is done to it

Requests are counted from the moment a fault is asked for: ``n=1`` is the next one. ``path`` counts only requests whose
path contains it, so that ``cut_after(1, path="/commit/")`` is the next commit, whatever comes before it.
"""

import threading
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Rule:
    """One fault: what is done to which of the requests that are still to come."""

    what: Literal["cut", "cut_after", "fail"]
    n: int
    times: int
    path: str
    status: int = 0
    retry_after: float | None = None
    page: bytes | None = None
    seen: int = 0

    def hits(self, path: str) -> bool:
        """Whether it strikes this request; counts it."""
        if self.path not in path:
            return False
        self.seen += 1
        return self.n <= self.seen < self.n + self.times


PAGE = b"<html><head><title>Access Denied &amp; logged</title></head><body>by the proxy</body></html>"


@dataclass
class Faults:
    """The faults of one Hub; none until asked for.

    Attributes:
        delay: Seconds before each answer.
    """

    rules: list[Rule] = field(default_factory=list)
    delay: float = 0.0
    corrupted: set[str] = field(default_factory=set)
    shortened: set[str] = field(default_factory=set)
    stale_commits: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self, n: int = 1, times: int = 1, path: str = "") -> None:
        """Cuts the connection at the n-th request from now, which is not carried out."""
        self._add(Rule("cut", n, times, path))

    def cut_after(self, n: int = 1, times: int = 1, path: str = "") -> None:
        """Carries out the n-th request from now, and cuts the connection before its answer."""
        self._add(Rule("cut_after", n, times, path))

    def fail(
        self, n: int = 1, status: int = 500, times: int = 1, path: str = "", retry_after: float | None = None
    ) -> None:
        """Answers the n-th request from now (and ``times - 1`` after it) with a status; it is not carried out."""
        self._add(Rule("fail", n, times, path, status, retry_after))

    def page(self, status: int = 403, times: int = 1, path: str = "") -> None:
        """Answers the next requests as a proxy does that stands before the Hub; they are not carried out."""
        self._add(Rule("fail", 1, times, path, status, page=PAGE))

    def slow(self, seconds: float) -> None:
        """Waits before each answer."""
        self.delay = seconds

    def corrupt(self, path: str) -> None:
        """Serves wrong bytes of the right length for this file of whichever repository."""
        self.corrupted.add(path)

    def short(self, path: str) -> None:
        """Serves the first half of this file as if it were all of it."""
        self.shortened.add(path)

    def stale(self, times: int = 1) -> None:
        """Before the next commit request another commit is slipped in."""
        self.stale_commits = times

    def clear(self) -> None:
        """No faults any more."""
        with self.lock:
            self.rules.clear()
            self.delay, self.stale_commits = 0.0, 0
            self.corrupted.clear()
            self.shortened.clear()

    def strike(self, path: str) -> Rule | None:
        """What strikes this request."""
        with self.lock:
            struck = [rule for rule in self.rules if rule.hits(path)]  # each rule counts every request
        return struck[0] if struck else None

    def takes_stale(self) -> bool:
        """Whether a commit is to be slipped in now."""
        with self.lock:
            self.stale_commits -= 1
            return self.stale_commits >= 0

    def body(self, path: str, data: bytes) -> bytes:
        """What is served for a file."""
        if path in self.corrupted:
            return bytes(byte ^ 0xFF for byte in data)
        return data[: len(data) // 2] if path in self.shortened else data

    def _add(self, rule: Rule) -> None:
        with self.lock:
            self.rules.append(rule)
