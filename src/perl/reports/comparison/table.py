"""A comparison of runs to be looked at: in a terminal, in a notebook, as JSON and CSV, with what it cannot show.

folders -> ComparedRuns: perl.compare
"""

import html
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from perl.errors import RunFolderError
from perl.evaluation.comparing.compared import PROBLEM, SEED
from perl.evaluation.comparing.evaluations import engines_note
from perl.evaluation.comparing.text import NOT_DIFFERENT
from perl.evaluation.scoring.found_results import settings_text, ways_of
from perl.evaluation.scoring.metrics import SMALL_P
from perl.evaluation.scoring.table import WIDEST, compared_cells, is_shown
from perl.reports.comparison.rows import RunComparison, RunRow, compare_runs
from perl.reports.comparison.runs import find_runs, read_logs
from perl.run.progress import duration
from perl.run.tables import (
    DASH,
    UNKNOWN,
    Row,
    TableCell,
    csv_text,
    differing,
    fact_cell,
    known_columns,
    percent,
    plain,
    printed,
    signed_percent,
)

if TYPE_CHECKING:
    from perl.run.folder import Run

_WIDEST = 120
_LONGEST = 44
_MOST_SCORES = 6
_MEMBER = "·"
"""Before the name of a run that is a seed of the row above."""
_COSTS = ("reward", "tokens", "training", "in all", "trained", "status")


@dataclass(frozen=True)
class ComparedRuns(RunComparison):
    """Runs beside each other; ``print`` shows what ``perl compare`` prints, a notebook a table.

    Attributes:
        notes: How it is to be read, a sentence each.
    """

    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values; what is not known is None."""
        return {
            "score": {"key": self.measure.key, "title": self.measure.title, "percent": bool(self.measure.task)},
            "reference": [row.name for row in self.rows if row.reference],
            "reference_chosen_by_score": self.chosen,
            "differences_corrected_for": self.tests,
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
            del facts["settings"]
            lines.append(facts | {"seeds": " ".join(map(str, row.seeds)), "reference": str(row.reference).lower()})
        return csv_text(list(lines[0]), [list(line.values()) for line in lines])

    def __str__(self) -> str:
        """What ``perl compare`` prints: one table, or two where a terminal would not show it whole."""
        rows = _table(self)
        tables = [printed(rows)]
        if max(map(len, tables[0].splitlines())) > _WIDEST:
            known = known_columns(rows)
            costs = [name for name in known if name in _COSTS]
            tables = [printed(rows, [n for n in known if n not in costs]), printed(rows, [known[0], *costs])]
        notes = [textwrap.fill(plain(note), WIDEST, subsequent_indent="  ") for note in self.notes]
        return "\n".join(["\n\n".join(tables), "", *notes])

    def __repr__(self) -> str:
        """The text, as a console shows what was returned."""
        return str(self)

    def _repr_html_(self) -> str:
        """A table, and the sentences below it; names and errors may hold anything."""
        notes = "<br>".join(html.escape(plain(note)) for note in self.notes)
        return f"{printed(_table(self), style='html')}<p>{notes}</p>"


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
    return ComparedRuns(**vars(compared), notes=(*_notes(compared), *left_out, *unreadable))


def _folder_of(run: "str | PathLike[str] | Run", argument: str) -> str | PathLike[str]:
    folder = getattr(run, "path", run)
    if not isinstance(folder, str | PathLike):
        raise RunFolderError(f"must be a run or its folder, not {run!r:.60}", f"perl.compare({argument})")
    return folder


def _table(compared: RunComparison) -> list[Row]:
    """What is shown of each row."""
    in_percent = bool(compared.measure.task)
    signed = signed_percent if in_percent else lambda of: f"{round(of, 3) + 0.0:+.3f}"
    rows: list[Row] = []
    for row in compared.rows:
        score = UNKNOWN
        if row.score is not None:
            numbers = [row.score] if row.stderr is None else [row.score, row.stderr]
            small = [f"{of:.3f}" if abs(of) < 100 else f"{of:,.1f}" for of in numbers]
            text = " ± ".join(map(percent, numbers) if in_percent else small)
            score = TableCell(row.score, f"{text}{f' {NOT_DIFFERENT}' * _is_alike(row)}")
        cells = compared_cells(row.difference, "difference [95 %]", signed)
        if row.reference:
            cells["difference [95 %]"] = fact_cell("compared with")
        status = row.reason if row.reason.startswith(row.status) else f"{row.status}: {row.reason}".removesuffix(": ")
        seconds = {"training": row.training_seconds, "in all": row.seconds}
        rows.append(
            {
                "run": fact_cell(_cut(f"{_MEMBER} {row.name}" if row.kind == "seed" else row.name)),
                "what differs": fact_cell(_cut(row.what_differs) or None),
                "score": score,
                **cells,
                "reward": UNKNOWN if row.reward is None else TableCell(row.reward, f"{row.reward:.3f}"),
                "tokens": fact_cell(row.tokens),
                **{n: UNKNOWN if of is None else TableCell(of, duration(of)) for n, of in seconds.items()},
                "trained": fact_cell(row.trainable_parameters),
                "status": fact_cell(textwrap.shorten(plain(status), _WIDEST, placeholder="...")),
            }
        )
    return rows


def _is_alike(row: RunRow) -> bool:
    """Whether a row is compared and not shown to differ from the reference."""
    return row.difference is not None and bool(row.difference.by) and not is_shown(row.difference)


def _cut(text: str) -> str:
    shown = plain(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _plain_row(row: RunRow) -> dict[str, Any]:
    facts, found = asdict(row), row.difference
    facts |= {"difference": None if found is None else found.as_dict()}
    facts |= {"paired": "" if found is None else found.by, "pairs": 0 if found is None else found.pairs}
    for name in ("tokens", "trainable_parameters"):
        value = facts[name]
        facts[name] = int(value) if value is not None and value.is_integer() else value
    return facts | {"what_differs": row.what_differs, "seeds": list(row.seeds), "settings": dict(row.settings)}


def _notes(compared: RunComparison) -> Iterator[str]:
    """What must be known to read the table, the most needed first."""
    unit, over = (", in percent", "over problems") if compared.measure.task else ("", "over these steps")
    several = ", of rows of several seeds over seeds" if any(row.kind == "seeds" for row in compared.rows) else ""
    note = f"Score: {compared.measure.title}{unit}; ±: standard error {over}{several}."
    if compared.measure.key == "reward":
        note += " It is measured on training problems by the training's own rewards, and single runs are not paired."
    yield note
    yield from _difference_notes(compared)
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


def _difference_notes(compared: RunComparison) -> Iterator[str]:
    """How differences were taken, and how large a true one had to be to be shown."""
    tested = [row.difference for row in compared.rows if row.difference is not None]
    if not tested:
        return
    reference = next((plain(row.name) for row in compared.rows if row.reference), "")
    which = ", the best by these scores, which looks better than it is" if compared.chosen else ""
    text = f"Differences from {reference}{which}"
    ways = {SEED: "by seed (Student's t)", PROBLEM: "by problem (sign flips)"}
    how = " or ".join(text for way, text in ways.items() if any(one.by == way for one in tested))
    text += f", with 95 % intervals, each its own; paired {how}" if how else ""
    if how and compared.tests > 1:
        text += f"; p: Holm over {compared.tests} differences{', all pairs' if compared.chosen else ''}"
    yield f"{text}." if how else f"{text}; nothing pairs these scores, so that there are no intervals."
    if any(map(_is_alike, compared.rows)):
        of = f"{NOT_DIFFERENT}: not shown to differ from {reference}"
        yield f"{of}: the interval includes 0, or p is above {SMALL_P}."
    k = min((run.measured.k for run in compared.scored), default=1)
    for way in ways:
        known = [one for one in tested if one.by == way and (one.stderr > 0 or way == PROBLEM)]
        for worst in sorted(known, key=lambda one: (one.stderr, one.pairs))[-1:]:
            least, of = worst.smallest(max(1, compared.tests), k), f"{worst.pairs:,} {way}s"
            if least is None:
                yield f"Smallest difference that can be shown: {of} are too few to show any."
            else:
                text = f"{100 * least:.1f} points" if compared.measure.task else f"{least:.3g}"
                yield f"Smallest difference that 4 of 5 such comparisons show: {text}, paired by {way} ({of})."


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
