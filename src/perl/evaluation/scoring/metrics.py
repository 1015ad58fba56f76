"""Scores from verdicts, how far they can be trusted, and whether an adapter's differ from its base's.

(problems, k) rights and wrongs -> avg@k, pass@k, maj@k; standard error, interval, paired difference
differences -> the same with p values corrected for their number
problems, completions, tasks -> the smallest gain that is shown in 80 of 100 evaluations, by the rule of tables and
cards: its interval excludes 0, and its corrected p value is at most 0.05 (measured by ``benchmarks/power.py``)

Pure functions.
"""

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist

import numpy

from perl.zoo.intervals import interval

SMALL_P = 0.05
"""A difference with a larger p value is not called one, whatever its interval."""
# Up to here every way of flipping signs is tried; above, so many are drawn.
_EXACT_FLIPS_UP_TO = 16
_DRAWN_FLIPS = 20_000
_FLIPS_AT_ONCE = 500
# Sums of the same differences in another order may differ in their last bits; sums that do differ, differ by more.
_ROUNDING = 1e-9
SHOWN_IN = 0.8
"""Share of evaluations that show the smallest gain."""
# First guesses: the variance over problems of how much better the adapter solves them, and the mean over problems of
# p (1 - p), the variance of one completion's score, where the chances p to be solved are distributed as Beta(1/2, 1/2).
GAINS_VARIANCE, COMPLETION_VARIANCE = 0.2**2, 1 / 8
_STEPS = 40  # of halving an interval of length 1


@dataclass(frozen=True)
class Difference:
    """How much better the adapter is than its base on the same problems.

    Attributes:
        mean: avg@k of the adapter minus avg@k of the base.
        stderr: Standard error of the mean, clustered by problem; NaN for fewer than two problems.
        low, high: Ends of the 95 % interval of the mean (:func:`perl.zoo.intervals.interval`); NaN for fewer than two
            problems.
        p_value: Chance of a mean at least this far from 0, were base and adapter equally good on every problem; of
            this difference alone, but for what :func:`corrected` returns.
    """

    mean: float
    stderr: float
    low: float
    high: float
    p_value: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN: what is not known is None."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def error_of_mean(values: Sequence[float]) -> float:
    """Standard error of the mean of the problems' scores; NaN for fewer than two problems.

    Of avg@k it is clustered by problem: completions of one problem are not independent.

    Source: Miller 2024, "Adding error bars to evals", arXiv:2411.00640, section 3.2 (equal clusters: the standard
        error of the problems' means).
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def pass_at_k_by_problem(right: Sequence[Sequence[bool]], k: int) -> list[float]:
    """The chance that at least one of k completions of a problem is right; pass@k is the mean over problems.

    Args:
        right: One row a problem, at least k entries each; rows may differ in length.
        k: Completions that are drawn, without putting back, from those of a problem.

    Raises:
        ValueError: k < 1, or a problem has fewer than k completions.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1; in integers where the paper's code multiplies floats.
    """
    shortest = min((len(row) for row in right), default=k)
    if not 1 <= k <= shortest:
        raise ValueError(f"pass@{k} needs a k of at least 1 and {k} completions a problem, there are {shortest}")
    return [_chance_of_right(len(row), sum(row), k) for row in right]


def majority_by_problem(
    answers: Sequence[Sequence[str | None]],
    right: Sequence[Sequence[bool]],
    same: Callable[[str, str], bool] | None = None,
) -> list[float]:
    """Whether the most frequent answer of each problem is right: maj@k, self-consistency, is their mean.

    A completion without an answer does not vote, and a problem without any vote is wrong. Right answers are one class;
    the others are classes by themselves. Where classes tie, the score is what drawing one of them gives on average.

    Args:
        answers: One row a problem, the answer of each of its k completions, None where it has none.
        right: The verdicts on them, same shape.
        same: Whether two answers that are not right are the same one; asked of texts that differ in more than white
            space. What it holds together by way of a third answer is one class too. None: only equal texts are.

    Raises:
        ValueError: The shapes differ.

    Source: Wang et al. 2022, arXiv:2203.11171, section 2 (unweighted vote); how ties count is our choice.
    """
    scores = []
    for row, is_right in zip(answers, right, strict=True):
        votes = [vote for vote in zip(row, is_right, strict=True) if vote[0] is not None]
        votes_right = sum(agrees for _, agrees in votes)
        votes_by_text = Counter(" ".join(str(answer).split()) for answer, agrees in votes if not agrees)
        votes_wrong = [sum(votes_by_text[one] for one in texts) for texts in answer_classes(list(votes_by_text), same)]
        most = max([votes_right, *votes_wrong])
        scores.append(0.0 if votes_right < most or most == 0 else 1 / (1 + votes_wrong.count(most)))
    return scores


def paired_difference(base: Sequence[Sequence[float]], adapter: Sequence[Sequence[float]]) -> Difference:
    """How much better the adapter is than the base, problem by problem.

    Args:
        base: One row a problem: rights and wrongs, or scores from 0 to 1.
        adapter: One row a problem, the same problems in the same order; k may differ from the base's.

    Returns:
        Mean, standard error and interval, and the p value of a two-sided test that flips the signs of the problems'
        differences: all ways of it for up to 16 that are not 0, else 20,000 drawn ones, the same at every call.

    Raises:
        ValueError: The numbers of problems differ, or there is none.

    Source: Miller 2024, arXiv:2411.00640, section 4.2; the test is not the paper's but Fisher's (1935).
    """
    differences = [statistics.fmean(a) - statistics.fmean(b) for b, a in zip(base, adapter, strict=True)]
    mean, stderr = statistics.fmean(differences), error_of_mean(differences)
    low, high = interval(mean, stderr, len(differences), difference=True)
    return Difference(mean, stderr, low, high, _sign_flip_p_value(differences))


def corrected(differences: Sequence[Difference | None], family: int = 0) -> list[Difference | None]:
    """Differences that are looked at together, with p values that say so: Holm's correction for their number.

    Of m differences of which none is real, one with a p value of at most 0.05 is then found in at most 5 of 100 cases,
    whatever they have to do with each other.

    Args:
        differences: None, and those without a p value, stay as they are and are not counted.
        family: From how many differences these were chosen by what they are, where those are more: of each with the
            best of n it is n (n - 1) / 2, since any two could have been the best and another one. It takes the place
            of m, which is never too small: among all of the family the i-th of these has at least the rank i.

    Returns:
        In the same order; the i-th smallest p value is multiplied by m + 1 - i, is at least the one before it, and at
        most 1. A single one keeps its own.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6,
        in the form of adjusted p values (Wright 1992, Biometrics 48).
    """
    found = list(differences)
    tested = [(one.p_value, i) for i, one in enumerate(found) if one is not None and not math.isnan(one.p_value)]
    largest, tests = 0.0, max(len(tested), family)
    for step, (p_value, i) in enumerate(sorted(tested)):
        largest = max(largest, min(1.0, (tests - step) * p_value))
        one = found[i]
        found[i] = None if one is None else replace(one, p_value=largest)
    return found


@functools.lru_cache(maxsize=10_000)  # few problems of a task differ in how many completions are right
def _chance_of_right(n: int, c: int, k: int) -> float:
    """Chance that k of n completions, c of which are right, hold at least one right one (hypergeometric)."""
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def answer_classes(texts: Sequence[str], same: Callable[[str, str], bool] | None) -> list[list[str]]:
    """Different texts, those that are the same answer together, whatever the order of the texts."""
    if same is None:
        return [[text] for text in texts]
    classes: list[list[str]] = []
    for text in texts:
        near = [members for members in classes if any(same(text, member) for member in members)]
        classes = [members for members in classes if members not in near] + [[text, *itertools.chain(*near)]]
    return classes


def _sign_flip_p_value(differences: Sequence[float]) -> float:
    values_P = numpy.array([value for value in differences if value != 0.0])
    least = abs(float(values_P.sum())) - _ROUNDING
    if len(values_P) <= _EXACT_FLIPS_UP_TO:
        flips = numpy.arange(2 ** len(values_P))[:, None] >> numpy.arange(len(values_P)) & 1
        return float(numpy.mean(abs((1 - 2 * flips) @ values_P) >= least))
    generator = numpy.random.default_rng(0)
    as_far = 0
    for _ in range(_DRAWN_FLIPS // _FLIPS_AT_ONCE):  # the same flips as one at a time, from the same generator
        flips = generator.integers(0, 2, size=(_FLIPS_AT_ONCE, len(values_P)))
        as_far += int(numpy.count_nonzero(abs(values_P.sum() - 2 * (flips @ values_P)) >= least))
    # The flips that were observed count as one of them, or the p value could be 0.
    return (as_far + 1) / (_DRAWN_FLIPS + 1)


def guessed_error(problems: int, k: int) -> float:
    """The standard error that a difference of base and adapter will have, as far as one can know beforehand.

    Args:
        problems: At least one.
        k: Completions of each, of the base and of the adapter.

    Source: Miller 2024, "Adding error bars to evals", arXiv:2411.00640, section 5, equation 9 without the logarithm of
        the two levels, which :func:`smallest_gain` has.
    """
    return math.sqrt((GAINS_VARIANCE + 2 * COMPLETION_VARIANCE / k) / problems)


def smallest_gain(stderr: float, problems: int, tasks: int = 1) -> float | None:
    """The smallest true gain that 80 of 100 evaluations show.

    Args:
        stderr: Of the difference, more than 0.
        problems: Of the task.
        tasks: Differences that are looked at together: the level is that of Holm's first step, 0.05 / tasks. Once
            another one is shown a smaller gain is enough.

    Returns:
        0..1; None: so few problems show no gain, however large.

    Source: Miller 2024, arXiv:2411.00640, section 5, for the p value. The interval is wider than Student's where
        problems are few (:func:`perl.zoo.intervals.interval`), so that the mean that 80 of 100 evaluations exceed must
        be one whose interval excludes 0, too.
    """
    level = SMALL_P / tasks
    if problems < 2 or 2 / 2**problems > level:  # the smallest p value that flipping all signs can have
        return None
    normal = NormalDist()
    for_p = normal.inv_cdf(1 - level / 2) * stderr
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if interval(middle, stderr, problems, difference=True)[0] > 0:
            high = middle
        else:
            low = middle
    gain = max(for_p, high) + normal.inv_cdf(SHOWN_IN) * stderr
    return gain if gain <= 1 else None


def power_line(problems: int, k: int, tasks: int = 1) -> str:
    """What a plan says of it: ``30 problems x 16: a gain below 18 points is missed in more than 1 of 5 evaluations``.

    Args:
        problems: Of a task.
        k: Completions of each.
        tasks: Differences that will be looked at together.
    """
    return f"{problems:,} problems x {k}: {power_words(guessed_error(problems, k), problems, tasks)}"


def power_words(stderr: float, problems: int, tasks: int = 1) -> str:
    """The part of it that says how small a gain can be; arguments as those of :func:`smallest_gain`."""
    together = f" (Holm over {tasks})" if tasks > 1 else ""
    gain = smallest_gain(stderr, problems, tasks)
    if gain is None:
        return f"too few to show any gain{together}"
    points = 100 * gain
    return (
        f"a gain below {points:.{0 if points >= 9.95 else 1}f} points is missed in more than 1 of 5 evaluations"
        f"{together}"
    )
