"""The chance of each prompt to be drawn: by what is remembered of its groups, and easy prompts first.

rewards of groups -> PromptMemory -> chances; column of numbers, share of the training -> Curriculum -> chances

Groups without variance teach nothing, and a prompt that had one will have another one more likely than not. Zheng et
al. 2025 (GRESO, arXiv:2506.02177) skip a prompt before it is sampled with a probability that grows with the number of
such groups in a row. Here it rests with 1 - explore^n, and never more surely than 1 - floor, where theirs have a base
probability for solved and one for hopeless prompts, both steered towards a share of groups without variance.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perl.errors import BrokenPromiseError, DataError, did_you_mean
from perl.trainer.prompts.order import Floats


@dataclass(frozen=True)
class PromptOutcome:
    """What a generation batch has shown of a prompt.

    Attributes:
        prompt: Its index in the data.
        reward: Mean of its group.
        flat: Whether the group's rewards agree.
    """

    prompt: int
    reward: float
    flat: bool


class PromptMemory:
    """The history of every prompt, as of a generation batch a fixed number before the one that is drawn.

    Data loaders read ahead, by as much as they like to. What a draw knows must not depend on that: it takes what was
    seen up to ``lag`` generation batches before, neither more nor less, so that a resumed run draws alike.

    Attributes:
        lag: Generation batches between a draw and the latest that it knows.
        flat_N: Groups without variance since the last one with variance.
        reward_N: Mean reward of the latest group; NaN: none was seen.
        seen_N: Groups seen.
    """

    def __init__(self, size: int, *, explore: float, floor: float, lag: int) -> None:
        """Remembers nothing yet.

        Args:
            size: Prompts of the data.
            explore: Factor on a prompt's chance for each group without variance in a row, 0 to 1.
            floor: Smallest chance.
            lag: Generation batches between a draw and the latest that it knows.
        """
        self._explore, self._floor, self.lag = explore, floor, lag
        self.flat_N = np.zeros(size, np.int32)
        self.seen_N = np.zeros(size, np.int32)
        self.reward_N = np.full(size, np.nan)
        self._known = -1  # the latest generation batch that counts
        self._waiting: dict[int, list[PromptOutcome]] = {}

    def note(self, batch: int, seen: Sequence[PromptOutcome]) -> None:
        """Keeps what a generation batch has shown; one that is made again, for a run that went on, is known already."""
        if batch > self._known:
            self._waiting[batch] = list(seen)

    def chances(self, batch: int) -> Floats:
        """(N,) chance of each prompt to be drawn in a lap, for a generation batch.

        Raises:
            BrokenPromiseError: What it would have to know was not noted.
        """
        while self._known < batch - self.lag:
            self._known += 1
            if self._known not in self._waiting:
                raise BrokenPromiseError(
                    f"generation batch {batch} is drawn before {self._known} was seen, which a resumed run would know"
                )
            for one in self._waiting.pop(self._known):
                self._count(one)
        return self.latest()

    def latest(self) -> Floats:
        """(N,) the chances as the last draw knew them."""
        return np.maximum(self._explore ** self.flat_N.astype(np.float64), self._floor)

    def begin(self) -> None:
        """A training begins at its first generation batch; what an earlier one has seen stays known."""
        for batch in sorted(self._waiting):
            for one in self._waiting[batch]:
                self._count(one)
        self._waiting.clear()
        self._known = -1

    def shares(self) -> dict[str, float]:
        """Shares of the prompts: seen at all; resting as solved and as hopeless, by the middle of all rewards known.

        Prompts rest by what the latest draw knew; all that were sampled count as seen. Where all rewards are the same,
        prompts rest as solved if that is above 0.
        """
        resting_N, seen_N = self.flat_N > 0, self.seen_N > 0
        seen_N[[one.prompt for seen in self._waiting.values() for one in seen]] = True
        known = self.reward_N[~np.isnan(self.reward_N)]
        middle = (known.min() + known.max()) / 2 if len(known) and known.min() < known.max() else 0.0
        high_N = np.nan_to_num(self.reward_N, nan=middle) > middle
        return {
            "seen": float(seen_N.mean()),
            "resting_solved": float((resting_N & high_N).mean()),
            "resting_hopeless": float((resting_N & ~high_N).mean()),
        }

    def _count(self, one: PromptOutcome) -> None:
        self.seen_N[one.prompt] += 1
        self.reward_N[one.prompt] = one.reward
        self.flat_N[one.prompt] = self.flat_N[one.prompt] + 1 if one.flat else 0

    def state(self) -> dict[str, Any]:
        """All that it knows, of plain values and tensors."""
        waiting = {str(batch): [[s.prompt, s.reward, s.flat] for s in seen] for batch, seen in self._waiting.items()}
        kept = {name: torch.from_numpy(getattr(self, name)) for name in ("flat_N", "seen_N", "reward_N")}
        return {**kept, "known": self._known, "waiting": waiting}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Knows what :meth:`state` knew."""
        for name in ("flat_N", "seen_N", "reward_N"):
            setattr(self, name, state[name].numpy().copy())
        self._known = state["known"]
        self._waiting = {int(batch): [PromptOutcome(*one) for one in seen] for batch, seen in state["waiting"].items()}


@dataclass(frozen=True)
class Curriculum:
    """The data from its easiest prompt to its hardest.

    Attributes:
        rank_N: Place of each prompt in that order, from 0.
        start: Share of the prompts that may be drawn at the begin.
        until: Share of the training after which all may be.
        least: Prompts that may be drawn in any case: those of a generation batch.
    """

    rank_N: NDArray[np.int64]
    start: float
    until: float
    least: int = 1

    def allowed(self, progress: float) -> NDArray[np.bool_]:
        """(N,) which prompts may be drawn; the share grows evenly.

        Args:
            progress: Share of the training that is behind, 0 to 1.
        """
        grown = self.start + (1 - self.start) * min(1.0, progress / self.until if self.until else 1.0)
        return self.rank_N < max(self.least, math.ceil(grown * len(self.rank_N)))


def difficulties(columns: Sequence[str], written: str, values_of: Any, where: str) -> NDArray[np.float64]:  # noqa: ANN401 (of any data)
    """(N,) numbers by which prompts are sorted, the smallest first.

    Args:
        columns: Of the data.
        written: A column's name; with a minus before it the largest number comes first.
        values_of: Gives a column's values by its name.
        where: Names the setting in errors.

    Raises:
        DataError: There is no such column, or a value of it is no finite number.
    """
    name = written if written in columns else written.removeprefix("-")
    if name not in columns:
        raise DataError(f"the data has no column {name!r}", where, did_you_mean(name, sorted(columns)))
    values = list(values_of(name))
    numbers_N = np.full(len(values), np.nan)
    for place, value in enumerate(values):
        if not isinstance(value, bool):
            with suppress(TypeError, ValueError):  # a CSV file's text may write a number
                numbers_N[place] = float(value)
    if not np.isfinite(numbers_N).all():
        row = int(np.isfinite(numbers_N).argmin())
        what = f"column {name!r} holds {values[row]!r} in row {row + 1}, which is not a finite number"
        raise DataError(what, where, "a column of numbers, the smallest for the easiest")
    return numbers_N * (1 if name == written else -1)


def ranked(numbers_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """(N,) place of each number among all, equal ones as they come."""
    rank_N = np.empty(len(numbers_N), np.int64)
    rank_N[np.argsort(numbers_N, kind="stable")] = np.arange(len(numbers_N))
    return rank_N
