"""What is remembered of each prompt: how often in a row its group had no variance, and on which side.

rewards of groups -> chance of each prompt to be drawn

Groups without variance teach nothing, and a prompt that had one will have another one more likely than not. Zheng et
al. 2025 (GRESO, arXiv:2506.02177) skip a prompt before it is sampled with a probability that grows with the number of
such groups in a row. Here it rests with 1 - explore^n, and never more surely than 1 - floor, where theirs have a base
probability for solved and one for hopeless prompts, both steered towards a share of groups without variance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perl.errors import BrokenPromiseError
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
