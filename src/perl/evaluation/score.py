"""What a policy achieved on a task, from its samples.

samples of each problem -> Score

Knows nothing of models, files or of a second policy.
"""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perl.evaluation import metrics
from perl.evaluation.samples import Sample
from perl.rewards.verifier import check, check_all
from perl.types import Verdict

logger = logging.getLogger("perl")

# G-Pass@k is reported for this k, as in its paper and in lighteval, where there are as many completions of a problem.
G_PASS_K = 16
G_PASS_THRESHOLDS = (0.25, 0.5, 0.75, 1.0)
UNJUDGED = ("timeout", "error", "unparsable_gold")
"""Verdicts that say nothing of the answer; such completions count as not right."""
NOT_FROM_RIGHTS = ("majority", "mean_tokens", "tokens", "truncated", "no_answer", "unjudged")
"""Fields of a score that take more than which completions are right."""
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
        majority: maj@k.
        g_pass: ``0.5`` -> G-Pass@16 at that threshold, ``mean`` -> mG-Pass@16; empty below 16 completions a problem.
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
    majority: float
    mean_tokens: float
    tokens: int
    truncated: float
    no_answer: float
    unjudged: float
    g_pass: Mapping[str, float] = field(default_factory=dict)


def score_samples(problems: Sequence[Sequence[Sample]], pass_at: Sequence[int] = ()) -> Score:
    """The score of a policy on a task.

    Args:
        problems: The samples of each problem, the same number of each.
        pass_at: Further numbers for pass@k, beside the powers of two up to k.

    Raises:
        ValueError: There is no problem, or fewer completions than pass@k needs.
    """
    if not problems:
        raise ValueError("no problem, no score")
    right = rights(problems)
    every = [sample for samples in problems for sample in samples]
    k, error = len(right[0]), metrics.standard_error(right)
    accuracy = metrics.average_at_k(right)
    known = not math.isnan(error)
    low, high = metrics.interval(accuracy, error, len(right)) if known else (None, None)
    return Score(
        n=len(right),
        k=k,
        accuracy=accuracy,
        stderr=error if known else None,
        low=low,
        high=high,
        pass_at={j: metrics.pass_at_k(right, j) for j in sorted({*pass_numbers(k), *pass_at})},
        majority=metrics.majority_at_k([[s.extracted for s in samples] for samples in problems], right, same_meaning),
        g_pass=_g_pass(right) if k >= G_PASS_K else {},
        mean_tokens=statistics.fmean(sample.tokens for sample in every),
        tokens=sum(sample.tokens for sample in every),
        truncated=statistics.fmean(sample.truncated for sample in every),
        no_answer=statistics.fmean(sample.status == "no_answer" for sample in every),
        unjudged=statistics.fmean(sample.status in UNJUDGED for sample in every),
    )


def judge_rows(completions: Sequence[Sequence[str]], golds: Sequence[str]) -> list[list[Verdict]]:
    """The verdict of each completion; those that could not be judged are said.

    Args:
        completions: One row a problem.
        golds: One a problem.
    """
    repeated = [gold for gold, row in zip(golds, completions, strict=True) for _ in row]
    verdicts = check_all(repeated, [text for row in completions for text in row])
    unjudged = sum(verdict.status in UNJUDGED for verdict in verdicts)
    if unjudged:
        what = "%d of %d completions could not be compared with the gold answer and count as not right"
        logger.warning(what, unjudged, len(verdicts))
    one_by_one = iter(verdicts)
    return [[next(one_by_one) for _ in row] for row in completions]


def rights(problems: Sequence[Sequence[Sample]]) -> list[list[bool]]:
    """One row a problem, one entry a completion: whether it is right."""
    return [[sample.right for sample in samples] for samples in problems]


def pass_numbers(k: int) -> list[int]:
    """For which pass@k' is always reported: the powers of two up to k, and k."""
    return sorted({*(2**power for power in range(k.bit_length()) if 2**power <= k), k})


def _g_pass(right: Sequence[Sequence[bool]]) -> dict[str, float]:
    found = {f"{t:g}": metrics.g_pass_at_k(right, G_PASS_K, t) for t in G_PASS_THRESHOLDS}
    return {**found, "mean": metrics.mean_g_pass_at_k(right, G_PASS_K)}


def same_meaning(one: str, other: str) -> bool:
    r"""Whether two answers that differ mean the same, by the verifier's word."""
    if one.startswith(HASHED) or other.startswith(HASHED):
        return False
    return check(one, f"\\boxed{{{other}}}").right
