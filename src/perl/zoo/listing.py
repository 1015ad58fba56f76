"""Which entries of a zoo are listed, in which order, and what is shown of each.

entries, filter, order, columns -> rows of cells

Adapters found elsewhere are rows too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perl.errors import PerlError, did_you_mean
from perl.run.tables import (
    Value,
    csv_text,
    in_markdown,
    markdown_table,
    percent,
    plain_table,
    signed_percent,
    size_text,
)
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_text

FACTS = {
    "name": "in the zoo, or on the Hub",
    "provenance": "trained-here, reproduced, reported, or on the Hub",
    "base": "the model it is for",
    "method": "of PEFT",
    "algorithm": "the loss",
    "rank": "of the adapter",
    "seed": "of the training",
    "seeds": "how many the scores of are known",
    "steps": "of the optimizer",
    "tokens": "that were trained on",
    "seconds": "of training",
    "hardware": "that trained it",
    "parameters": "that were trained",
    "size": "of its files",
    "licence": "SPDX identifier",
    "repo": "on the Hub",
    "revision": "on the Hub",
    "subfolder": "within the repository",
    "source": "of reported scores",
    "created": "date",
    "notes": "how many",
    "scores": "the first one, and how many more",
}
"""Columns that every entry has, and what they say; scores follow by the names of tasks."""
DEFAULT_COLUMNS = ("name", "provenance", "base", "method", "scores", "tokens", "size", "notes")
_NUMBERS = {"rank", "seed", "seeds", "steps", "tokens", "seconds", "parameters", "size", "notes"}


class Cell(NamedTuple):
    """A value, and how people read it."""

    value: Value
    text: str


Row = Mapping[str, Cell]
"""Column -> cell; a column that the row lacks is unknown."""


@dataclass(frozen=True)
class Filter:
    """What entries must be.

    Attributes:
        base: Part of the base's name.
        method: The method.
        task: A task that they were scored on.
        provenance: As in the entry.
    """

    base: str | None = None
    method: str | None = None
    task: str | None = None
    provenance: str | None = None

    def passes(self, base: str, method: str, tasks: Iterable[str], provenance: str) -> bool:
        """Whether something with these facts is wanted."""
        return (
            (self.base is None or self.base.lower() in base.lower())
            and (self.method is None or self.method.lower() == method.lower())
            and (self.task is None or self.task in tasks)
            and (self.provenance is None or self.provenance == provenance)
        )


def tasks_of(entries: Iterable[Entry]) -> list[str]:
    """Every task that an entry was scored on; the one with most entries first."""
    counts: dict[str, int] = {}
    for entry in entries:
        for score in entry.scores:
            counts[score.task] = counts.get(score.task, 0) + 1
    return sorted(counts, key=lambda task: (-counts[task], task))


def select(entries: Sequence[Entry], wanted: Filter) -> list[Entry]:
    """The entries that pass a filter, in the order given.

    Raises:
        PerlError: None has that base, method or task.
    """
    bases, methods = {entry.base for entry in entries}, {entry.method for entry in entries}
    has = {"base": bases, "method": methods, "task": set(tasks_of(entries))}
    for fact, known in has.items():
        value = getattr(wanted, fact)
        if value is not None and not any(_fits(fact, value, name) for name in known):
            raise PerlError(f"no entry of the zoo has the {fact} {value!r}", f"--{fact}", did_you_mean(value, known))
    return [e for e in entries if wanted.passes(e.base, e.method, [score.task for score in e.scores], e.provenance)]


def row_of(entry: Entry) -> Row:
    """Everything that a list can say of an entry."""
    rank = entry.settings.get("rank")
    plain_facts: dict[str, Value] = {
        "name": entry.name,
        "provenance": entry.provenance,
        "base": entry.on_base,
        "method": entry.method,
        "algorithm": entry.algorithm,
        "rank": rank if isinstance(rank, int | str) else None,
        "seed": entry.seed,
        "seeds": len({entry.seed, *(other.seed for other in entry.seeds)} - {None}) or None,
        "steps": entry.steps,
        "tokens": entry.tokens,
        "seconds": entry.seconds,
        "hardware": entry.hardware,
        "parameters": entry.trainable_parameters,
        "licence": entry.licence,
        "repo": entry.adapter.repo,
        "revision": entry.adapter.revision,
        "subfolder": entry.adapter.subfolder,
        "source": entry.source,
        "created": entry.created,
        "notes": len(entry.notes),
    }
    row = {name: fact_cell(value) for name, value in plain_facts.items()}
    row["size"] = Cell(entry.adapter.size, size_text(entry.adapter.size))
    if entry.scores:
        row["scores"] = _first_score(entry.scores)
    scores = {name: cell for score in entry.scores for name, cell in score_cells(score).items()}
    return row | {name: cell for name, cell in scores.items() if name not in FACTS}  # a task may be called "name"


def fact_cell(value: Value) -> Cell:
    """A cell with a fact."""
    if value is None:
        return Cell(None, "-")
    return Cell(value, f"{value:,.0f}" if isinstance(value, int | float) else value)


def score_cells(score: TaskScore) -> dict[str, Cell]:
    """The columns of a task."""
    return {
        score.task: Cell(score.adapter, score_text(score.adapter, score.stderr, score.n)),
        f"{score.task}.base": Cell(score.base, score_text(score.base, score.base_stderr, score.n)),
        f"{score.task}.gain": Cell(score.gain, signed_percent(score.gain)),
        f"{score.task}.stderr": Cell(score.stderr, percent(score.stderr)),
    }


def columns_of(wanted: str | None, task: str | None, rows: Sequence[Row]) -> list[str]:
    """The columns to show.

    Args:
        wanted: Their names with commas between; None: the usual ones, with what is known of the task if one is named.
        task: What the list is filtered or sorted by.
        rows: Of the list.

    Raises:
        PerlError: There is no such column.
    """
    if wanted is None:
        usual = list(DEFAULT_COLUMNS)
        if task is None:
            return usual
        at = usual.index("scores")
        return [*usual[:at], task, f"{task}.base", f"{task}.gain", *usual[at + 1 :]]
    columns, known = [name.strip() for name in wanted.split(",") if name.strip()], _known(rows)
    for name in columns:
        if name not in known:
            hint = did_you_mean(name, known) or f"there are: {', '.join(FACTS)}, and the names of tasks"
            raise PerlError(f"no column {name!r}", "--columns", hint)
    return columns


def ordered(rows: Sequence[Row], by: str | None, *, reverse: bool = False) -> list[Row]:
    """Rows by a column: scores from the best down, all else upwards; unknown values last either way.

    Raises:
        PerlError: There is no such column.
    """
    column, known = by or "name", _known(rows)
    if column not in known:
        raise PerlError(f"nothing is called {column!r}", "--sort", did_you_mean(column, known))
    has = [row for row in rows if column in row and row[column].value is not None]
    down = column not in FACTS
    has.sort(key=lambda row: _order(row[column].value), reverse=down != reverse)
    return has + [row for row in rows if column not in row or row[column].value is None]


def _known(rows: Sequence[Row]) -> list[str]:
    """Every column, those of facts first."""
    return list(dict.fromkeys([*FACTS, *(name for row in rows for name in row)]))


def as_plain(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The list for a terminal."""
    return "\n".join(plain_table([columns, *_texts(rows, columns)], _right(columns)))


def as_markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The list in Markdown."""
    lines = [[in_markdown(text) for text in line] for line in (columns, *_texts(rows, columns))]
    return "\n".join(markdown_table(lines, _right(columns)))


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The list as CSV, values unrounded."""
    return csv_text(columns, [[row[name].value if name in row else None for name in columns] for row in rows])


def as_records(rows: Sequence[Row], columns: Sequence[str] | None) -> list[dict[str, Value]]:
    """For JSON; without columns all that is known of each row."""
    return [{name: row[name].value if name in row else None for name in columns or row} for row in rows]


def _fits(fact: str, value: str, name: str) -> bool:
    if fact == "task":
        return value == name
    return value.lower() in name.lower() if fact == "base" else value.lower() == name.lower()


def _first_score(scores: Sequence[TaskScore]) -> Cell:
    first, more = scores[0], len(scores) - 1
    text = f"{first.task} {score_text(first.adapter, first.stderr, first.n)}" + (f" (+{more})" if more else "")
    return Cell(text, text)


def _order(value: Value) -> tuple[bool, float, str]:
    return (False, value, "") if isinstance(value, int | float) else (True, 0.0, str(value))


def _texts(rows: Sequence[Row], columns: Sequence[str]) -> list[list[str]]:
    return [[row[name].text if name in row else "-" for name in columns] for row in rows]


def _right(columns: Sequence[str]) -> list[bool]:
    return [name in _NUMBERS or name not in FACTS for name in columns]
