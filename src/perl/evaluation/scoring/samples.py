"""Completions with their verdicts, kept as they come, so that an evaluation that was stopped goes on.

Sample -> samples.jsonl, a line each

A line names the policy by a hash of its name and of the way it was asked, never by a path: an adapter that was
trained again, or whose config was changed, is another one.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from perl.errors import PerlError
from perl.run.files import named, write_text
from perl.types import Verdict, VerdictStatus

Place = tuple[str, str, int]
"""Task, problem and number of a sample."""
NOT_JUDGED: Literal["not_judged"] = "not_judged"
"""Instead of a verdict, of a completion that was drawn to be judged later."""
SampleStatus = VerdictStatus | Literal["not_judged"]


@dataclass(frozen=True)
class Sample:
    """One completion of one problem.

    Attributes:
        task: The task's name.
        problem: The problem's id.
        index: Which of the problem's completions, from 0.
        seed: It was drawn with.
        text: What the policy wrote, without special tokens.
        tokens: Its length, the end token included.
        truncated: It was cut off.
        status: The verifier's verdict; ``not_judged`` where it was not asked yet.
        extracted: The answer in it, as it stands there.
    """

    task: str
    problem: str
    index: int
    seed: int
    text: str
    tokens: int
    truncated: bool
    status: SampleStatus
    extracted: str | None = None

    @property
    def right(self) -> bool:
        """Whether its answer is the gold answer."""
        return self.status == "right"

    @property
    def place(self) -> Place:
        """Which sample of an evaluation it is."""
        return self.task, self.problem, self.index

    def judged(self, verdict: Verdict) -> "Sample":
        """The same with another verdict and the answer that this found."""
        return replace(self, status=verdict.status, extracted=verdict.extracted)

    def may_be_of(self, longest: int) -> bool:
        """Whether it has a length that a completion of so many tokens at most can have.

        Without an end token a completion is cut off at the limit and nowhere else; nothing at all has no end token.
        """
        if self.truncated:
            return self.tokens == longest or (self.tokens == 0 and not self.text)
        return 0 < self.tokens <= longest


@dataclass(frozen=True)
class _Line(Sample):
    """A line of a file: a sample with what names its policy."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    policy: str = ""


_LINE = TypeAdapter(_Line)
_FIELDS = tuple(field.name for field in fields(Sample))


class SampleFile:
    """``samples.jsonl`` of an evaluation."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path

    def read(self, policy: str) -> dict[Place, Sample]:
        """The samples of a policy, by place; a malformed line, as one that a kill cut short, is left out.

        Args:
            policy: What names the policy and how it was asked.

        Raises:
            PerlError: The file cannot be read.
        """
        return {sample.place: sample for key, sample in self.lines() if key == policy}

    def append(self, policy: str, samples: Iterable[Sample]) -> None:
        """Adds samples; a kill right after loses none of them."""
        cut_short = self._cut_short()
        with named(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_short else "") + "".join(line_of(policy, sample) for sample in samples))

    def put_first(self, policies: Sequence[str], order: Sequence[Place]) -> None:
        """Puts the samples that a result stands on first, in their order; all others stay, after them."""
        ranks = {(key, place): rank for rank, (key, place) in enumerate((k, p) for k in policies for p in order)}
        known = {(key, sample.place): sample for key, sample in self.lines()}
        rows = sorted(known.items(), key=lambda item: ranks.get(item[0], len(ranks)))
        write_text(self.path, "".join(line_of(key, sample) for (key, _), sample in rows))

    def correct(self, policy: str, samples: Mapping[Place, Sample], dropped: Collection[Place]) -> None:
        """Writes samples of a policy anew, and takes others away."""
        known = {(key, sample.place): sample for key, sample in self.lines()}
        gone = {(policy, place) for place in dropped}
        known |= {(policy, place): sample for place, sample in samples.items()}
        write_text(self.path, "".join(line_of(key[0], one) for key, one in known.items() if key not in gone))

    def unreadable(self) -> int:
        """How many lines are malformed, the last one not counted where a kill cut it short."""
        return max(0, sum(line is None for line in self._read()) - self._cut_short())

    def _cut_short(self) -> bool:
        if not self.path.is_file() or self.path.stat().st_size == 0:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"

    def lines(self) -> Iterator[tuple[str, Sample]]:
        """What names the policy, and the sample, a line each; a malformed line is left out.

        Raises:
            PerlError: The file cannot be read.
        """
        return (line for line in self._read() if line is not None)

    def _read(self) -> Iterator[tuple[str, Sample] | None]:
        """Every line: a policy with a sample, or None."""
        try:
            if self.path.exists():
                with self.path.open("rb") as file:
                    yield from (_parsed(line) for line in file if line.strip())
        except OSError as error:
            raise PerlError(f"cannot be read: {error.strerror or error}", str(self.path)) from None


def line_of(policy: str, sample: Sample) -> str:
    """A sample as it stands in a file, with what names its policy."""
    return json.dumps({"policy": policy, **asdict(sample)}) + "\n"


def _parsed(line: bytes) -> tuple[str, Sample] | None:
    """A line's policy and sample; None: it holds none."""
    try:
        found = _LINE.validate_json(line)
    except ValidationError:
        return None
    return found.policy, Sample(**{name: getattr(found, name) for name in _FIELDS})
