"""A zoo as one table of rows, which :func:`perl.run.tables.printed` prints.

entries -> rows of cells -> those that are wanted, in order

Adapters found elsewhere are rows too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from perl.errors import PerlError, did_you_mean
from perl.run.tables import UNKNOWN, Row, TableCell, Value, fact_cell, percent, signed_percent, size_text
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_text

WEIGHTS = "adapter_model.safetensors"
FACTS: Mapping[str, Callable[[Entry], Value]] = {
    "name": lambda e: e.name,
    "provenance": lambda e: e.provenance,
    "source": lambda e: e.source,
    "base": lambda e: e.on_base,
    "base revision": lambda e: e.base_revision,
    "method": lambda e: e.method,
    "settings": lambda e: ", ".join(f"{name} {value}" for name, value in e.settings.items()) or None,
    "algorithm": lambda e: e.algorithm,
    "seed": lambda e: e.seed,
    "seeds": lambda e: len({e.seed, *(other.seed for other in e.seeds)} - {None}) or None,
    "steps": lambda e: e.steps,
    "tokens": lambda e: e.tokens,
    "seconds": lambda e: e.seconds,
    "hardware": lambda e: e.hardware,
    "parameters": lambda e: e.trainable_parameters,
    "licence": lambda e: e.licence,
    "created": lambda e: e.created,
    "shipped": lambda e: "yes" if e.adapter.shipped else None,
    "repo": lambda e: e.adapter.repo,
    "revision": lambda e: e.adapter.revision,
    "subfolder": lambda e: e.adapter.subfolder,
    "size": lambda e: e.adapter.size,
    "sha256": lambda e: e.adapter.sha256.get(WEIGHTS),
    "reward": lambda e: (
        ", ".join(f"{reward:.3f} at step {step}" for step, reward in (*e.curve[:1], *e.curve[-1:])) or None
    ),
    "versions": lambda e: ", ".join(f"{name} {version}" for name, version in e.versions.items()) or None,
    "notes": lambda e: len(e.notes),
    "scores": lambda e: len(e.scores) or None,
}
"""Columns that every entry has; scores follow by the names of tasks."""
SCORE_COLUMNS = ("task", "metric", "k", "problems", "score", "error", "base score", "base error", "gain", "protocol")
"""Of one score, as :func:`score_row` has them."""
DEFAULT_COLUMNS = ("name", "provenance", "base", "method", "scores", "tokens", "size", "notes")


def row_of(entry: Entry) -> Row:
    """Everything that a list can say of an entry."""
    row = {name: fact_cell(value(entry)) for name, value in FACTS.items()}
    row["size"] = TableCell(entry.adapter.size, size_text(entry.adapter.size))
    if entry.scores:
        first, more = score_row(entry, entry.scores[0]), len(entry.scores) - 1
        row["scores"] = fact_cell(f"{first['task'].text} {first['score'].text}" + (f" (+{more})" if more else ""))
    for score in entry.scores:
        if score.task not in FACTS:  # a task may be called "name"
            cells = score_row(entry, score)
            row |= {
                score.task: cells["score"],
                f"{score.task}.base": cells["base score"],
                f"{score.task}.gain": cells["gain"],
                f"{score.task}.error": cells["error"],
            }
    return row


def score_row(entry: Entry, score: TaskScore) -> Row:
    """One score of an entry; its error is the spread over seeds if that is larger than the standard error."""
    error = entry.error(score)
    return {
        "task": fact_cell(score.task),
        "metric": fact_cell(score.metric),
        "k": fact_cell(score.k),
        "problems": fact_cell(score.n),
        "score": TableCell(score.adapter, score_text(score.adapter, error, score.n)),
        "error": TableCell(error, percent(error)),
        "base score": TableCell(score.base, score_text(score.base, score.base_stderr, score.n)),
        "base error": TableCell(score.base_stderr, percent(score.base_stderr)),
        "gain": TableCell(score.gain, signed_percent(score.gain)),
        "protocol": fact_cell(score.protocol_hash),
    }


def tasks_of(entries: Iterable[Entry]) -> list[str]:
    """Every task that an entry was scored on; the one with most entries first."""
    counts = Counter(score.task for entry in entries for score in entry.scores)
    return sorted(counts, key=lambda task: (-counts[task], task))


def select(rows: Sequence[Row], **wanted: str | None) -> list[Row]:
    """The rows with such facts, in the order given.

    Args:
        rows: Of a zoo.
        wanted: ``base``: part of it; ``method``; ``task``: one that there is a score on.

    Raises:
        PerlError: No row has that.
    """
    for fact, value in wanted.items():
        if value is None:
            continue
        if fact == "task":
            known = {name for row in rows for name in row.keys() - FACTS}
            kept = [row for row in rows if value in row.keys() - FACTS]
        else:
            known, asked = {row[fact].text for row in rows}, value.lower()
            texts = [row[fact].text.lower() for row in rows]
            fits = [asked in text if fact == "base" else asked == text for text in texts]
            kept = [row for row, is_wanted in zip(rows, fits, strict=True) if is_wanted]
        if not kept:
            raise PerlError(f"no entry of the zoo has the {fact} {value!r}", f"--{fact}", did_you_mean(value, known))
        rows = kept
    return list(rows)


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
        of_task = ["scores"] if task is None else [task, f"{task}.base", f"{task}.gain"]
        at = DEFAULT_COLUMNS.index("scores")
        return [*DEFAULT_COLUMNS[:at], *of_task, *DEFAULT_COLUMNS[at + 1 :]]
    return [_known(name.strip(), "--columns", rows) for name in wanted.split(",") if name.strip()]


def ordered(rows: Sequence[Row], by: str | None, *, reverse: bool = False) -> list[Row]:
    """Rows by a column: scores from the best down, all else upwards; unknown values last either way.

    Raises:
        PerlError: There is no such column.
    """
    column = _known(by or "name", "--sort", rows)
    has = [(value, row) for row in rows if (value := row.get(column, UNKNOWN).value) is not None]
    has.sort(key=lambda one: one[0], reverse=(column not in FACTS) != reverse)
    return [*(row for _, row in has), *(row for row in rows if row.get(column, UNKNOWN).value is None)]


def _known(name: str, where: str, rows: Sequence[Row]) -> str:
    known = dict.fromkeys([*FACTS, *(column for row in rows for column in row)])
    if name not in known:
        hint = did_you_mean(name, known) or f"there are: {', '.join(FACTS)}, and the names of tasks"
        raise PerlError(f"no column {name!r}", where, hint)
    return name
