"""A comparison of runs to be looked at: in a terminal, in a notebook, as JSON and CSV.

folders -> ComparedRuns: perl.compare
"""

import contextlib
import html
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import PerlError, RunFolderError
from perl.evaluation.metrics import Difference
from perl.evaluation.results import RESULTS, read_results
from perl.evaluation.table import difference_cell, p_cell
from perl.reports.comparison.checks import of_another
from perl.reports.comparison.found_runs import find_runs
from perl.reports.comparison.measure import Measure
from perl.reports.comparison.notes import NOT_DIFFERENT, group_titles, is_alike, notes_of
from perl.reports.comparison.rows import Comparison, Row, compare_runs
from perl.reports.run_log import RunLog, read_run
from perl.run.tables import Value, csv_text, html_table, percent, plain, plain_table

if TYPE_CHECKING:
    from perl.run.folder import Run

_WIDEST = 120
_LONGEST = 44
_NOTE_WIDTH = 100
_MEMBER = "·"
"""Before the name of a run that is a seed of the row above."""
_HEADINGS = ("run", "what differs", "score", "difference [95 %]", "p")
_FURTHER = ("reward", "tokens", "training", "in all", "trained", "status")
_RIGHT = (False, False, True, True, True, *(True,) * 5, False)
_CSV = (
    *("name", "kind", "folder", "status", "reason", "what_differs", "seeds", "group", "score", "stderr", "count"),
    *("reference", "difference", "difference_stderr", "difference_low", "difference_high", "p_value", "p_corrected"),
    *("paired", "pairs", "reward", "tokens", "training_seconds", "seconds", "trainable_parameters"),
)


@dataclass(frozen=True)
class ComparedRuns:
    """Runs beside each other; ``print`` shows what ``perl compare`` prints, a notebook a table.

    Attributes:
        comparison: With the cells and their differences.
        notes: How it is to be read, a sentence each.
    """

    comparison: Comparison
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, as they are shown."""
        return self.comparison.rows

    @property
    def score(self) -> str:
        """By what they are compared, as ``--score`` takes it."""
        return self.comparison.measure.key

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values; what is not known is None."""
        measure = self.comparison.measure
        return {
            "score": {"key": measure.key, "title": measure.title, "percent": measure.percent},
            "reference": [row.name for row in self.rows if row.reference],
            "reference_chosen_by_score": self.comparison.chosen,
            "differences_corrected_for": self.comparison.tests,
            "groups": group_titles(self.comparison),
            "rows": [_plain_row(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """As ``perl compare --json`` prints it."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_csv(self) -> str:
        """A line a row, numbers as they are: scores from 0 to 1."""
        return csv_text(_CSV, [[_csv_value(_plain_row(row), name) for name in _CSV] for row in self.rows])

    def __str__(self) -> str:
        """What ``perl compare`` prints."""
        return "\n".join([*_lines(self.comparison), "", *_wrapped(self.notes)])

    def __repr__(self) -> str:
        """The text, as a console shows what was returned."""
        return str(self)

    def _repr_html_(self) -> str:
        """A table, and the sentences below it; names and errors may hold anything."""
        titles, rows = dict(_titled(self.comparison)), _cells(self.comparison)
        lines = [line for j, row in enumerate(rows) for line in (*([[titles[j]]] if j in titles else []), row)]
        notes = "<br>".join(html.escape(plain(note)) for note in self.notes)
        return f"{html_table([[plain(cell) for cell in row] for row in lines], _RIGHT)}<p>{notes}</p>"


def compare(
    runs: "str | PathLike[str] | Run | Sequence[str | PathLike[str] | Run]",
    *,
    to: "str | PathLike[str] | Run | None" = None,
    score: str | None = None,
) -> ComparedRuns:
    """Puts runs beside each other: score, what differs, and how sure the difference to the best one is.

    Args:
        runs: Run folders, the output folders of scripts, patterns as ``runs/*``, folders of runs, or runs.
        to: The one that the others are compared with; None: the best.
        score: A task of the evaluation at the end, ``TASK/avg@K``, ``TASK/pass@K``, ``best`` (of ``eval.best``), or a
            number in ``metrics.jsonl``. None: the task that most runs were scored on, else ``reward``.

    Returns:
        A table, which a notebook shows; ``rows`` are plain records.

    Raises:
        RunFolderError: A folder is absent or holds no run.
        PerlError: There is nothing to compare by, or ``to`` is none of the runs.

    Example:
        ``perl.compare("runs/*", to="runs/lora")``
    """
    many: Sequence[Any] = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    folders, left_out = find_runs([_folder_of(run, "runs") for run in many])
    logs, unreadable = _read(folders)
    compared = compare_runs(logs, to=None if to is None else str(_folder_of(to, "to")), score=score)
    return ComparedRuns(compared, (*notes_of(compared), *left_out, *unreadable))


def _folder_of(run: "str | PathLike[str] | Run", argument: str) -> str | PathLike[str]:
    folder = getattr(run, "path", run)
    if not isinstance(folder, str | PathLike):
        raise RunFolderError(f"must be a run or its folder, not {run!r:.60}", f"perl.compare({argument})")
    return folder


def _read(folders: Sequence[Path]) -> tuple[list[RunLog], list[str]]:
    """Runs that can be read, and a line for each that cannot; of a single one its error."""
    logs: list[RunLog] = []
    errors: list[RunFolderError] = []
    for folder in folders:
        try:
            logs.append(_read_run(folder))
        except RunFolderError as error:
            errors.append(error)
    if not logs:
        raise errors[0]
    return logs, [f"Left out: {error.mistakes[0]}." for error in errors]


def _read_run(folder: Path) -> RunLog:
    """A run, begun or not; one that was not scored at its end with the scores of ``perl eval``."""
    log = read_run(folder, begun=False)
    if (folder / "eval" / RESULTS).exists():
        return log
    for file in sorted((folder / "evals").glob(f"*/{RESULTS}")):
        with contextlib.suppress(PerlError):
            results = read_results(file)
            if of_another(log, results) is None:
                return replace(log, results=results)
    return log


def _lines(compared: Comparison) -> list[str]:
    """One table, or where a terminal would not show it whole, two that begin with the same column."""
    rows = _cells(compared)
    whole = plain_table(rows, _RIGHT)
    count = len(_HEADINGS)
    parts = [whole]
    if max(map(len, whole)) > _WIDEST:
        parts = [plain_table([row[:count] for row in rows], _RIGHT[:count])]
        parts += [plain_table([[row[0], *row[count:]] for row in rows], (_RIGHT[0], *_RIGHT[count:]))]
    titles = dict(_titled(compared))
    first = [line for j, text in enumerate(parts[0]) for line in (*([titles[j]] if j in titles else []), text)]
    return [*first, *(line for part in parts[1:] for line in ("", *part))]


def _titled(compared: Comparison) -> Iterator[tuple[int, str]]:
    """The titles of groups, each with the number of the line that it stands before; the headings are line 0."""
    titles, before = group_titles(compared), -1
    for number, row in enumerate(compared.rows, start=1):
        group = len(titles) if row.group is None else row.group
        if group != before and any(titles):
            yield number, titles[group] if group < len(titles) else "Without a score:"
        before = group


def _cells(compared: Comparison) -> list[list[str]]:
    """Headings and rows."""
    return [[*_HEADINGS, *_FURTHER], *(_row_cells(row, compared.measure) for row in compared.rows)]


def _row_cells(row: Row, measure: Measure) -> list[str]:
    status = row.status if not row.reason or row.reason.startswith(row.status) else f"{row.status}: {row.reason}"
    status = row.reason if row.reason.startswith(row.status) else status
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    return [
        _cut(f"{_MEMBER} {row.name}" if row.kind == "seed" else row.name),
        _cut(row.what_differs) or "-",
        _score_cell(row, measure),
        _difference_cell(row, measure),
        p_cell(row.difference) if row.paired else "-",
        reward,
        _count(row.tokens),
        _seconds(row.training_seconds),
        _seconds(row.seconds),
        _count(row.trainable_parameters),
        textwrap.shorten(plain(status), _WIDEST, placeholder="..."),
    ]


def _score_cell(row: Row, measure: Measure) -> str:
    if row.score is None:
        return "-"
    show = percent if measure.percent else _decimals
    error = "" if row.stderr is None else f" ± {show(row.stderr)}"
    return f"{show(row.score)}{error}{f' {NOT_DIFFERENT}' if is_alike(row) else ''}"


def _difference_cell(row: Row, measure: Measure) -> str:
    if row.reference:
        return "compared with"
    found = row.difference
    if found is None or measure.percent:
        return difference_cell(found)
    if not row.paired or found.low != found.low:
        return _signed(found.mean)
    return f"{_signed(found.mean)} [{_signed(found.low)}, {_signed(found.high)}]"


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"


def _decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _count(value: float | None) -> str:
    """``1.2M``; whole below 100,000."""
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 100 * size or (unit != "k" and value >= size):
            return f"{value / size:.3g}{unit}" if value < 1000 * size else f"{value / size:,.0f}{unit}"
    return f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s" if value < 7200 else f"{value / 3600:.1f} h"


def _cut(text: str) -> str:
    shown = plain(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [textwrap.fill(plain(note), _NOTE_WIDTH, subsequent_indent="  ") for note in notes]


def _plain_row(row: Row) -> dict[str, Any]:
    facts = asdict(row)
    difference: Difference | None = row.difference
    facts["difference"] = None
    if difference is not None:
        known = difference.as_dict()
        facts["difference"] = {**known, "p_value": row.p_value, "p_corrected": known["p_value"]}
    facts |= {name: _whole(facts[name]) for name in ("tokens", "trainable_parameters")}
    facts |= {"what_differs": row.what_differs, "seeds": list(row.seeds), "settings": dict(row.settings)}
    return facts


def _whole(value: float | None) -> float | None:
    return int(value) if value is not None and value.is_integer() else value


def _csv_value(facts: dict[str, Any], name: str) -> Value:
    difference = facts["difference"] or {}
    if name == "difference":
        return difference.get("mean")
    if name.startswith("difference_"):
        return difference.get(name.removeprefix("difference_"))
    if name in ("p_value", "p_corrected"):
        return difference.get(name)
    value = facts[name]
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else value
