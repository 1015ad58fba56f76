"""Adapters by their score on a task, as far as the scores may be compared and can be distinguished.

entries, task -> Ranking

Scores of one protocol are ranked, those of others only named. Ranks are ranges: an adapter stands behind those that are
shown to be better, and before those that are shown to be worse.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perl.errors import PerlError, did_you_mean
from perl.run.tables import DASH, Row, TableCell, fact_cell, percent
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_interval
from perl.zoo.table import row_of, score_row, tasks_of

# A spread over seeds reaches so many standard deviations to both sides.
_SURE = 1.96
COLUMNS = ("rank", "name", "method", "base", "score", "base score", "gain", "mean over seeds")
_HOW_RANKED = (
    "Ranks are ranges: two scores differ where the 95 % interval of their difference, made of the intervals of "
    "both, excludes 0; the interval of a score is as wide as the spread over seeds if that is wider."
)
Ends = tuple[float, float]


@dataclass(frozen=True)
class Ranking:
    """The adapters that may be compared on a task.

    Attributes:
        protocol: What their scores share: hash of a protocol, or a metric of a source.
        rows: From the best score down, with the columns :data:`COLUMNS` and ``error``.
        notes: What must be known beside the ranks.
        others: Other protocol -> names of the entries that were measured under it.
    """

    protocol: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    others: dict[str, tuple[str, ...]]


def rank_task(entries: Sequence[Entry], task: str, protocol: str | None = None) -> Ranking:
    """Ranks the entries that were scored on a task.

    Args:
        entries: Of a zoo.
        task: The task.
        protocol: Part of what the scores must share; None: what most of them share.

    Raises:
        PerlError: No entry was scored on it, or none under that protocol.
    """
    groups: dict[str, list[tuple[Entry, TaskScore]]] = {}
    for entry in entries:
        score = entry.score(task)
        if score is not None:
            groups.setdefault(entry.comparable_as(score), []).append((entry, score))
    if not groups:
        raise PerlError(f"no entry of the zoo has a score on {task!r}", "", did_you_mean(task, tasks_of(entries)))
    wanted = [name for name in groups if protocol is None or protocol.lower() in name.lower()]
    if not wanted:
        raise PerlError(
            f"no score on {task} was measured so", f"--protocol {protocol}", f"there are: {'; '.join(groups)}"
        )
    # Of groups of one size the one that was measured here, whose names are hashes, then by name.
    chosen = min(wanted, key=lambda name: (-len(groups[name]), groups[name][0][0].provenance == "reported", name))
    others = {name: tuple(sorted(e.name for e, _ in group)) for name, group in sorted(groups.items()) if name != chosen}
    group = sorted(groups[chosen], key=lambda pair: (-pair[1].adapter, pair[0].name))
    ends = [ends_of(entry, score) for entry, score in group]
    notes = [_HOW_RANKED]
    if unknown := [entry.name for (entry, _), its in zip(group, ends, strict=True) if its is None]:
        what = "Without standard error and number of problems, so not distinguishable from any other"
        notes.append(f"{what}: {', '.join(unknown)}.")
    bases = sorted({entry.on_base for entry, _ in group})
    if len(bases) > 1:
        notes.append(f"The bases are not the same: {', '.join(bases)}.")
    notes += [f"Not ranked, measured otherwise ({name}): {', '.join(names)}." for name, names in others.items()]
    rows = []
    for (entry, score), its in zip(group, ends, strict=True):
        apart = [other for (_, other), theirs in zip(group, ends, strict=True) if differ(score, its, other, theirs)]
        better = sum(other.adapter > score.adapter for other in apart)
        first, last = 1 + better, len(group) - (len(apart) - better)
        seeds = entry.seed_scores(score)
        mean = statistics.mean(seeds) if len(seeds) > 1 else None
        placed = {
            "rank": fact_cell(str(first) if first == last else f"{first}-{last}"),
            "mean over seeds": TableCell(mean, DASH if mean is None else f"{percent(mean)} ({len(seeds)})"),
        }
        rows.append({**row_of(entry), **score_row(entry, score), **placed})
    return Ranking(chosen, tuple(rows), tuple(notes), others)


def ends_of(entry: Entry, score: TaskScore) -> Ends | None:
    """The 95 % interval of a score, as wide as the spread over seeds at least; None: it cannot be known."""
    found = score_interval(score.adapter, score.stderr, score.n)
    seeds = entry.seed_scores(score)
    if found is None or len(seeds) < 2:
        return found
    reach = _SURE * statistics.stdev(seeds)
    return min(found[0], score.adapter - reach), max(found[1], score.adapter + reach)


def differ(one: TaskScore, ends: Ends | None, other: TaskScore, other_ends: Ends | None) -> bool:
    """Whether two scores are shown to be different ones, the adapters being asked independently of each other.

    The lower end of the difference's interval is as far below it as the better score's lower end and the other's upper
    end are from their scores, together (the root of the sum of the squares).

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10; with
        exact limits it errs less often than one time in twenty (tests/zoo/test_ranking.py counts it).
    """
    if ends is None or other_ends is None:
        return False
    if one.adapter < other.adapter:
        return differ(other, other_ends, one, ends)
    return one.adapter - other.adapter > math.hypot(one.adapter - ends[0], other_ends[1] - other.adapter)
