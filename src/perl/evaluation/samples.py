"""Completions with their verdicts, kept as they come, so that an evaluation that was stopped goes on.

Sample -> samples.jsonl, a line each

A line names the policy by the hash of its weights and the way it was asked, never by a path: an adapter that was
trained again is another one. Knows nothing of models or metrics.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perl.run import write_text
from perl.types import VerdictStatus

Place = tuple[str, str, int]
"""Task, problem and number of a sample."""


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
        status: The verifier's verdict.
        extracted: The answer in it, as it stands there.
    """

    task: str
    problem: str
    index: int
    seed: int
    text: str
    tokens: int
    truncated: bool
    status: VerdictStatus
    extracted: str | None = None

    @property
    def right(self) -> bool:
        """Whether its answer is the gold answer."""
        return self.status == "right"

    @property
    def place(self) -> Place:
        """Which sample of an evaluation it is."""
        return self.task, self.problem, self.index


class SampleFile:
    """``samples.jsonl`` of an evaluation."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path

    def read(self, policy: str) -> dict[Place, Sample]:
        """The samples of a policy, by place; a line that a kill cut short counts as never written.

        Args:
            policy: What names the policy and how it was asked.
        """
        return {sample.place: sample for key, sample in self.lines() if key == policy}

    def append(self, policy: str, samples: Iterable[Sample]) -> None:
        """Adds samples; a kill right after loses none of them."""
        cut_short = self.path.is_file() and self.path.stat().st_size > 0 and not self._ends_a_line()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_short else "") + "".join(_line(policy, sample) for sample in samples))

    def put_first(self, policies: Sequence[str], order: Sequence[Place]) -> None:
        """Puts the samples that a result stands on first, in their order; all others stay, after them."""
        ranks = {(key, place): rank for rank, (key, place) in enumerate((k, p) for k in policies for p in order)}
        known = {(key, sample.place): sample for key, sample in self.lines()}
        rows = sorted(known.items(), key=lambda item: ranks.get(item[0], len(ranks)))
        write_text(self.path, "".join(_line(key, sample) for (key, _), sample in rows))

    def _ends_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"

    def lines(self) -> Iterable[tuple[str, Sample]]:
        """What names the policy, and the sample, a line each; a line that is none of ours is left out."""
        if not self.path.is_file():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    fields = json.loads(line)
                    yield fields.pop("policy"), Sample(**fields)
                except (json.JSONDecodeError, TypeError, KeyError, AttributeError):
                    continue


def _line(policy: str, sample: Sample) -> str:
    return json.dumps({"policy": policy, **asdict(sample)}) + "\n"
