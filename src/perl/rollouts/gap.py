"""Whether a step's rollouts are from the policy, judged by how far the engine's log-probs are from the trainer's.

mean |difference| of a step's tokens, steps that its rollouts are behind -> usual, or not

The log-prob parity check runs now and then; this compares every sampled token of every step. What is unusual proves
nothing yet: it is a reason for a parity check at once. Pure functions of numbers.
"""

import math
from dataclasses import dataclass, field

# The first on-policy steps define what is usual. In float32 rounding never explains a hundred times as much; in half
# precision, where it is close to the parity check's tolerance, never several times as much.
_FIRST_STEPS, _FACTOR, _FACTOR_AT_TOLERANCE = 5, 100.0, 4.0
# Of the parity check's tolerance: what is put down to rounding however little the first steps differed.
_FLOOR = 0.1
# Rollouts that are steps behind differ by what was learned since, which grows with the learning rate.
_GROWTH = 10.0
# After a parity check was passed, how much more is a reason for another one.
_AFTER_A_CHECK = 2.0
# Engines in float32 differ by kernels, from one prompt to the next by an order of magnitude.
_SMALLEST = 1e-4
# Rollouts of earlier policies that are further away than this, in nats, and than ever before, are another policy's.
_FAR_BEHIND = 1.0


@dataclass
class GapJudge:
    """What is usual in this run.

    Attributes:
        tolerance: Of the parity check, in nats.
    """

    tolerance: float
    _first: list[float] = field(default_factory=list)
    _behind: dict[int, float] = field(default_factory=dict)
    _checked: float = 0.0

    def limit(self, steps_behind: int = 0) -> float:
        """Largest mean difference, in nats, that is usual."""
        limit = self.tolerance
        if self._first:
            usual = sum(self._first) / len(self._first)
            most = max(self.tolerance, _FACTOR_AT_TOLERANCE * usual)
            floor = max(_FLOOR * self.tolerance, min(self.tolerance, _SMALLEST))
            limit = max(floor, min(_FACTOR * usual, most), _AFTER_A_CHECK * self._checked)
        if steps_behind == 0:
            return limit
        return max(limit, _GROWTH * self._behind.get(steps_behind, 0.0))

    def is_usual(self, gap: float, steps_behind: int = 0) -> bool:
        """Whether a step differs by no more than that; False for a non-finite number."""
        return math.isfinite(gap) and gap <= self.limit(steps_behind)

    def is_no_rounding(self, gap: float, steps_behind: int = 0) -> bool:
        """Whether rollouts differ by so much that they are another policy's, whoever passes a check later."""
        if steps_behind:  # a policy moves on by itself, but not by a nat and far beyond what it did so far
            return not gap <= max(_FAR_BEHIND, _GROWTH * self.limit(steps_behind))
        return not (self.is_usual(gap) or gap <= self.tolerance)

    def accept(self, gap: float, steps_behind: int = 0) -> None:
        """Takes a step for right: it was usual, or a parity check was passed."""
        if steps_behind:  # one unusual step does not make the next one usual
            known = self._behind.get(steps_behind, 0.0)
            self._behind[steps_behind] = max(known, min(gap, self.limit(steps_behind)))
        elif not self.is_usual(gap):
            self._checked = gap
        elif len(self._first) < _FIRST_STEPS:
            self._first.append(gap)
