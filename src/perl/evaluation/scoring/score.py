"""What a policy achieved on a task, from its samples.

samples of each problem -> Score
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perl.evaluation.scoring import metrics
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.scorers import normal
from perl.evaluation.scoring.task import MATH
from perl.rewards.verifier import check_all
from perl.zoo.intervals import Estimate, interval

UNJUDGED = ("timeout", "unjudged", "error", "unparsable_gold")
"""Verdicts that leave the answer undecided; such completions count as not right."""
_PAIRS_AT_ONCE = 50_000
HASHED = "sha256:"
"""Begins what stands for an answer that is too long to be published; only the same letters are the same answer."""


@dataclass(frozen=True)
class Score:
    """One policy on one task; shares and scores are from 0 to 1.

    Attributes:
        n: Problems.
        k: Completions a problem.
        accuracy: avg@k.
        stderr: Its standard error, clustered by problem; None for a single problem.
        low: Lower end of its 95 % interval; None likewise.
        high: Upper end.
        pass_at: k' -> pass@k', the unbiased estimate.
        pass_at_stderr: k' -> its standard error, clustered by problem; empty for a single problem.
        pass_at_low: k' -> the lower end of its 95 % interval; empty likewise.
        pass_at_high: k' -> the upper end.
        majority: maj@k.
        majority_stderr: Its standard error; None for a single problem.
        majority_low: Lower end of its 95 % interval; None likewise.
        majority_high: Upper end.
        mean_tokens: Mean length of a completion.
        tokens: Of all completions.
        truncated: Share of completions that were cut off.
        no_answer: Share without an answer.
        unjudged: Share that could not be compared with the gold answer; they count as not right.
    """

    n: int
    k: int
    accuracy: float
    stderr: float | None
    low: float | None
    high: float | None
    pass_at: Mapping[int, float]
    pass_at_stderr: Mapping[int, float]
    pass_at_low: Mapping[int, float]
    pass_at_high: Mapping[int, float]
    majority: float
    majority_stderr: float | None
    majority_low: float | None
    majority_high: float | None
    mean_tokens: float
    tokens: int
    truncated: float
    no_answer: float
    unjudged: float

    @property
    def average_estimate(self) -> Estimate:
        """avg@k with its error."""
        return Estimate(self.accuracy, self.stderr, self.low, self.high)

    @property
    def pass_estimate(self) -> Estimate:
        """pass@k with its error."""
        found = (self.pass_at_stderr, self.pass_at_low, self.pass_at_high)
        return Estimate(self.pass_at[self.k], *(of.get(self.k) for of in found))

    @property
    def majority_estimate(self) -> Estimate:
        """maj@k with its error."""
        return Estimate(self.majority, self.majority_stderr, self.majority_low, self.majority_high)


def score_samples(problems: Sequence[Sequence[Sample]], pass_at: Sequence[int] = (), scorer: str = MATH) -> Score:
    """The score of a policy on a task.

    Args:
        problems: The samples of each problem, the same number of each.
        pass_at: Further numbers for pass@k, beside the powers of two up to k.
        scorer: Name of what judged them.

    Raises:
        ValueError: There is no problem, or fewer completions than pass@k needs.
    """
    if not problems:
        raise ValueError("no problem, no score")
    right = rights(problems)
    every = [sample for samples in problems for sample in samples]
    k, average = len(right[0]), _estimate([statistics.fmean(row) for row in right])
    always = {2**power for power in range(k.bit_length())} | {k}  # no power is above k
    passes = {j: _estimate(metrics.pass_at_k_by_problem(right, j)) for j in sorted({*always, *pass_at})}
    answers = [[sample.extracted for sample in samples] for samples in problems]
    wrong = [[" ".join(s.extracted.split()) for s in samples if s.extracted and not s.right] for samples in problems]
    majority = _estimate(metrics.majority_by_problem(answers, right, same_meaning(wrong, scorer)))
    return Score(
        n=len(right),
        k=k,
        accuracy=average.mean,
        stderr=average.stderr,
        low=average.low,
        high=average.high,
        pass_at={j: found.mean for j, found in passes.items()},
        pass_at_stderr={j: found.stderr for j, found in passes.items() if found.stderr is not None},
        pass_at_low={j: found.low for j, found in passes.items() if found.low is not None},
        pass_at_high={j: found.high for j, found in passes.items() if found.high is not None},
        majority=majority.mean,
        majority_stderr=majority.stderr,
        majority_low=majority.low,
        majority_high=majority.high,
        mean_tokens=statistics.fmean(sample.tokens for sample in every),
        tokens=sum(sample.tokens for sample in every),
        truncated=statistics.fmean(sample.truncated for sample in every),
        no_answer=statistics.fmean(sample.status == "no_answer" for sample in every),
        unjudged=statistics.fmean(sample.status in UNJUDGED for sample in every),
    )


def _estimate(values: Sequence[float]) -> Estimate:
    """The mean over problems, with error and interval if there is more than one problem."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    error = metrics.error_of_mean(values)
    return Estimate(mean, error, *interval(mean, error, len(values)))


def rights(problems: Sequence[Sequence[Sample]]) -> list[list[bool]]:
    """One row a problem, one entry a completion: whether it is right."""
    return [[sample.right for sample in samples] for samples in problems]


def same_meaning(problems: Iterable[Sequence[str]], scorer: str = MATH) -> Callable[[str, str], bool]:
    r"""Whether two different answers to a problem mean the same, by the scorer's word.

    Args:
        problems: The answers to each problem, in the order in which they will be compared: a later one with an earlier.
        scorer: Name of what judged them.

    Returns:
        What knows it of these pairs; they are compared here, many at a time.
    """
    if scorer != MATH:
        return lambda later, earlier: normal(scorer, later) == normal(scorer, earlier)
    same: set[tuple[str, str]] = set()
    different = ([one for one in dict.fromkeys(answers) if not one.startswith(HASHED)] for answers in problems)
    pairs = itertools.chain.from_iterable(itertools.combinations(answers, 2) for answers in different)
    while some := list(itertools.islice(pairs, _PAIRS_AT_ONCE)):
        verdicts = check_all([later for _, later in some], [f"\\boxed{{{earlier}}}" for earlier, _ in some])
        same |= {(pair[1], pair[0]) for pair, verdict in zip(some, verdicts, strict=True) if verdict.right}
    return lambda later, earlier: (later, earlier) in same
