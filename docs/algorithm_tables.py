"""The tables of losses, estimators and named algorithms, as they stand in ``training-step.md`` and ``algorithms.md``.

Run as ``python docs/algorithm_tables.py``, it prints them; they are pasted by hand.
"""

import sys
from collections.abc import Iterable, Sequence

from perl.algorithms.algorithm import shown_value
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.registry import LOSSES, Paper


def losses_table() -> str:
    """Of ``training-step.md``."""
    return _table(
        ("loss", "objective of a token", "divided by", "ratio", "bounds of r", "logs", "source"),
        (
            (
                f"`{row.name}`",
                f"`{row.equation}`",
                row.weighting,
                row.level,
                row.clip,
                ", ".join(f"`{name}`" for name in row.metrics) or "none",
                _source(row.paper, row.differs),
            )
            for row in LOSSES.values()
        ),
    )


def advantages_table() -> str:
    """Of ``training-step.md``."""
    return _table(
        ("estimator", "called", "advantage of a completion", "where a group agrees", "source"),
        (
            (f"`{row.name}`", row.title, f"`{row.equation}`", row.flat, _source(row.paper, row.differs))
            for row in ADVANTAGES.values()
        ),
    )


def algorithms_table() -> str:
    """Of ``algorithms.md``."""
    return _table(
        ("name", "sets", "advantage", "source", "differs"),
        (
            (
                f"`{row.name}`",
                ", ".join(f"`{name}: {shown_value(value)}`" for name, value in row.settings.items()),
                row.advantage,
                _source(row.paper, row.constants),
                row.differs or "-",
            )
            for row in ALGORITHMS.values()
        ),
    )


def _source(paper: Paper | None, further: str) -> str:
    title = f"{paper.title} ({paper.reference})" if paper else "TRL"
    return f"{title}; {further}" if further else title


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write("\n".join((losses_table(), advantages_table(), algorithms_table())))
