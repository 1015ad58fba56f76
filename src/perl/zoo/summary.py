"""The zoo as files for others: MODEL_ZOO.md, and one page for a browser.

Zoo -> MODEL_ZOO.md; zoo.html; Entry -> everything that it says

Both are the rows of :mod:`perl.zoo.table`, printed; the first is kept beside a zoo, so that a check can write it again
and compare.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from perl.recipe.assets import card_templates_folder
from perl.run.tables import (
    UNKNOWN,
    Row,
    TableCell,
    cells_of,
    html_templates,
    in_markdown,
    known_columns,
    plain,
    plain_table,
    printed,
    to_the_right,
)
from perl.zoo import table
from perl.zoo.catalogue import Zoo
from perl.zoo.entry import Entry

MARKDOWN = "MODEL_ZOO.md"
_WIDEST = 100
_HEAD = """# Model zoo

Adapters trained with reinforcement learning: their base, method and scores, and what is wrong with them. This file is
written by `perl zoo render` from `model_cards/zoo/entries/`; edit an entry, not this file. `perl zoo html` makes a page
of it that can be sorted, [docs/zoo.md](docs/zoo.md) says how an entry comes about.

Scores are in percent, ± is one standard error or, if that is larger, the standard deviation over seeds; brackets after
a score are its 95 % interval where problems came out alike and that error is 0.0. Scores of different tables were
measured in different ways and are not to be compared; `perl zoo rank TASK` ranks those that may be.
"""
_SECTIONS = {
    "trained-here": (
        "Trained here",
        "Trained and evaluated with this package; `perl zoo verify NAME` evaluates one again.",
    ),
    "reported": (
        "Reported by others",
        "Nothing here was measured by this package, and none of these files was loaded by it. What is known to be "
        "wrong stands in the notes.",
    ),
}


def rendered(zoo: Zoo) -> dict[Path, str]:
    """The file that is generated from a zoo, and its text: of a checkout's own at its root, else beside the entries."""
    root = zoo.folder.parent.parent
    own = zoo.folder.parent.name == "model_cards" and (root / "pyproject.toml").is_file()
    parts = [_HEAD]
    for provenance, (title, sentence) in _SECTIONS.items():
        # Entries whose scores stand in one table: those of a source, or of a base and protocols.
        groups: dict[str, list[Entry]] = {}
        for entry in (entry for entry in zoo.entries.values() if entry.provenance == provenance):
            hashes = ", ".join(dict.fromkeys(f"{s.task} {s.protocol_hash}" for s in entry.scores))
            measured = f"{entry.on_base}, protocol of {hashes}" if hashes else entry.on_base
            groups.setdefault(entry.source or "" if provenance == "reported" else measured, []).append(entry)
        parts += [f"## {title}\n\n{sentence}\n"] if groups else []
        # Tables with scores first; folders nobody scored below.
        for heading, group in sorted(groups.items(), key=lambda one: not any(entry.scores for entry in one[1])):
            parts.append(f"### {in_markdown(heading)}\n\n{_table(group)}\n")
    return {(root if own else zoo.folder) / MARKDOWN: "\n".join(parts)}


def sheet(entry: Entry) -> list[str]:
    """Everything that an entry says, for a terminal; what is unknown is left out."""
    row = table.row_of(entry)
    known = [name for name in table.FACTS if name not in ("notes", "scores") and row[name].value is not None]
    lines = plain_table([(name, row[name].text) for name in known], (False, False))
    if entry.scores:
        columns = [name for name in table.SCORE_COLUMNS if name not in ("k", "error", "base error")]
        lines += ["", printed([table.score_row(entry, score) for score in entry.scores], columns)]
    for other in entry.seeds:
        lines.append(f"seed {other.seed}: {plain(', '.join(f'{t} {100 * v:.1f}' for t, v in other.scores.items()))}")
    for note in entry.notes:
        lines += textwrap.wrap(plain(note), _WIDEST, initial_indent="- ", subsequent_indent="  ")
    return lines


def html_page(zoo: Zoo) -> str:
    """One page that needs no network and nothing beside it: a table that can be sorted and filtered, and each entry.

    Whatever an entry says is escaped, and the page forbids itself all but its own style and script.
    """
    folder = card_templates_folder()
    entries = list(zoo.entries.values())
    of_files = ("tokens", "parameters", "size", "notes")
    columns = ["name", "provenance", "method", "base", *table.tasks_of(entries), *of_files]
    style, script = ((folder / f"zoo.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page = html_templates(folder).get_template("zoo.html.jinja")
    rows = [table.row_of(entry) for entry in entries]
    sheets = {entry.name: "\n".join(sheet(entry)) for entry in entries}
    cells, right = cells_of(rows, columns), to_the_right(rows, columns)
    return page.render(columns=columns, rows=cells, right=right, sheets=sheets, style=style, script=script)


def _table(entries: Sequence[Entry]) -> str:
    """The entries of a group with the best first, and their notes."""
    tasks = table.tasks_of(entries)
    average = next((task for task in tasks if task.endswith("average")), next(iter(tasks), None))
    notes = {entry.name: entry.notes for entry in entries}
    numbers: dict[str, int] = {}
    rows: list[Row] = []
    for row in table.ordered([table.row_of(entry) for entry in entries], average):
        marks = [str(numbers.setdefault(note, len(numbers) + 1)) for note in notes[row["name"].text]]
        rows.append({**row, "notes": TableCell(len(marks), ", ".join(marks)) if marks else UNKNOWN})
    further = ("tokens", "parameters", "size", "repo", "subfolder", "notes")
    columns = ["name", *known_columns(rows, ["method", "base"]), *tasks, *known_columns(rows, further)]
    listed = [f"{number}. {in_markdown(note)}" for note, number in numbers.items()]
    bases = {
        f"{s.task} {table.score_row(e, s)['base score'].text}" for e in entries for s in e.scores if s.base is not None
    }
    base = [f"Base: {in_markdown(', '.join(sorted(bases)))}.", ""] if bases and len(bases) <= len(tasks) else []
    return "\n".join([printed(rows, columns, "markdown"), "", *base, *listed])
