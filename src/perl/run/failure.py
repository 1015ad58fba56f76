"""How a process of a run has ended: one record, whoever hears of it and however: joint work, the launcher, Ray.

error of a process, or its exit code -> Failure -> the line that names it, the error that the others raise
"""

import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from perl import errors
from perl.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    InterruptedRunError,
    Mistake,
    PerlError,
    ProcessError,
    first_line,
    visible,
)
from perl.run.files import parse_mapping
from perl.run.launched import HUB

LONGEST_FAILURE = 4096
"""Bytes of a record that another process is told."""
_LONGEST_PART = 1000  # characters of what is wrong, where, and the hint

Kind = Literal["done", "stopped", "mistake", "interrupted", "error", "lost", "killed"]
# After these the others end by themselves: all have been asked to, or nothing is left to do.
IN_ORDER = ("done", "stopped")


class LostProcessError(ProcessError):
    """Another process of the run has ended, and with it the run; the exit code is that one's."""

    code = "PRL217"


@dataclass(frozen=True)
class Failure:
    """How a process has ended, or what it could not do.

    Attributes:
        rank: Which.
        kind: ``done``; ``stopped``, as all are; ``mistake``, which its text says; ``interrupted``; ``error``, with a
            traceback; ``lost``: it has lost another one; ``killed``: it has said nothing.
        mistakes: What is wrong.
        exit_code: Its exit code, negative: the signal that killed it; None: nobody knows.
        error_class: The nearest class of ``perl.errors`` to its error's.
        code: That is printed after the error, as PRL208.
        pid: Its process id.
        host: Where it ran; empty: here.
        origin: Rank of the process whose error it has only passed on; None: it is its own.
        restartable: Whether the same command may succeed if it is started again.
    """

    rank: int
    kind: Kind
    mistakes: tuple[Mistake, ...] = ()
    exit_code: int | None = EXIT_FAILED
    error_class: str = "ProcessError"
    code: str = ProcessError.code
    pid: int = 0
    host: str = ""
    origin: int | None = None
    restartable: bool = True

    @classmethod
    def of(cls, error: BaseException | None, rank: int) -> "Failure":
        """That of this process, which the error has ended; None: it is done."""
        host = "" if os.environ.get(HUB, "").startswith("127.0.0.1:") else socket.gethostname()
        found = cls(rank, "done", exit_code=EXIT_DONE, pid=os.getpid(), host=host)
        if error is None:
            return found
        if isinstance(error, KeyboardInterrupt):
            return replace(found, kind="interrupted", exit_code=EXIT_INTERRUPTED)
        if not isinstance(error, PerlError):
            what = visible(f"{type(error).__name__}: {first_line(error)}")[:_LONGEST_PART]
            return replace(found, kind="error", exit_code=EXIT_FAILED, mistakes=(Mistake(what),))
        passed_on = error.origin is not None or isinstance(error, LostProcessError)
        kind: Kind = "lost" if passed_on else "mistake"
        parts = ((mistake.message, mistake.where, mistake.hint) for mistake in error.mistakes)
        return replace(
            found,
            kind="stopped" if isinstance(error, InterruptedRunError) else kind,
            mistakes=tuple(Mistake(*(visible(part)[:_LONGEST_PART] for part in texts)) for texts in parts),
            exit_code=error.exit_code,
            error_class=next(of.__name__ for of in type(error).__mro__ if of.__module__ == errors.__name__),
            code=error.code,
            origin=error.origin,
            restartable=error.restartable,
        )

    @property
    def who(self) -> str:
        """The process, as messages name it."""
        place = f"{self.pid} on {self.host}" if self.host else self.pid
        return f"rank {self.rank} (pid {place})"

    def __str__(self) -> str:
        """The line that says which process has ended, and of what."""
        if self.kind == "interrupted":
            return f"{self.who} was interrupted"
        if self.kind == "killed" and self.exit_code is None:
            return f"{self.who} was killed, without an exit message"
        if self.kind == "killed" and self.exit_code is not None:
            if self.exit_code >= 0:
                return f"{self.who} ended with exit code {self.exit_code}"
            names = {number.value: number.name for number in signal.Signals}
            return f"{self.who} was killed by {names.get(-self.exit_code, f'signal {-self.exit_code}')}"
        text = "\n".join(map(str, self.mistakes))
        return f"{self.who}: {text}" if self.kind == "mistake" else f"{self.who} failed: {text}"

    def tells_of(self, other: "Failure") -> bool:
        """Whether this process's error is another one's too, which need not be told again."""
        same = self.rank == other.rank or self.mistakes == other.mistakes
        return self.origin == other.rank or (self.kind == "mistake" and same)

    def error(self) -> PerlError:
        """The error as another process raises it: of the same class where it is one of ours, with its name."""
        found: PerlError = ProcessError(str(self))
        if self.kind == "interrupted":
            found = InterruptedRunError(str(self), hint="the same command goes on")
        elif self.kind not in ("error", "killed"):
            first, *others = self.mistakes
            named = self.rank == 0 or self.kind == "lost" or first.message.startswith("rank ")
            what = first.message if named else f"{self.who}: {first.message}"
            found = getattr(errors, self.error_class, PerlError)(what, first.where, first.hint, tuple(others))
            found.exit_code, found.code, found.restartable = self.exit_code or EXIT_FAILED, self.code, self.restartable
        found.origin = self.rank
        return found

    def encoded(self) -> bytes:
        """As JSON, of at most :data:`LONGEST_FAILURE` bytes."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode()
        if len(text) <= LONGEST_FAILURE:
            return text
        return replace(self, mistakes=(Mistake(self.mistakes[0].message[:100]),)).encoded()

    @classmethod
    def decoded(cls, text: bytes) -> "Failure":
        """The record in a message.

        Raises:
            ValueError: It holds none.
        """
        fields = parse_mapping(text)
        try:
            return cls(**{**fields, "mistakes": tuple(Mistake(**mistake) for mistake in fields["mistakes"])})
        except (KeyError, TypeError) as error:
            raise ValueError("it is no record of a process") from error


def first_cause(ends: Mapping[int, Failure]) -> Failure | None:
    """The first process that ended before its time, and not because of another one; None: there is none.

    Args:
        ends: By rank, in the order in which they became known.
    """
    return next((end for end in ends.values() if end.kind not in (*IN_ORDER, "lost")), None)
