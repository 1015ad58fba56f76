"""Of many settings those few that together hold the most pairs of values.

settings, count -> settings
"""

import itertools
from collections.abc import Sequence


def pairs_of(setting: Sequence[object]) -> set[tuple[int, object, int, object]]:
    """Every pair of a setting's values, each with its place."""
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(setting), 2)}


def most_pairs(settings: Sequence[tuple], count: int) -> list[tuple]:
    """Greedily: each time the first setting that adds the most pairs to those that are held already."""
    held, chosen = set(), []
    left = list(settings)
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda setting: len(pairs_of(setting) - held))
        left.remove(best)
        chosen.append(best)
        held |= pairs_of(best)
    return chosen
