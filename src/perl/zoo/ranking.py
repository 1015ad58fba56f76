"""Adapters by their score on a task, as far as the scores may be compared and can be told apart.

entries, task -> Ranking

Scores of one protocol are ranked, those of others only named. Ranks are ranges: an adapter stands behind those that are
shown to be better, and before those that are shown to be worse. Knows nothing of files.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perl.errors import PerlError, did_you_mean
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.listing import Cell, Row, fact_cell, tasks_of
from perl.zoo.tables import percent, signed_percent

SURE = 1.96
"""Standard errors of a difference that it must exceed."""
COLUMNS = ("rank", "name", "method", "base", "score", "base score", "gain", "mean over seeds")


@dataclass(frozen=True)
class Ranked:
    """An adapter with its place.

    Attributes:
        entry: The adapter.
        score: On the task.
        error: Standard error, or the standard deviation over seeds if that is larger; None: neither is known.
        seeds: Scores of the same recipe with each seed, its own first.
        best: The best rank that it may have.
        worst: The worst.
    """

    entry: Entry
    score: TaskScore
    error: float | None
    seeds: tuple[float, ...]
    best: int
    worst: int

    @property
    def rank(self) -> str:
        """``3``, or ``2-4`` where it cannot be told apart from others."""
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
    ranked: tuple[Ranked, ...]
    others: dict[str, tuple[str, ...]]

    def notes(self) -> list[str]:
        """What must be known beside the ranks."""
        notes = [
            f"Ranks are ranges: two scores differ where they lie more than {SURE:g} standard errors of their "
            "difference apart; the error of a score is its standard error, or the spread over seeds if that is larger."
        ]
        unknown = [found.entry.name for found in self.ranked if found.error is None]
        if len(unknown) == len(self.ranked):
            notes.append("No score has a standard error: none can be told apart from any other.")
        elif unknown:
            notes.append(f"No standard error is known, so not to be told apart from any other: {', '.join(unknown)}.")
        bases = sorted({found.entry.base for found in self.ranked})
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


def differ(one: float, error: float | None, other: float, other_error: float | None) -> bool:
    """Whether two scores are shown to be different ones."""
    if error is None or other_error is None:
        return False
    return abs(one - other) > SURE * math.hypot(error, other_error)


def _row(found: Ranked) -> Row:
    score, seeds = found.score, found.seeds
    mean = statistics.mean(seeds) if len(seeds) > 1 else None
    return {
        "rank": Cell(found.rank, found.rank),
        "name": fact_cell(found.entry.name),
        "method": fact_cell(found.entry.method),
        "base": fact_cell(found.entry.base),
        "score": Cell(score.adapter, percent(score.adapter, found.error)),
        "error": Cell(found.error, percent(found.error)),
        "base score": Cell(score.base, percent(score.base, score.base_stderr)),
        "gain": Cell(score.gain, signed_percent(score.gain)),
        "mean over seeds": Cell(mean, "-" if mean is None else f"{percent(mean)} ({len(seeds)})"),
    }


def _ranked(group: Sequence[tuple[Entry, TaskScore]]) -> tuple[Ranked, ...]:
    rows = [(entry, score, error_of(entry, score)) for entry, score in group]
    rows.sort(key=lambda row: (-row[1].adapter, row[0].name))
    found = []
    for entry, score, error in rows:
        apart = [other for _, other, its in rows if differ(score.adapter, error, other.adapter, its)]
        better = sum(other.adapter > score.adapter for other in apart)
        worse = len(apart) - better
        found.append(Ranked(entry, score, error, seed_scores(entry, score), 1 + better, len(rows) - worse))
    return tuple(found)
