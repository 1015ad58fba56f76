"""How the cells of a study are carried out, where each lies, and what the processes of each used.

cell -> command, run folder, log; DIR/usage.jsonl, DIR/scores.jsonl -> rows
"""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perl.recipe.sections import ModelSection
from perl.run.logs import append_row, read_log
from perl.training.studies.cells import Cell

GOES_ON = "the same command goes on with it"


@dataclass(frozen=True)
class Ended:
    """How a cell ended.

    Attributes:
        status: ``done``, ``paused`` (for halving), ``ended early`` (by it), ``failed``, ``lost`` (with its node, for no
            reason of its own), ``interrupted``, ``not begun``, or while the study goes on ``in hand``.
        reason: Why, in one line.
    """

    status: str
    reason: str = ""


@dataclass(frozen=True)
class Conduct:
    """How cells are carried out, which decides no result.

    Attributes:
        folder: Of the study.
        recipe: As ``perl train`` takes it.
        every: Overrides of every cell.
        at_once: Cells at the same time.
        threads: Of each.
        budget: Core-seconds after which no cell is begun; None: no limit.
        model: The base that all cells have and map; None: each loads its own.
        alone: Titles of arms whose cells change the weights of the servers that all share, so that no other cell may
            use these meanwhile.
        score: Of which adapter; a done cell without that of its last one is scored again.
    """

    folder: Path
    recipe: str
    every: tuple[str, ...] = ()
    at_once: int = 1
    threads: int = 1
    budget: float | None = None
    model: ModelSection | None = None
    alone: frozenset[str] = frozenset()
    score: Literal["final", "best"] = "final"

    def may_begin(self, cell: Cell, running: Collection[Cell]) -> bool:
        """Whether a cell can train beside those that do."""
        together = not any(one.candidate.title in self.alone for one in (cell, *running))
        return not running or (len(running) < self.at_once and together)

    def arguments(self, cell: Cell) -> list[str]:
        """Of the command that trains a cell, without its folder."""
        return ["train", self.recipe, *self.every, *cell.overrides]

    def command(self, cell: Cell) -> str:
        """That trains a cell alone, for a person to paste, with as many threads."""
        return f"OMP_NUM_THREADS={self.threads} " + shlex.join(["perl", *self.arguments(cell)])

    def run_of(self, cell: Cell) -> Path:
        """A cell's run folder."""
        return self.folder / "cells" / cell.stage / cell.name

    def log_of(self, cell: Cell) -> Path:
        """What a cell's processes printed."""
        return self.folder / "logs" / f"{cell.name}.log"


def last_error(log: Path, begin: int = 0) -> str:
    """The last line of a log that tells of an error, else the last one; of an absent log nothing.

    Args:
        log: The file.
        begin: Bytes of it that were there before.
    """
    try:
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ").strip()


def used(conduct: Conduct) -> float:
    """Core-seconds of all processes of cells that have ended."""
    return sum(float(row.get("cpu", 0)) for row in usage_rows(conduct.folder))


def usage_rows(folder: Path) -> list[dict[str, Any]]:
    """What each process of a cell used: name, code, cpu (core-seconds), wall (seconds), peak (bytes)."""
    return read_log(folder / "usage.jsonl")


def add_usage(folder: Path, row: Mapping[str, Any]) -> None:
    """Notes what a process used that has ended; see :func:`usage_rows`."""
    append_row(folder / "usage.jsonl", row)


def noted_scores(folder: Path) -> dict[str, float]:
    """What each cell scored when it ended, by name; of one that was scored again, what it scored then."""
    rows = read_log(folder / "scores.jsonl")
    return {str(row.get("name")): row["score"] for row in rows if isinstance(row.get("score"), int | float)}


def add_score(folder: Path, name: str, score: float) -> None:
    """Notes what a cell scored, unless that is noted."""
    if noted_scores(folder).get(name) != score:
        append_row(folder / "scores.jsonl", {"name": name, "score": score})
