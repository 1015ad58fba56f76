"""Everything that an entry of the zoo says, for a terminal.

Entry -> lines

What is unknown is left out.
"""

import textwrap
from collections.abc import Iterator

from perl.run.tables import percent, plain, plain_table, signed_percent, size_text
from perl.zoo.entry import Entry
from perl.zoo.intervals import score_text

_WIDEST = 100


def sheet(entry: Entry) -> list[str]:
    """The entry, line by line."""
    facts = [(name, str(value)) for name, value in _facts(entry) if value not in (None, "")]
    lines = plain_table(facts, (False, False))
    if entry.scores:
        rows = [
            [
                score.task,
                score.metric,
                score_text(score.adapter, score.stderr, score.n),
                score_text(score.base, score.base_stderr, score.n),
                signed_percent(score.gain),
                "-" if score.n is None else f"{score.n:,}",
                score.protocol_hash or "-",
            ]
            for score in entry.scores
        ]
        headings = ["task", "metric", "adapter", "base", "difference", "problems", "protocol"]
        lines += ["", *plain_table([headings, *rows], (False, False, True, True, True, True, False))]
    for other in entry.seeds:
        lines.append(f"seed {other.seed}: {plain(', '.join(f'{t} {percent(v)}' for t, v in other.scores.items()))}")
    if entry.notes:
        lines.append("")
        for note in entry.notes:
            lines += textwrap.wrap(plain(note), _WIDEST, initial_indent="- ", subsequent_indent="  ")
    return lines


def _facts(entry: Entry) -> Iterator[tuple[str, object]]:
    place = entry.adapter
    yield "name", entry.name
    yield "provenance", entry.provenance
    yield "source", entry.source
    yield "base", f"{entry.base}@{entry.base_revision}" if entry.base_revision else entry.base
    yield "base loaded as", entry.base_quantization
    yield "method", entry.method
    yield "settings", ", ".join(f"{name} {value}" for name, value in entry.settings.items())
    yield "algorithm", entry.algorithm
    yield "seed", entry.seed
    yield "steps", entry.steps
    yield "tokens", None if entry.tokens is None else f"{entry.tokens:,}"
    yield "wall time", None if entry.seconds is None else f"{entry.seconds:,.0f} s"
    yield "hardware", entry.hardware
    yield "trained", None if entry.trainable_parameters is None else f"{entry.trainable_parameters:,} parameters"
    yield "licence", entry.licence
    yield "created", entry.created
    yield "files", "in the zoo" if place.shipped else None
    yield "repository", f"{place.repo}@{place.revision}" if place.repo and place.revision else place.repo
    yield "folder", place.subfolder
    yield "size", None if place.size is None else size_text(place.size)
    for name, digest in place.sha256.items():
        yield "sha256", f"{digest}  {name}"
    if entry.curve:
        (first, low), (last, high) = entry.curve[0], entry.curve[-1]
        yield "reward", f"{low:.3f} at step {first}, {high:.3f} at step {last}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in entry.versions.items())
