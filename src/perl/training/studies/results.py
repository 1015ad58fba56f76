"""What became of each cell of a study, as its run folder tells, and what was chosen.

run folder -> Row -> DIR/chosen.json, DIR/results.json, a table for a terminal
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from perl.errors import RunFolderError
from perl.run.files import write_text
from perl.run.folder import Run
from perl.run.tables import plain_table
from perl.training.studies.cells import SCORES, Cell, titled
from perl.training.studies.choose import Chosen
from perl.training.studies.processes import CellEnd

CHOSEN = "chosen.json"
_ENDED = ("done", "ended early")  # as the plan has it


@dataclass(frozen=True)
class Row:
    """A cell and what became of it.

    Attributes:
        stage: What its seed is for: ``choose`` or ``score``.
        status: As :class:`perl.training.studies.processes.CellEnd` has it.
        score: The mean over its tasks of avg@k of the adapter; None: it has none.
        reason: Why, in one line.
        command: That trains it alone.
        completions: By which it was scored.
        parameters: That train.
        adapter: SHA-256 of its weights.
        seconds: That it took.
        data: Versions of what it was trained on and holds out, where these are files or on the Hub.
    """

    name: str
    arm: str
    settings: Mapping[str, Any]
    seed: int
    stage: str
    status: str
    score: float | None = None
    reason: str = ""
    command: str = ""
    completions: int = 0
    parameters: int | None = None
    adapter: str = ""
    seconds: float = 0.0
    data: Mapping[str, str | None] = field(default_factory=dict)


def row_of(cell: Cell, run: Path, ended: CellEnd, command: str) -> Row:
    """A cell as its run folder has it.

    Args:
        cell: Which.
        run: Its folder, if it has begun.
        ended: How it ended.
        command: That trains it alone.

    Raises:
        RunFolderError: What stands there is no score.
    """
    try:
        facts = Run.read(run).facts
    except RunFolderError:
        facts = {}
    tasks = facts.get("eval", {}) if ended.status == "done" else {}
    try:
        score = fmean(float(task["adapter"]) for task in tasks.values()) if tasks else None
        completions = sum(int(task["n"]) * int(task["k"]) for task in tasks.values())
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"its scores are malformed: {error}", str(run)) from None
    return Row(
        name=cell.name,
        arm=cell.candidate.title,
        settings=cell.candidate.settings,
        seed=cell.seed,
        stage=cell.stage,
        status=ended.status,
        score=score,
        reason="it has no score" if ended.status == "done" and score is None else ended.reason,
        command=command,
        completions=completions,
        parameters=facts.get("trainable_parameters"),
        adapter=facts.get("fingerprint", {}).get("adapter", ""),
        seconds=facts.get("seconds", 0.0),
        data=facts.get("data", {}),
    )


@dataclass
class StudyResult:
    """What a study found, as far as it is done.

    Attributes:
        folder: Where.
        rows: A row for each cell.
        chosen: Title of each arm -> its candidate.
    """

    folder: Path
    rows: list[Row] = field(default_factory=list)
    chosen: dict[str, Chosen] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The scores for a person to read: a row for each arm and what was chosen for it."""
        asked: dict[str, list[float | None]] = {}
        for row in self.rows:
            if row.stage == SCORES:
                asked.setdefault(titled(row.settings), []).append(row.score)
        scores = {title: [score for score in found if score is not None] for title, found in asked.items()}
        means = {title: fmean(found) for title, found in scores.items() if found}
        table = [["scored", "mean", "seeds"]]
        for title in sorted(asked, key=lambda title: -means.get(title, 0.0)):
            mean = f"{means[title]:.3f}" if title in means else "-"
            table.append([title, mean, f"{len(scores[title])}/{len(asked[title])}"])
        yield from plain_table(table)
        yield from (f"{row.status}: {row.name}: {row.reason}" for row in self.unfinished)
        yield f"report   {self.folder / 'report.md'}"

    def write(self, name: str) -> None:
        """Writes a row for each cell, and what was chosen for each arm, into a file of the folder."""
        chosen = {title: one.candidate.settings for title, one in self.chosen.items() if one.candidate is not None}
        values = {"chosen": chosen, "cells": [asdict(row) for row in self.rows]}
        write_text(self.folder / name, json.dumps(values, indent=2, default=str) + "\n")

    @property
    def unfinished(self) -> list[Row]:
        """The cells without a result: those that failed, have not ended, or were not scored."""
        return [row for row in self.rows if row.status not in _ENDED or (row.status == "done" and row.score is None)]


def read_chosen(folder: Path) -> list[Row] | None:
    """The cells by which was chosen, as ``chosen.json`` has them; None: nothing was yet.

    Raises:
        RunFolderError: The file is malformed.
    """
    path = folder / CHOSEN
    try:
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"is not what a study writes: {error}", str(path), "another --output") from None
