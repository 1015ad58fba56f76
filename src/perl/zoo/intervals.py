"""How far a mean of scores may lie from the true one, also where few problems were asked or nearly all came out alike.

mean, standard error, number of problems -> ends of a confidence interval
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray
from scipy.special import betaincinv

from perl.run.tables import percent as percent

# Dimension: E evaluations.
Floats = NDArray[numpy.float64]
Values = Sequence[float] | Floats

ALIKE = "95 % interval, where problems came out alike and the standard error is 0.0"
"""What the text of an :class:`Estimate` has in brackets."""


@dataclass(frozen=True)
class Estimate:
    """A score from 0 to 1, and how far it may lie from the true one.

    Attributes:
        mean: The score.
        stderr: Its standard error, clustered by problem; None: it is not known.
        low: Lower end of its 95 % interval; None likewise.
        high: Upper end.
    """

    mean: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """``41.2 ± 1.3``: in percent, with the standard error; ``100.0 [88.4, 100.0]`` where that is 0.0.

        Problems that all came out alike have no spread to take an error from, which is no certainty.
        """
        if self.stderr is not None and percent(self.stderr) != percent(0.0):
            return f"{percent(self.mean)} ± {percent(self.stderr)}"
        if self.low is None or self.high is None:
            return percent(self.mean)
        return f"{percent(self.mean)} [{percent(self.low)}, {percent(self.high)}]"


def interval(
    mean: float, stderr: float, count: int, level: float = 0.95, *, difference: bool = False
) -> tuple[float, float]:
    """The confidence interval of a mean of scores.

    For rights and wrongs it is Clopper and Pearson's, which holds the true share at least as often as it says. For
    means of several completions it is as much narrower as their spread says. It is never a single point: where all
    problems came out alike, it says how many of those not asked may not.

    Args:
        mean: Score, 0..1.
        stderr: Its standard error, clustered by problem.
        count: Problems.
        level: Share of such intervals that hold the true mean, between 0 and 1.
        difference: The mean is one of differences of scores, -1..1.

    Returns:
        Low and high; both NaN for fewer than two problems or a standard error of NaN.
    """
    if count < 2 or math.isnan(stderr):
        return math.nan, math.nan
    low_E, high_E = intervals([mean], [stderr], count, level, difference=difference)
    return float(low_E[0]), float(high_E[0])


def intervals(
    mean: Values, stderr: Values, count: int, level: float = 0.95, *, difference: bool = False
) -> tuple[Floats, Floats]:
    """The same of many evaluations of as many problems each, at least two.

    Each end is a quantile of the beta distribution that has mean and variance of the Bayesian bootstrap (weights drawn
    from a flat Dirichlet) of the problems' scores and one more that is as bad, or as good, as a score can be. If all
    are 0 or 1 that is the posterior of Clopper and Pearson's limit, and the quantile is their limit.

    Args:
        mean: Of each evaluation, shape (E).
        stderr: Its standard error, shape (E).
        count: Problems of each.
        level: As in :func:`interval`.
        difference: As in :func:`interval`.

    Source: Clopper and Pearson 1934; the bootstrap with one more at the end of the range is Gaffke's bound (2005), in
        Learned-Miller and Thomas 2019, arXiv:1905.06208; the two moments in place of its quantile are our choice.
    """
    lowest, width = (-1.0, 2.0) if difference else (0.0, 1.0)
    share_E = numpy.clip((numpy.asarray(mean, float) - lowest) / width, 0.0, 1.0)
    square_E, most_E = (numpy.asarray(stderr, float) / width) ** 2, share_E * (1 - share_E)
    # Scores spread the most where all are 0 or 1. A larger error, as others may report, is taken for that of so many
    # fewer problems.
    with numpy.errstate(divide="ignore", invalid="ignore"):
        problems_E = numpy.where(square_E * (count - 1) > most_E, 1 + numpy.maximum(1, most_E / square_E), count)
    variance_E = numpy.minimum(square_E * (problems_E - 1), most_E)
    low_E = _gap(share_E, variance_E, problems_E, (1 - level) / 2)
    high_E = 1 - _gap(1 - share_E, variance_E, problems_E, (1 - level) / 2)
    return lowest + width * low_E, lowest + width * high_E


def score_text(share: float | None, error: float | None, problems: int | None) -> str:
    """The text of an :class:`Estimate` whose interval is computed here; a dash for no score."""
    if share is None:
        return "-"
    return str(Estimate(share, error, *(score_interval(share, error, problems) or ())))


def score_interval(share: float, error: float | None, problems: int | None) -> tuple[float, float] | None:
    """The 95 % interval of a score; None unless its standard error and the number of problems are known."""
    if error is None or problems is None or problems < 2:
        return None
    return interval(share, error, problems)


def _gap(share_E: Floats, variance_E: Floats, problems_E: Floats, tail: float) -> Floats:
    """The lower limit of the mean of scores of 0..1; 0 where all are 0."""
    low_E = numpy.zeros_like(share_E)
    some = share_E > 0
    share_E, variance_E, problems_E = share_E[some], variance_E[some], problems_E[some]
    total_E = problems_E + 1  # with one more, whose score is 0
    mean_E = problems_E / total_E * share_E
    spread_E = problems_E / total_E * (variance_E + share_E**2 / total_E) / (total_E + 1)
    size_E = mean_E * (1 - mean_E) / spread_E - 1
    low_E[some] = betaincinv(mean_E * size_E, (1 - mean_E) * size_E, tail)
    return low_E
