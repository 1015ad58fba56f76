"""The zoo as two files that are kept beside it: MODEL_ZOO.md for people, zoo.csv for programs.

Zoo -> MODEL_ZOO.md, zoo.csv

Both hold the same for the same entries, so that a check can write them again and compare.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from perl.intervals import score_text
from perl.run.tables import Value, csv_text, in_markdown, markdown_table, size_text
from perl.zoo.catalogue import Zoo
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.listing import tasks_of
from perl.zoo.ranking import error_of

MARKDOWN, CSV = "MODEL_ZOO.md", "zoo.csv"

_CSV_COLUMNS = (
    "name",
    "provenance",
    "base",
    "base_revision",
    "method",
    "algorithm",
    "seed",
    "steps",
    "tokens",
    "trainable_parameters",
    "size",
    "licence",
    "task",
    "metric",
    "k",
    "n",
    "score",
    "stderr",
    "base_score",
    "base_stderr",
    "seeds",
    "protocol",
    "repo",
    "revision",
    "subfolder",
    "weights_sha256",
    "source",
    "notes",
)
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
        for number, (old, new) in enumerate(_padded(before, now), start=1):
            if old != new:
                found.append(f"{place}:{number}: is {_short(old)}, should be {_short(new)}")
                break
    return found


def _markdown(entries: Sequence[Entry]) -> str:
    parts = [_HEAD]
    for provenance, (title, sentence) in _SECTIONS.items():
        members = [entry for entry in entries if entry.provenance == provenance]
        if not members:
            continue
        parts.append(f"## {title}\n\n{sentence}\n")
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
        main = tasks[0] if len(entries) == 1 or not any(t.endswith("average") for t in tasks) else _average(tasks)
        entries = sorted(entries, key=lambda e: (-_score(e, main), e.name))
    notes = {note: number for number, note in enumerate(dict.fromkeys(n for e in entries for n in e.notes), start=1)}
    columns: list[tuple[str, bool, Callable[[Entry], str]]] = [
        ("name", False, lambda e: f"`{e.name}`" + _marks(e, notes)),
        ("method", False, lambda e: in_markdown(e.method)),
    ]
    if len({e.on_base for e in entries}) > 1:
        columns.append(("base", False, lambda e: in_markdown(e.on_base.rpartition("/")[2])))
    columns += [(in_markdown(task), True, _task_cell(task)) for task in tasks]
    facts: list[tuple[str, Callable[[Entry], Value], Callable[[Entry], str]]] = [
        ("tokens", lambda e: e.tokens, lambda e: _number(e.tokens)),
        ("parameters", lambda e: e.trainable_parameters, lambda e: _number(e.trainable_parameters)),
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


def _average(tasks: Iterable[str]) -> str:
    return next(task for task in tasks if task.endswith("average"))


def _score(entry: Entry, task: str) -> float:
    found = entry.score(task)
    return -1.0 if found is None else found.adapter


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


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


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
    rows: list[list[Value]] = []
    for entry in entries:
        facts: dict[str, Value] = {
            "name": entry.name,
            "provenance": entry.provenance,
            "base": entry.on_base,
            "base_revision": entry.base_revision,
            "method": entry.method,
            "algorithm": entry.algorithm,
            "seed": entry.seed,
            "steps": entry.steps,
            "tokens": entry.tokens,
            "trainable_parameters": entry.trainable_parameters,
            "size": entry.adapter.size,
            "licence": entry.licence,
            "repo": entry.adapter.repo,
            "revision": entry.adapter.revision,
            "subfolder": entry.adapter.subfolder,
            "weights_sha256": entry.adapter.sha256.get("adapter_model.safetensors"),
            "source": entry.source,
            "notes": len(entry.notes),
        }
        scores: list[TaskScore | None] = [*entry.scores] or [None]
        for score in scores:
            of_task: dict[str, Value] = {}
            if score is not None:
                of_task = {
                    "task": score.task,
                    "metric": score.metric,
                    "k": score.k,
                    "n": score.n,
                    "score": score.adapter,
                    "stderr": score.stderr,
                    "base_score": score.base,
                    "base_stderr": score.base_stderr,
                    "seeds": " ".join(
                        f"{s.seed}:{s.scores[score.task]}" for s in entry.seeds if score.task in s.scores
                    ),
                    "protocol": score.protocol_hash,
                }
            rows.append([{**facts, **of_task}.get(column) for column in _CSV_COLUMNS])
    return csv_text(_CSV_COLUMNS, rows)


def _padded(before: Sequence[str], now: Sequence[str]) -> Iterable[tuple[str | None, str | None]]:
    longest = max(len(before), len(now))
    return zip([*before, *[None] * (longest - len(before))], [*now, *[None] * (longest - len(now))], strict=True)


def _short(line: str | None) -> str:
    return "absent" if line is None else repr(line if len(line) <= 60 else f"{line[:57]}...")
