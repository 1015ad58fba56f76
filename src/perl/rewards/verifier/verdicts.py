r"""Whether a completion ends in the gold answer: the one judge of training, evaluation and the command line.

gold answer, completion -> Verdict

What can be decided at once is decided here (``comparison.py``); the rest goes to worker processes that may be killed
(``symbolic.py``), each pair once. Any thread may ask.
"""

import functools
import math
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from perl.errors import RewardError
from perl.rewards.answers import extract_answer, gold_answer
from perl.rewards.verifier.comparison import LONGEST_ANSWER, is_plain, same_answer
from perl.run.launched import own_share
from perl.run.workers.pool import WorkerPool, WorkerStartError, check_limit
from perl.types import Verdict, VerdictStatus

# Processor time that the comparison of one pair may take. Typical pairs take a millisecond in a worker, the slowest
# gold answers of the public sets a fifth of a second.
TIMEOUT_SECONDS = 5.0
# Wall time may be so many times as long: beside other work a worker may get a small share of a core.
_PATIENCE = 20.0
# What the parser and the algebra build when they are first used.
_WARM_UP = ((r"\frac{\sqrt{x}}{2}+1", "1+x"), ("x+y=1", "y=1-x"))
WORKERS = 2
_JUDGE, _MEMORY_MIB = "perl.rewards.verifier.symbolic:judge", 2048
_REMEMBERED = 50_000

_Pair = tuple[str, str | None]


@dataclass(frozen=True)
class Judging:
    """How a recipe's answers are judged, in training and in evaluation alike.

    Attributes:
        solution: The column of the gold answers.
        timeout_seconds: Processor time that one comparison may take.
        workers: Processes that compare; those of a run on one machine divide them.
    """

    solution: str = "solution"
    timeout_seconds: float = TIMEOUT_SECONDS
    workers: int = WORKERS


def check(gold: str, completion: str) -> Verdict:
    r"""Whether a completion ends in the gold answer.

    Args:
        gold: The gold answer as data sets hold it: bare, after ``####`` (GSM8K), or in a worked solution's last
            ``\boxed{}``.
        completion: All that the model wrote.

    Returns:
        The verdict, with the answer as it stands in the completion.

    Raises:
        RewardError: The worker processes cannot be started.

    Example:
        >>> check("1/2", r"so it is \boxed{0.5}").status
        'right'
        >>> check("12", "I do not know").status
        'no_answer'
    """
    return check_all([gold], [completion])[0]


def check_all(
    golds: Sequence[str | float | None],
    completions: Sequence[str],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    workers: int = WORKERS,
) -> list[Verdict]:
    """The verdicts on many completions, as :func:`check` gives them; identical pairs are compared once.

    Args:
        golds: Gold answers, as text or numbers; without one the verdict is ``unparsable_gold``.
        completions: All that the model wrote, one a gold answer.
        timeout_seconds: Processor time that one comparison may take.
        workers: Processes that compare, for all processes of a run on this machine; at least one each.

    Raises:
        ValueError: A number is impossible.
        RewardError: The worker processes cannot be started.
    """
    check_limit(timeout_seconds)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers must be a whole number of at least 1, not {workers!r}")
    texts: list[str | None] = []
    for one in golds:
        # A tensor's text is that of its number, and 0.10000000149011612, a number of 32 bits, is 0.1.
        gold: Any = one
        if hasattr(gold, "cpu"):
            gold = gold.cpu().numpy()
        if isinstance(gold, float) and math.isfinite(gold):
            with suppress(OverflowError):
                bits = struct.pack("f", gold)
                if struct.unpack("f", bits) == (gold,):
                    shorter = (float(f"{gold:.{digits}g}") for digits in range(1, 10))
                    gold = next(one for one in shorter if struct.pack("f", one) == bits)
        texts.append(None if gold is None else str(gold))
    return _verifier(workers).verdicts(list(zip(texts, completions, strict=True)), timeout_seconds)


def unreadable(golds: Iterable[str | None], workers: int = WORKERS) -> list[int]:
    """Which gold answers can be matched letter for letter only, by position.

    Raises:
        RewardError: The worker processes cannot be started.
    """
    golds = list(golds)
    verdicts = check_all(golds, [""] * len(golds), workers=workers)
    return [i for i, verdict in enumerate(verdicts) if verdict.status == "unparsable_gold"]


def start_workers(workers: int = WORKERS) -> None:
    """Starts the worker processes now, before a GPU is used; they import beside what comes next.

    Raises:
        RewardError: They cannot be started.
    """
    _verifier(workers).start()


@functools.cache
def _verifier(workers: int) -> "_Verifier":
    return _Verifier(own_share(workers))


class _Verifier:
    """The worker processes and what they found out."""

    def __init__(self, workers: int) -> None:
        self._pool = WorkerPool(_JUDGE, workers, patience=_PATIENCE, warm_up=_WARM_UP, memory_mib=_MEMORY_MIB)
        self._known: OrderedDict[_Pair, VerdictStatus] = OrderedDict()
        self._lock = threading.Lock()

    def start(self) -> None:
        try:
            self._pool.start(wait=False)
        except WorkerStartError as error:
            raise _no_workers(error) from error

    def verdicts(self, rows: Sequence[tuple[str | None, str]], timeout_seconds: float) -> list[Verdict]:
        pairs = [(gold_answer(gold or ""), extract_answer(completion)) for gold, completion in rows]
        statuses: dict[_Pair, tuple[VerdictStatus, float]] = {}
        open_pairs: list[_Pair] = []
        for pair in dict.fromkeys(pairs):
            started = time.perf_counter()
            with self._lock:
                remembered = self._known.get(pair)
            status = remembered or told_at_once(*pair)
            if status is None:
                open_pairs.append(pair)
            else:
                statuses[pair] = status, time.perf_counter() - started
        try:
            outcomes = self._pool.map(open_pairs, timeout_seconds) if open_pairs else []
        except WorkerStartError as error:
            raise _no_workers(error) from error
        with self._lock:
            for pair, out in zip(open_pairs, outcomes, strict=True):
                if out.status == "done":  # what took too long may be done in time on a quieter machine
                    self._known[pair] = out.value
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        for pair, out in zip(open_pairs, outcomes, strict=True):
            told = out.value if out.status == "done" else "unjudged" if out.status == "stalled" else out.status
            statuses[pair] = told, out.seconds
        return [Verdict(statuses[pair][0], pair[1], statuses[pair][1]) for pair in pairs]


def told_at_once(gold: str, answer: str | None) -> VerdictStatus | None:
    """The verdict on a gold answer and an answer if it needs no algebra, else None.

    Args:
        gold: The gold answer itself, as :func:`perl.rewards.answers.gold_answer` gives it.
        answer: The answer, None if the completion has none.
    """
    if not gold:
        return "unparsable_gold"
    same = answer is not None and same_answer(gold, answer)
    if same:
        return "right"
    if len(gold) > LONGEST_ANSWER:
        return "unparsable_gold"
    if not is_plain(gold):
        return None
    if answer is None:
        return "no_answer"
    return "wrong" if same is False else None


def _no_workers(error: WorkerStartError) -> RewardError:
    return RewardError(f"answers cannot be compared: {error}", hint="pip install --force-reinstall perl-rl")
