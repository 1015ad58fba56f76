"""avg@k and its clustered standard error as loops, from arXiv:2411.00640 (3.2)."""


def average(right: list[list[bool]]) -> float:
    """Share of all completions that are right; every problem has as many."""
    flat = [value for row in right for value in row]
    return sum(flat) / len(flat)
