"""What must be known to read a comparison of runs: how it was scored and tested, and what it cannot show.

Comparison -> sentences
"""

import math
import textwrap
from collections.abc import Iterator, Sequence

from perl.evaluation.compare import engines_note
from perl.evaluation.differing_protocols import ways_of
from perl.evaluation.metrics import SMALL_P
from perl.evaluation.run_names import settings_text
from perl.evaluation.table import is_shown
from perl.reports.comparison.cells import PROBLEM, SEED, CellDifference, smallest_shown
from perl.reports.comparison.measure import Measured
from perl.reports.comparison.rows import Comparison, Row
from perl.run.differing import DASH, differing
from perl.run.tables import plain

NOT_DIFFERENT = "≈"
_MOST_SCORES = 6
_LONGEST_WAY = 100


def notes_of(compared: Comparison) -> list[str]:
    """Sentences below the table, the most needed first."""
    notes = [_score(compared)]
    tested = [row for row in compared.rows if row.difference is not None]
    if tested:
        notes += [_differences(compared, tested), *_not_shown(compared, tested), *_power(compared)]
    notes += [*_single_seeds(compared), *_engines(compared), *_others(compared)]
    return notes


def group_titles(compared: Comparison) -> list[str]:
    """What stands over each group of rows that were asked alike; one group has none.

    Scores of two groups say nothing of each other.
    """
    if len(compared.groups) < 2:
        return [""] * len(compared.groups)
    found = [cells[0].runs[0].measured for cells, _ in compared.groups]
    ways = _ways(found, compared.measure.task)
    return [
        textwrap.shorten(f"Asked otherwise: {plain(way) or 'nothing is known of it'}", _LONGEST_WAY, placeholder="...")
        for way in ways
    ]


def is_alike(row: Row) -> bool:
    """Whether a row is compared and not shown to differ from the reference."""
    return row.difference is not None and bool(row.paired) and not is_shown(row.difference)


def _ways(found: Sequence[Measured], task: str) -> list[str]:
    """Of each in which settings it was asked otherwise than another."""
    results = [one.results for one in found if one.results is not None]
    if len(results) == len(found):
        return ways_of(results, {task})
    rows = differing([one.way for one in found])
    return [
        settings_text({key: texts[i] for key, texts in rows.items() if texts[i] != DASH}) for i in range(len(found))
    ]


def _score(compared: Comparison) -> str:
    unit = ", in percent" if compared.measure.percent else ""
    over = {"task": "over problems", "best": "over problems", "logged": "over these steps"}[compared.measure.kind]
    several = any(row.kind == "seeds" for row in compared.rows)
    error = f"±: standard error {over}" + (", of rows of several seeds over seeds" if several else "")
    note = f"Score: {compared.measure.title}{unit}; {error}."
    if compared.measure.kind == "logged" and compared.measure.key == "reward":
        note += " It is measured on training problems by the training's own rewards, and single runs are not paired."
    if compared.measure.kind == "best":
        note += " The best of several steps looks better than it is."
    return note


def _differences(compared: Comparison, tested: Sequence[Row]) -> str:
    names = [plain(row.name) for row in compared.rows if row.reference]
    which = ", the best by these scores, which looks better than it is" if compared.chosen else ""
    first = f"Differences from {' and '.join(names)}{which}"
    ways = {SEED: "by seed (Student's t)", PROBLEM: "by problem (sign flips)"}
    how = " or ".join(text for way, text in ways.items() if any(row.paired == way for row in tested))
    if not how:
        return f"{first}; nothing pairs these scores, so that there are no intervals."
    text = f"{first}, with 95 % intervals, each its own; paired {how}"
    if compared.tests > 1:
        pairs = ", all pairs" if compared.chosen else ""
        text += f"; p: Holm over {compared.tests} differences{pairs}"
    return f"{text}."


def _not_shown(compared: Comparison, tested: Sequence[Row]) -> Iterator[str]:
    if any(map(is_alike, tested)):
        name = " or ".join(plain(row.name) for row in compared.rows if row.reference)
        yield f"{NOT_DIFFERENT}: not shown to differ from {name}: the interval includes 0, or p is above {SMALL_P}."
    if any(row.paired and row.difference is not None and math.isnan(row.difference.low) for row in tested):
        yield "Where all pairs differ by the same, there is no spread to take an interval from."


def _power(compared: Comparison) -> Iterator[str]:
    """The smallest difference that would have been shown."""
    found = [
        CellDifference(row.difference, 0.0, row.paired, row.pairs)
        for row in compared.rows
        if row.difference is not None and row.paired
    ]
    k = min((one.k for one in compared.measured.values()), default=1)
    for how, (least, pairs) in smallest_shown(found, k, max(1, compared.tests)).items():
        of = f"{pairs:,} {how}s"
        if least is None:
            yield f"Smallest difference that can be shown: {of} are too few to show any."
            continue
        text = f"{100 * least:.1f} points" if compared.measure.percent else f"{least:.3g}"
        yield f"Smallest difference that 4 of 5 such comparisons show: {text}, paired by {how} ({of})."


def _single_seeds(compared: Comparison) -> Iterator[str]:
    cells = [cell for cells, _ in compared.groups for cell in cells]
    single = sum(len(cell.runs) == 1 for cell in cells)
    if single and len(cells) > 1:
        some = f"{single} of {len(cells)} settings {'has' if single == 1 else 'have'}"
        of = "All settings have" if single == len(cells) else some
        yield f"{of} one seed: what is said of them is said of these adapters, another seed may give others."


def _engines(compared: Comparison) -> list[str]:
    """A line if not all completions were drawn by the same engine in the same precision."""
    found = [(row.name, one) for row in compared.rows if (one := compared.measured.get(str(row.folder))) is not None]
    scored = [(name, one.results) for name, one in found if one.results is not None]
    return engines_note([results for _, results in scored], [plain(name) for name, _ in scored])


def _others(compared: Comparison) -> Iterator[str]:
    tasks = {
        f"{task.name}/avg@{task.score.k}": None
        for one in compared.measured.values()
        if one.results is not None
        for task in one.results.tasks
        if task.name != compared.measure.task
    }
    if tasks:
        yield f"Other scores: --score {' or '.join(list(tasks)[:_MOST_SCORES])}; `perl eval compare` shows all at once."
    of_recipes = [any(key.startswith("data.") for key in one.way) for one in compared.measured.values()]
    if compared.measure.kind == "logged" and not all(of_recipes):
        yield "What scripts train on is not in their folders: their problems may not be the same."
