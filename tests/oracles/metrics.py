"""avg@k and its clustered standard error as loops, from arXiv:2411.00640 (3.2)."""

import math


def average(right: list[list[bool]]) -> float:
    """Share of all completions that are right; every problem has as many."""
    flat = [value for row in right for value in row]
    return sum(flat) / len(flat)


def clustered_standard_error(right: list[list[bool]]) -> float:
    """Root of the summed products of residuals within each problem, over the completions; n/(n-1) for few problems."""
    mean, completions, problems = average(right), sum(len(row) for row in right), len(right)
    total = 0.0
    for row in right:
        for one in row:
            for other in row:
                total += (one - mean) * (other - mean)
    return math.sqrt(total * problems / (problems - 1)) / completions
