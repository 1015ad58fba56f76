"""What became of each cell of a study, as its run folder tells, and what was chosen.

run folder -> Row -> DIR/chosen.json, DIR/results.json, a table for a terminal
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from perl.errors import RunFolderError
from perl.evaluation.scoring.metrics import error_of_mean
from perl.run.files import write_text
from perl.run.folder import Run
from perl.run.tables import plain_table
from perl.training.studies.cells import SCORES, Candidate, Cell, titled, without_absent
from perl.training.studies.plan import Study
from perl.training.studies.processes import CellEnd

CHOSEN = "chosen.json"
_ENDED = ("done", "ended early")  # as the plan has it


@dataclass(frozen=True)
class Chosen:
    """The candidate of an arm that is scored.

    Attributes:
        candidate: The best on the seeds that choose, the first of equals; None: none was trained to the end.
        scores: Mean score of each candidate over those seeds, by its key; NaN where none was.
        good: The candidates whose mean is within two standard errors of the best.
    """

    candidate: Candidate | None
    scores: Mapping[str, float]
    good: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class CellRow:
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


def row_of(cell: Cell, run: Path, ended: CellEnd, command: str) -> CellRow:
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
    return CellRow(
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
    rows: list[CellRow] = field(default_factory=list)
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
    def unfinished(self) -> list[CellRow]:
        """The cells without a result: those that failed, have not ended, or were not scored."""
        return [row for row in self.rows if row.status not in _ENDED or (row.status == "done" and row.score is None)]


def read_chosen(folder: Path) -> list[CellRow] | None:
    """The cells by which was chosen, as ``chosen.json`` has them; None: nothing was yet.

    Raises:
        RunFolderError: The file is malformed.
    """
    path = folder / CHOSEN
    try:
        return [CellRow(**row) for row in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"is not what a study writes: {error}", str(path), "another --output") from None


def choose(
    arm: Sequence[Candidate],
    scores: Mapping[tuple[str, int], float],
    seeds: Sequence[int],
    completions: Mapping[str, int],
) -> Chosen:
    """The best candidate of an arm.

    Only candidates that have a score on every seed are compared, so that none wins for want of a bad one. Two or three
    seeds may agree by chance: the error of the best is never taken for less than that of drawing its completions.

    Args:
        arm: Its candidates.
        scores: By candidate's key and seed; those that failed are absent.
        seeds: That choose.
        completions: By which a cell of a candidate was scored, by its key; 0: they were not drawn, or are not known.
    """
    each = {one.key: [scores[one.key, seed] for seed in seeds if (one.key, seed) in scores] for one in arm}
    means = {key: fmean(found) if len(found) == len(seeds) else math.nan for key, found in each.items()}
    whole = [one for one in arm if not math.isnan(means[one.key])]
    if not whole:
        return Chosen(None, means)
    best = max(whole, key=lambda one: means[one.key])
    # The standard error that drawing so many completions gives a score: binomial, as between 1 and 99 %.
    inside, count = min(max(means[best.key], 0.01), 0.99), completions.get(best.key, 0) * len(seeds)
    drawn = math.sqrt(inside * (1 - inside) / count) if count else 0.0
    width = 2 * max(error_of_mean(each[best.key]), drawn) if len(seeds) > 1 else 0.0
    return Chosen(best, means, tuple(one for one in whole if means[one.key] >= means[best.key] - width))


def better_share(arm: Sequence[Candidate], rewards: Mapping[str, float], keep: float) -> list[Candidate]:
    """The candidates of an arm that go on after a rung: so large a share, rounded up, of those that are left.

    Args:
        arm: Those that are left.
        rewards: Mean reward over the seeds, by key; those without one are ended.
        keep: Share.
    """
    known = [one for one in arm if one.key in rewards]
    count = min(len(known), math.ceil(keep * len(arm) - 1e-9))
    best = sorted(known, key=lambda one: -rewards[one.key])[:count]
    return [one for one in arm if one in best]


def finalists(study: Study, chosen: Mapping[str, Chosen]) -> list[Candidate]:
    """What is scored: each arm as it was chosen, and as it is with what was chosen for the baseline.

    The second, whether or not it was tried for that arm, is how studies compare that use one rate for all; beside the
    first it shows what that hides.
    """
    best = [one.candidate for one in chosen.values()]
    all_alike = [at_baseline(study, chosen, arm[0]) for arm in study.arms]
    return list({one.key: one for one in (*best, *all_alike) if one is not None}.values())


def at_baseline(study: Study, chosen: Mapping[str, Chosen], arm: Candidate) -> Candidate | None:
    """An arm with what was chosen for the baseline, as far as its method has such settings.

    Args:
        study: That names a baseline; else nothing is.
        chosen: Of each arm.
        arm: One of its candidates.
    """
    of_baseline = chosen[study.baseline].candidate if study.file.baseline and study.baseline in chosen else None
    if of_baseline is None:
        return None
    kept = without_absent({**arm.arm, **of_baseline.chosen}, study.file.overrides)
    return Candidate(arm.arm, {key: value for key, value in of_baseline.chosen.items() if key in kept})
