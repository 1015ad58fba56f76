"""How each cell of a study ended, and what was chosen.

cells -> DIR/results.json, a table for a terminal
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from perl.errors import RunFolderError
from perl.run.files import write_text
from perl.run.tables import plain_table
from perl.run.warned import warn
from perl.training.studies.cells import SCORES, canonical, titled
from perl.training.studies.choose import TRAIN_AGAIN, Chosen, score_of
from perl.training.studies.conduct import noted_scores

_RESULTS, _CHOSEN = "results.json", "chosen.json"
_ENDED = ("done", "ended early")  # as the plan has it
_PUT_BACK = "put back what was there, or another --output"


@dataclass(frozen=True)
class Row:
    """A cell and what became of it.

    Attributes:
        stage: What its seed is for: ``choose`` or ``score``.
        score: See ``score`` of the study; None: it has none.
        reason: Why, in one line.
        command: That trains it alone.
    """

    name: str
    arm: str
    settings: Mapping[str, Any]
    seed: int
    stage: str
    status: str
    score: float | None
    reason: str
    command: str


@dataclass
class StudyResult:
    """What a study found, as far as it is done.

    Attributes:
        folder: Where.
        plan: The plan's hash.
        rows: A row for each cell.
        chosen: Title of each arm -> its candidate.
    """

    folder: Path
    plan: str
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
        for row in self.rows:
            if row.status not in _ENDED:
                yield f"{row.status}: {row.name}: {row.reason}"
        yield f"results  {self.folder / 'results.json'}"

    @property
    def unfinished(self) -> list[Row]:
        """The cells without a result: those that failed, were lost, or that a used-up budget left out."""
        return [row for row in self.rows if row.status not in _ENDED]


def write_chosen(result: StudyResult, choosing: Sequence[Row]) -> None:
    """Writes ``chosen.json``: the candidate of each arm, and how the cells that chose had ended and scored."""
    chosen = {title: one.candidate.key if one.candidate is not None else None for title, one in result.chosen.items()}
    cells = {row.name: {"status": row.status, "reason": row.reason, "score": row.score} for row in choosing}
    values = {"plan": result.plan, "chosen": chosen, "cells": cells}
    write_text(result.folder / _CHOSEN, json.dumps({**values, "sha256": _hash_of(values)}, indent=2) + "\n")


def read_chosen(folder: Path, plan: str) -> dict[str, Any] | None:
    """What :func:`write_chosen` wrote; None: nothing was chosen yet.

    Args:
        folder: Of the study.
        plan: Its plan's hash.

    Raises:
        RunFolderError: The file was changed by hand, is another study's, or is gone after cells were scored by it.
    """
    path = folder / _CHOSEN
    if not path.exists():
        if any((folder / "cells" / SCORES).glob("*/run.json")):
            what = "is gone, and cells were scored by the choice in it, which would be made anew"
            raise RunFolderError(what, str(path), _PUT_BACK)
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        written = found.pop("sha256")
        sound = written == _hash_of(found) and found["plan"] == plan
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        what = "is not the choice that this study made: its hash differs"
        raise RunFolderError(what, str(path), _PUT_BACK)
    return dict(found)


def write_results(result: StudyResult) -> None:
    """Writes ``results.json``: a row for each cell, and what was chosen."""
    chosen = {
        title: {
            "settings": one.candidate.settings if one.candidate is not None else None,
            "within two standard errors": [good.settings for good in one.good],
        }
        for title, one in result.chosen.items()
    }
    values = {"plan": result.plan, "chosen": chosen, "cells": [vars(row) for row in result.rows]}
    values = json.loads(json.dumps(values, default=str))
    text = json.dumps({**values, "sha256": _hash_of(values)}, indent=2)
    write_text(result.folder / _RESULTS, text + "\n")


def check_results(folder: Path) -> None:
    """Warns of a ``results.json`` that is not as it was written; what it says is read from the cells anew."""
    path = folder / _RESULTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sound = found.pop("sha256", None) == _hash_of(found)
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError, TypeError):
        sound = False
    if not sound:
        warn("PRL349", "%s was changed by hand: it is written anew from the cells' folders", path)


def check_scores(folder: Path, of: Literal["final", "best"], stages: Sequence[str]) -> None:
    """Refuses cells whose files were changed since they ended, as far as their scores show it.

    Args:
        folder: Of the study.
        of: Which adapter's.
        stages: Whose cells' scores still count.

    Raises:
        RunFolderError: A cell scores otherwise than when it ended.
    """
    for name, before in noted_scores(folder).items():
        for stage in stages:
            place = folder / "cells" / stage / name
            now = score_of(place, of)
            if now is not None and now != before:
                what = f"scored {before:.6g} when it ended and {now:.6g} now: its files, or scores.jsonl, were changed"
                raise RunFolderError(what, str(place), TRAIN_AGAIN)


def _hash_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(values).encode()).hexdigest()
