"""A comparison of runs to be looked at: in a terminal, in a notebook, as JSON and CSV, with what it cannot show.

folders -> ComparedRuns: perl.compare
"""

import html
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from perl.errors import RunFolderError
from perl.evaluation.compare import engines_note
from perl.evaluation.scoring.found_results import settings_text, ways_of
from perl.evaluation.scoring.metrics import SMALL_P, guessed_error, smallest_gain
from perl.evaluation.scoring.seeds import smallest_difference
from perl.evaluation.scoring.table import difference_cell, is_shown, p_cell
from perl.reports.comparison.rows import PROBLEM, SEED, RunComparison, RunRow, compare_runs
from perl.reports.comparison.runs import find_runs, read_logs
from perl.run.progress import duration
from perl.run.tables import DASH, csv_text, differing, html_table, percent, plain, plain_table

if TYPE_CHECKING:
    from perl.run.folder import Run

_WIDEST = 120
_LONGEST = 44
_NOTE_WIDTH = 100
_MOST_SCORES = 6
_NOT_DIFFERENT = "≈"
_MEMBER = "·"
"""Before the name of a run that is a seed of the row above."""
_HEADINGS = ("run", "what differs", "score", "difference [95 %]", "p")
_FURTHER = ("reward", "tokens", "training", "in all", "trained", "status")
_RIGHT = (False, False, True, True, True, *(True,) * 5, False)


@dataclass(frozen=True)
class ComparedRuns:
    """Runs beside each other; ``print`` shows what ``perl compare`` prints, a notebook a table.

    Attributes:
        comparison: With the settings and their differences.
        notes: How it is to be read, a sentence each.
    """

    comparison: RunComparison
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[RunRow, ...]:
        """The rows, as they are shown."""
        return self.comparison.rows

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values; what is not known is None."""
        measure = self.comparison.measure
        return {
            "score": {"key": measure.key, "title": measure.title, "percent": bool(measure.task)},
            "reference": [row.name for row in self.rows if row.reference],
            "reference_chosen_by_score": self.comparison.chosen,
            "differences_corrected_for": self.comparison.tests,
            "rows": [_plain_row(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """As ``perl compare --json`` prints it."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_csv(self) -> str:
        """A line a row, numbers as they are: scores from 0 to 1."""
        names = ("mean", "stderr", "low", "high", "p_value", "p_corrected")
        lines = []
        for row in self.rows:
            facts = _plain_row(row)
            of = facts.pop("difference") or {}
            facts |= {"difference" if name == "mean" else f"difference_{name}": of.get(name) for name in names}
            del facts["settings"], facts["p_value"]
            lines.append(facts | {"seeds": " ".join(map(str, row.seeds)), "reference": str(row.reference).lower()})
        return csv_text(list(lines[0]), [list(line.values()) for line in lines])

    def __str__(self) -> str:
        """What ``perl compare`` prints."""
        notes = [textwrap.fill(plain(note), _NOTE_WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join([*_lines(self.comparison), "", *notes])

    def __repr__(self) -> str:
        """The text, as a console shows what was returned."""
        return str(self)

    def _repr_html_(self) -> str:
        """A table, and the sentences below it; names and errors may hold anything."""
        notes = "<br>".join(html.escape(plain(note)) for note in self.notes)
        return f"{html_table([list(map(plain, row)) for row in _cells(self.comparison)], _RIGHT)}<p>{notes}</p>"


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
        score: A task of the evaluation at the end, ``TASK/pass@K``, or a number in ``metrics.jsonl``. None: the task
            that most runs were scored on, else ``reward``.

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
    logs, unreadable = read_logs(folders)
    compared = compare_runs(logs, to=None if to is None else str(_folder_of(to, "to")), score=score)
    return ComparedRuns(compared, (*_notes(compared), *left_out, *unreadable))


def _folder_of(run: "str | PathLike[str] | Run", argument: str) -> str | PathLike[str]:
    folder = getattr(run, "path", run)
    if not isinstance(folder, str | PathLike):
        raise RunFolderError(f"must be a run or its folder, not {run!r:.60}", f"perl.compare({argument})")
    return folder


def _lines(compared: RunComparison) -> list[str]:
    """One table, or where a terminal would not show it whole, two that begin with the same column."""
    rows = _cells(compared)
    whole = plain_table(rows, _RIGHT)
    count = len(_HEADINGS)
    parts = [whole]
    if max(map(len, whole)) > _WIDEST:
        parts = [plain_table([row[:count] for row in rows], _RIGHT[:count])]
        parts += [plain_table([[row[0], *row[count:]] for row in rows], (_RIGHT[0], *_RIGHT[count:]))]
    return [*parts[0], *(line for part in parts[1:] for line in ("", *part))]


def _asked_otherwise(compared: RunComparison) -> Iterator[str]:
    """Which settings were asked otherwise than those that are compared, and how."""
    found = [group[0].runs[0].measured for group in compared.groups]
    if len(found) < 2:
        return
    if compared.measure.task:
        ways = ways_of([one.results for one in found if one.results is not None], {compared.measure.task})
    else:
        rows = differing([one.asked for one in found])
        ways = [settings_text({key: of[i] for key, of in rows.items() if of[i] != DASH}) for i, _ in enumerate(found)]
    for group, way in zip(compared.groups[1:], ways[1:], strict=True):
        names = ", ".join(plain(setting.name) for setting in group)
        of = plain(way) or "nothing is known of it"
        yield f"Asked otherwise than the others, and not compared: {names} ({of}; the others {plain(ways[0])})."


def _cells(compared: RunComparison) -> list[list[str]]:
    """Headings and rows."""
    show = percent if compared.measure.task else _decimals
    rows = []
    for row in compared.rows:
        error = "" if row.stderr is None else f" ± {show(row.stderr)}"
        status = row.reason if row.reason.startswith(row.status) else f"{row.status}: {row.reason}".removesuffix(": ")
        rows.append(
            [
                _cut(f"{_MEMBER} {row.name}" if row.kind == "seed" else row.name),
                _cut(row.what_differs) or DASH,
                DASH if row.score is None else f"{show(row.score)}{error}{f' {_NOT_DIFFERENT}' * _is_alike(row)}",
                _difference_cell(row, in_percent=bool(compared.measure.task)),
                p_cell(row.difference) if row.paired else DASH,
                DASH if row.reward is None else f"{row.reward:.3f}",
                _count(row.tokens),
                _seconds(row.training_seconds),
                _seconds(row.seconds),
                _count(row.trainable_parameters),
                textwrap.shorten(plain(status), _WIDEST, placeholder="..."),
            ]
        )
    return [[*_HEADINGS, *_FURTHER], *rows]


def _is_alike(row: RunRow) -> bool:
    """Whether a row is compared and not shown to differ from the reference."""
    return row.difference is not None and bool(row.paired) and not is_shown(row.difference)


def _difference_cell(row: RunRow, *, in_percent: bool) -> str:
    if row.reference:
        return "compared with"
    found = row.difference
    if found is None or in_percent:
        return difference_cell(found)
    mean, *ends = (f"{round(value, 3) + 0.0:+.3f}" for value in (found.mean, found.low, found.high))
    return mean if not row.paired or math.isnan(found.low) else f"{mean} [{', '.join(ends)}]"


def _decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return DASH if value is None else duration(value)


def _cut(text: str) -> str:
    shown = plain(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _plain_row(row: RunRow) -> dict[str, Any]:
    facts = asdict(row)
    if row.difference is not None:
        known = row.difference.as_dict()
        facts["difference"] = {**known, "p_value": row.p_value, "p_corrected": known["p_value"]}
    for name in ("tokens", "trainable_parameters"):
        value = facts[name]
        facts[name] = int(value) if value is not None and value.is_integer() else value
    return facts | {"what_differs": row.what_differs, "seeds": list(row.seeds), "settings": dict(row.settings)}


def _notes(compared: RunComparison) -> Iterator[str]:
    """What must be known to read the table, the most needed first."""
    yield _score_note(compared)
    tested = [row for row in compared.rows if row.difference is not None]
    reference = next((plain(row.name) for row in compared.rows if row.reference), "")
    if tested:
        yield _difference_note(compared, tested, reference)
    if any(map(_is_alike, tested)):
        of = f"{_NOT_DIFFERENT}: not shown to differ from {reference}"
        yield f"{of}: the interval includes 0, or p is above {SMALL_P}."
    yield from _power_notes(compared, tested)
    yield from _asked_otherwise(compared)
    settings = [one for group in compared.groups for one in group]
    single = sum(len(one.runs) == 1 for one in settings)
    if single and len(settings) > 1:
        some = f"{single} of {len(settings)} settings {'has' if single == 1 else 'have'}"
        of = "All settings have" if single == len(settings) else some
        yield f"{of} one seed: what is said of them is said of these adapters, another seed may give others."
    scored = [(run.row.name, run.measured.results) for run in compared.scored if run.measured.results is not None]
    yield from engines_note([results for _, results in scored], [plain(name) for name, _ in scored])
    tasks = {f"{task.name}/avg@{task.score.k}": task.name for _, results in scored for task in results.tasks}
    others = [key for key, name in tasks.items() if name != compared.measure.task][:_MOST_SCORES]
    if others:
        yield f"Other scores: --score {' or '.join(others)}; `perl eval compare` shows all at once."


def _score_note(compared: RunComparison) -> str:
    unit, over = (", in percent", "over problems") if compared.measure.task else ("", "over these steps")
    several = ", of rows of several seeds over seeds" if any(row.kind == "seeds" for row in compared.rows) else ""
    note = f"Score: {compared.measure.title}{unit}; ±: standard error {over}{several}."
    if compared.measure.key == "reward":
        note += " It is measured on training problems by the training's own rewards, and single runs are not paired."
    return note


def _difference_note(compared: RunComparison, tested: Sequence[RunRow], reference: str) -> str:
    which = ", the best by these scores, which looks better than it is" if compared.chosen else ""
    first = f"Differences from {reference}{which}"
    ways = {SEED: "by seed (Student's t)", PROBLEM: "by problem (sign flips)"}
    how = " or ".join(text for way, text in ways.items() if any(row.paired == way for row in tested))
    if not how:
        return f"{first}; nothing pairs these scores, so that there are no intervals."
    text = f"{first}, with 95 % intervals, each its own; paired {how}"
    if compared.tests > 1:
        text += f"; p: Holm over {compared.tests} differences{', all pairs' if compared.chosen else ''}"
    return f"{text}."


def _power_notes(compared: RunComparison, tested: Sequence[RunRow]) -> Iterator[str]:
    """How large a true difference had to be, so that 80 of 100 such comparisons show it, by the largest error."""
    k = min((run.measured.k for run in compared.scored), default=1)
    for how in (SEED, PROBLEM):
        found = [(row.difference.stderr, row.pairs) for row in tested if row.difference and row.paired == how]
        found = [pair for pair in found if pair[0] > 0 or how == PROBLEM]
        if not found:
            continue
        error, pairs = max(found)
        tests, of = max(1, compared.tests), f"{pairs:,} {how}s"
        if how == SEED:
            least: float | None = smallest_difference(error, pairs, tests)
        else:
            least = smallest_gain(error if error > 0 else guessed_error(pairs, k), pairs, tests)
        if least is None:
            yield f"Smallest difference that can be shown: {of} are too few to show any."
        else:
            text = f"{100 * least:.1f} points" if compared.measure.task else f"{least:.3g}"
            yield f"Smallest difference that 4 of 5 such comparisons show: {text}, paired by {how} ({of})."
