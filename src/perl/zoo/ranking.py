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
from perl.run.tables import percent, signed_percent
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_interval, score_text
from perl.zoo.listing import Cell, Row, fact_cell, tasks_of

# A spread over seeds reaches so many standard deviations to both sides.
_SURE = 1.96
_SMALL_P = 0.05
COLUMNS = ("rank", "name", "method", "base", "score", "base score", "gain", "mean over seeds")


@dataclass(frozen=True)
class RankedAdapter:
    """An adapter with its place.

    Attributes:
        entry: The adapter.
        score: On the task.
        error: Standard error, or the standard deviation over seeds if that is larger; None: neither is known.
        ends: Of the score's 95 % interval, or of the spread over seeds if that is wider; None: not known.
        seeds: Scores of the same recipe with each seed, its own first.
        best: The best rank that it may have.
        worst: The worst.
    """

    entry: Entry
    score: TaskScore
    error: float | None
    ends: tuple[float, float] | None
    seeds: tuple[float, ...]
    best: int
    worst: int

    @property
    def rank(self) -> str:
        """``3``, or ``2-4`` where it cannot be distinguished from others."""
        return str(self.best) if self.best == self.worst else f"{self.best}-{self.worst}"


@dataclass(frozen=True)
class Ranking:
    """The adapters that may be compared on a task.

    Attributes:
        task: The task.
        protocol: What their scores share: hash of a protocol, or a metric of a source.
        ranked: From the best score down.
        others: Other protocol -> names of the entries that were measured under it.
    """

    task: str
    protocol: str
    ranked: tuple[RankedAdapter, ...]
    others: dict[str, tuple[str, ...]]

    def notes(self) -> list[str]:
        """What must be known beside the ranks."""
        notes = [
            "Ranks are ranges: two scores differ where the 95 % interval of their difference, made of the intervals of "
            "both, excludes 0; the interval of a score is as wide as the spread over seeds if that is wider."
        ]
        unknown = [found.entry.name for found in self.ranked if found.ends is None]
        what = "standard error and number of problems"
        if len(unknown) == len(self.ranked):
            notes.append(f"No score has a known {what}: none can be distinguished from any other.")
        elif unknown:
            notes.append(f"Without {what}, so not distinguishable from any other: {', '.join(unknown)}.")
        bases = sorted({found.entry.on_base for found in self.ranked})
        if len(bases) > 1:
            notes.append(f"The bases are not the same: {', '.join(bases)}.")
        notes += [
            f"Not ranked, measured otherwise ({protocol}): {', '.join(names)}."
            for protocol, names in self.others.items()
        ]
        return notes

    def rows(self) -> list[Row]:
        """The ranks as a list, with the columns :data:`COLUMNS`."""
        return [_row(found) for found in self.ranked]


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
    return Ranking(task, chosen, _ranked(groups[chosen]), others)


def error_of(entry: Entry, score: TaskScore) -> float | None:
    """How sure a score is: its standard error, or the standard deviation over seeds if that is larger."""
    seeds = seed_scores(entry, score)
    spread = statistics.stdev(seeds) if len(seeds) > 1 else None
    known = [error for error in (score.stderr, spread) if error is not None]
    return max(known, default=None)


def seed_scores(entry: Entry, score: TaskScore) -> tuple[float, ...]:
    """The score, and those of the same recipe with other seeds."""
    return (score.adapter, *(other.scores[score.task] for other in entry.seeds if score.task in other.scores))


def ends_of(entry: Entry, score: TaskScore) -> tuple[float, float] | None:
    """The 95 % interval of a score, as wide as the spread over seeds at least; None: it cannot be known."""
    found = score_interval(score.adapter, score.stderr, score.n)
    seeds = seed_scores(entry, score)
    if found is None or len(seeds) < 2:
        return found
    reach = _SURE * statistics.stdev(seeds)
    return min(found[0], score.adapter - reach), max(found[1], score.adapter + reach)


def differ(
    one: TaskScore, ends: tuple[float, float] | None, other: TaskScore, other_ends: tuple[float, float] | None
) -> bool:
    """Whether two scores are shown to be different ones, the adapters being asked independently of each other.

    The lower end of the difference's interval is as far below it as the better score's lower end and the other's upper
    end are from their scores, together (the root of the sum of the squares). Where every problem was asked once, that
    is, where scores are shares of rights and wrongs, Fisher's exact test has to agree.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10; with
        exact limits it errs less often than one time in twenty (tests/zoo/test_ranking.py counts it).
    """
    if ends is None or other_ends is None:
        return False
    if one.adapter < other.adapter:
        return differ(other, other_ends, one, ends)
    distance = one.adapter - other.adapter
    if distance <= math.hypot(one.adapter - ends[0], other_ends[1] - other.adapter):
        return False
    if one.k != 1 or other.k != 1 or one.n is None or other.n is None:
        return True
    rights = round(one.adapter * one.n), round(other.adapter * other.n)
    return fisher_p(rights[0], one.n, rights[1], other.n) <= _SMALL_P


def fisher_p(one: int, of_one: int, other: int, of_other: int) -> float:
    """P value of Fisher's exact test, two-sided: so many of so many are right, and so many of so many others.

    Source: Fisher 1934; of all tables with these margins those that are no more likely than this one.
    """
    right = one + other

    def log_chance(count: int) -> float:
        """Of so many of the rights in the first row, up to a constant."""
        cells = (count, right - count, of_one - count, of_other - right + count)
        return -sum(math.lgamma(cell + 1) for cell in cells)

    counts = range(max(0, right - of_other), min(right, of_one) + 1)
    chances = [log_chance(count) for count in counts]
    # A table far from what its margins let expect is less likely than the likeliest by more than a float can hold.
    found, top = chances[one - counts.start], max(chances)
    as_unlikely = math.fsum(math.exp(chance - top) for chance in chances if chance - found <= 1e-7)
    return as_unlikely / math.fsum(math.exp(chance - top) for chance in chances)


def _row(found: RankedAdapter) -> Row:
    score, seeds = found.score, found.seeds
    mean = statistics.mean(seeds) if len(seeds) > 1 else None
    return {
        "rank": Cell(found.rank, found.rank),
        "name": fact_cell(found.entry.name),
        "method": fact_cell(found.entry.method),
        "base": fact_cell(found.entry.on_base),
        "score": Cell(score.adapter, score_text(score.adapter, found.error, score.n)),
        "error": Cell(found.error, percent(found.error)),
        "base score": Cell(score.base, score_text(score.base, score.base_stderr, score.n)),
        "gain": Cell(score.gain, signed_percent(score.gain)),
        "mean over seeds": Cell(mean, "-" if mean is None else f"{percent(mean)} ({len(seeds)})"),
    }


def _ranked(group: Sequence[tuple[Entry, TaskScore]]) -> tuple[RankedAdapter, ...]:
    rows = [(entry, score, ends_of(entry, score)) for entry, score in group]
    rows.sort(key=lambda row: (-row[1].adapter, row[0].name))
    found = []
    for entry, score, ends in rows:
        apart = [other for _, other, its in rows if differ(score, ends, other, its)]
        better = sum(other.adapter > score.adapter for other in apart)
        worse = len(apart) - better
        error, seeds = error_of(entry, score), seed_scores(entry, score)
        found.append(RankedAdapter(entry, score, error, ends, seeds, 1 + better, len(rows) - worse))
    return tuple(found)
