"""Laps over the data: each draws the prompts that do not rest, in an order of its own.

chances, seed -> indices
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass
class Walk:
    """A walk that depends on its seed, what it is given and how far it is, and on nothing else.

    Attributes:
        size: Prompts of the data.
        seed: Of its laps.
        shuffled: Whether a lap goes through the data in an order of its own; else in that of the data.
        lap: Number of the lap that it is in.
        place: Prompts of this lap that are behind it.
    """

    size: int
    seed: int
    shuffled: bool = True
    lap: int = 0
    place: int = 0
    _drawn: tuple[int, NDArray[np.int64], Floats] | None = field(default=None, repr=False)

    def take(self, count: int, chance_N: Floats, without: Collection[int] = ()) -> list[int]:
        """The next prompts, no two the same.

        A prompt whose number of the lap, uniform in [0, 1), is not below its chance rests in this lap; so does one that
        the same call has taken in the lap before. Where a lap and
        the rest of the one before do not give enough, those that rest are drawn too, the likeliest first.

        Args:
            count: How many; fewer are given where there are fewer.
            chance_N: Of each prompt to be drawn in a lap, 0 to 1; 0: it cannot be drawn.
            without: Prompts that are not wanted now.
        """
        taken: list[int] = []
        unwanted = np.zeros(self.size, bool)
        unwanted[list(without)] = True
        for _ in range(2):
            order_N, uniform_N = self._of_lap()
            ahead = order_N[self.place :]
            fit = np.flatnonzero((uniform_N[ahead] < chance_N[ahead]) & ~unwanted[ahead])[: count - len(taken)]
            taken += ahead[fit].tolist()
            unwanted[taken] = True
            if len(taken) == count:
                self.place += int(fit[-1]) + 1 if len(fit) else 0
                return taken
            self.lap, self.place = self.lap + 1, 0
        order_N, _ = self._of_lap()
        resting = order_N[~unwanted[order_N] & (chance_N[order_N] > 0)]
        likeliest = np.argsort(-chance_N[resting], kind="stable")[: count - len(taken)]
        return taken + resting[likeliest].tolist()

    def _of_lap(self) -> tuple[NDArray[np.int64], Floats]:
        """The order of this lap, and each prompt's number in it."""
        if self._drawn is None or self._drawn[0] != self.lap:
            random = np.random.default_rng([self.seed, self.lap])
            order_N = random.permutation(self.size)
            self._drawn = self.lap, order_N if self.shuffled else np.arange(self.size), random.random(self.size)
        return self._drawn[1:]

    def state(self) -> dict[str, int]:
        """How far it is."""
        return {"lap": self.lap, "place": self.place}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes where :meth:`state` was taken."""
        self.lap, self.place = state["lap"], state["place"]
