"""The zoo as two files that are kept beside it: MODEL_ZOO.md for people, zoo.csv for programs.

Zoo -> MODEL_ZOO.md, zoo.csv

Both hold the same for the same entries, so that a check can write them again and compare.
"""

from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from pathlib import Path

from perl.run.tables import Value, csv_text, in_markdown, markdown_table, size_text
from perl.zoo.catalogue import Zoo
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_text
from perl.zoo.listing import fact_cell, tasks_of
from perl.zoo.ranking import error_of

MARKDOWN, CSV = "MODEL_ZOO.md", "zoo.csv"

# Column -> its value for an entry and one of its scores, if it has any.
_CSV_COLUMNS: dict[str, Callable[[Entry, TaskScore | None], Value]] = {
    "name": lambda e, _: e.name,
    "provenance": lambda e, _: e.provenance,
    "base": lambda e, _: e.on_base,
    "base_revision": lambda e, _: e.base_revision,
    "method": lambda e, _: e.method,
    "algorithm": lambda e, _: e.algorithm,
    "seed": lambda e, _: e.seed,
    "steps": lambda e, _: e.steps,
    "tokens": lambda e, _: e.tokens,
    "trainable_parameters": lambda e, _: e.trainable_parameters,
    "size": lambda e, _: e.adapter.size,
    "licence": lambda e, _: e.licence,
    "task": lambda _, s: s.task if s else None,
    "metric": lambda _, s: s.metric if s else None,
    "k": lambda _, s: s.k if s else None,
    "n": lambda _, s: s.n if s else None,
    "score": lambda _, s: s.adapter if s else None,
    "stderr": lambda _, s: s.stderr if s else None,
    "base_score": lambda _, s: s.base if s else None,
    "base_stderr": lambda _, s: s.base_stderr if s else None,
    "seeds": lambda e, s: " ".join(f"{o.seed}:{o.scores[s.task]}" for o in e.seeds if s and s.task in o.scores),
    "protocol": lambda _, s: s.protocol_hash if s else None,
    "repo": lambda e, _: e.adapter.repo,
    "revision": lambda e, _: e.adapter.revision,
    "subfolder": lambda e, _: e.adapter.subfolder,
    "weights_sha256": lambda e, _: e.adapter.sha256.get("adapter_model.safetensors"),
    "source": lambda e, _: e.source,
    "notes": lambda e, _: len(e.notes),
}
_HEAD = """# Model zoo

Adapters trained with reinforcement learning: their base, method and scores, and what is wrong with them. This file is
written by `perl zoo render` from `model_cards/zoo/entries/`; edit an entry, not this file. `perl zoo html` makes a page
of it that can be sorted, [docs/zoo.md](docs/zoo.md) says how an entry comes about.

Scores are in percent, ± is one standard error; brackets after a score are its 95 % interval where problems came out
alike and that error is 0.0, brackets after a name are notes below the table. Scores of different tables were measured
in different ways and are not to be compared; `perl zoo rank TASK` ranks those that may be.
"""
_SECTIONS = {
    "trained-here": (
        "Trained here",
        "Trained and evaluated with this package; `perl zoo verify NAME` evaluates one again.",
    ),
    "reproduced": ("Reproduced", "Trained by others, evaluated with this package."),
    "reported": (
        "Reported by others",
        "Nothing here was measured by this package, and none of these files was loaded by it. What is known to be "
        "wrong stands in the notes.",
    ),
}


def rendered(zoo: Zoo) -> dict[str, str]:
    """Name -> text of the files that are generated from a zoo."""
    entries = list(zoo.entries.values())
    return {MARKDOWN: _markdown(entries), CSV: _csv(entries)}


def places(zoo: Zoo) -> dict[str, Path]:
    """Where the generated files of a zoo lie.

    Those of a checkout's own zoo: MODEL_ZOO.md at its root. Of any other: both beside the entries.
    """
    root = zoo.folder.parent.parent
    own = zoo.folder.parent.name == "model_cards" and (root / "pyproject.toml").is_file()
    return {MARKDOWN: (root if own else zoo.folder) / MARKDOWN, CSV: zoo.folder / CSV}


def stale(zoo: Zoo) -> list[str]:
    """What the generated files lack of the entries, a line each; empty: they are as they should be."""
    found = []
    for name, text in rendered(zoo).items():
        place = places(zoo)[name]
        if not place.is_file():
            found.append(f"{place}: is absent")
            continue
        before, now = place.read_text(encoding="utf-8").splitlines(), text.splitlines()
        pairs = enumerate(zip_longest(before, now), start=1)
        differ = (
            f"{place}:{number}: is {_short(old)}, should be {_short(new)}" for number, (old, new) in pairs if old != new
        )
        found += islice(differ, 1)
    return found


def _markdown(entries: Sequence[Entry]) -> str:
    parts = [_HEAD]
    for provenance, (title, sentence) in _SECTIONS.items():
        members = [entry for entry in entries if entry.provenance == provenance]
        parts += [f"## {title}\n\n{sentence}\n"] if members else []
        for heading, group in _groups(members).items():
            parts.append(f"### {in_markdown(heading)}\n\n{_table(group)}\n")
    return "\n".join(parts)


def _groups(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries whose scores stand in one table: those of a source, or of a base and protocols."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.provenance == "reported":
            heading = entry.source or ""
        else:
            hashes = ", ".join(dict.fromkeys(f"{s.task} {s.protocol_hash}" for s in entry.scores))
            heading = f"{entry.on_base}, protocol of {hashes}" if hashes else entry.on_base
        groups.setdefault(heading, []).append(entry)
    # Tables with scores first; folders nobody scored below.
    return dict(sorted(groups.items(), key=lambda item: not any(entry.scores for entry in item[1])))


def _table(entries: Sequence[Entry]) -> str:
    """The entries of a group with the best first, and their notes."""
    tasks = tasks_of(entries)
    if tasks:
        average = next((task for task in tasks if task.endswith("average")), tasks[0])
        scores = {entry.name: entry.score(average) for entry in entries}
        entries = sorted(entries, key=lambda e: (-(s.adapter if (s := scores[e.name]) else -1.0), e.name))
    notes = {note: number for number, note in enumerate(dict.fromkeys(n for e in entries for n in e.notes), start=1)}
    columns: list[tuple[str, bool, Callable[[Entry], str]]] = [
        ("name", False, lambda e: f"`{e.name}`" + _marks(e, notes)),
        ("method", False, lambda e: in_markdown(e.method)),
    ]
    if len({e.on_base for e in entries}) > 1:
        columns.append(("base", False, lambda e: in_markdown(e.on_base.rpartition("/")[2])))
    columns += [(in_markdown(task), True, _task_cell(task)) for task in tasks]
    facts: list[tuple[str, Callable[[Entry], Value], Callable[[Entry], str]]] = [
        ("tokens", lambda e: e.tokens, lambda e: fact_cell(e.tokens).text),
        ("parameters", lambda e: e.trainable_parameters, lambda e: fact_cell(e.trainable_parameters).text),
        ("size", lambda e: e.adapter.size, lambda e: size_text(e.adapter.size)),
        ("folder on the Hub", lambda e: e.adapter.repo, _folder),
    ]
    columns += [
        (name, name != "folder on the Hub", text)
        for name, value, text in facts
        if any(value(e) is not None for e in entries)
    ]
    rows = [[text(entry) for _, _, text in columns] for entry in entries]
    lines = markdown_table([[name for name, _, _ in columns], *rows], [right for _, right, _ in columns])
    bases = _base_line(entries, tasks)
    return "\n".join(
        [*lines, *(["", bases] if bases else []), "", *(f"{i}. {in_markdown(n)}" for n, i in notes.items())]
    )


def _marks(entry: Entry, notes: dict[str, int]) -> str:
    return f" [{', '.join(str(notes[note]) for note in entry.notes)}]" if entry.notes else ""


def _task_cell(task: str) -> Callable[[Entry], str]:
    def cell(entry: Entry) -> str:
        found = entry.score(task)
        if found is None:
            return "-"
        text = score_text(found.adapter, found.stderr, found.n)
        spread = error_of(entry, found)
        return f"{text} (seeds ± {100 * spread:.1f})" if spread is not None and spread != found.stderr else text

    return cell


def _folder(entry: Entry) -> str:
    if entry.adapter.repo is None:
        return "-"
    return in_markdown("/".join(part for part in (entry.adapter.repo, entry.adapter.subfolder) if part))


def _base_line(entries: Sequence[Entry], tasks: Sequence[str]) -> str:
    """``Base: user/name; math_500 80.9, ...``, as far as it is the same for all."""
    names = {entry.on_base for entry in entries}
    scores = []
    for task in tasks:
        scored = [score for entry in entries for score in entry.scores if score.task == task]
        found = {(score.base, score.base_stderr, score.n) for score in scored if score.base is not None}
        if len(found) == 1:
            scores.append(f"{task} {score_text(*found.pop())}")
    parts = [*(names if len(names) == 1 else ()), *([", ".join(scores)] if scores else [])]
    return in_markdown(f"Base: {'; '.join(parts)}.") if parts else ""


def _csv(entries: Sequence[Entry]) -> str:
    """A line for each entry and task; one for an entry without a score."""
    lines = [(entry, score) for entry in entries for score in (*entry.scores, *([] if entry.scores else [None]))]
    return csv_text(list(_CSV_COLUMNS), [[value(*line) for value in _CSV_COLUMNS.values()] for line in lines])


def _short(line: str | None) -> str:
    return "absent" if line is None else repr(line if len(line) <= 60 else f"{line[:57]}...")
