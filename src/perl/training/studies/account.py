"""What is known of a study while it is carried out: how cells have ended, and the files that say so.

ends of cells -> rows -> DIR/results.json, DIR/report.md
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perl.errors import RunFolderError
from perl.run.folder import Run
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, Cell, cells_of
from perl.training.studies.choose import score_of
from perl.training.studies.conduct import GOES_ON, Conduct, Ended
from perl.training.studies.report import write_report
from perl.training.studies.results import Row, StudyResult, write_results
from perl.training.studies.written_plan import Study

# So often, at most, are results and report written while cells train.
_WRITTEN_SECONDS = 120.0


@dataclass
class Account:
    """What is known of a study so far, and its files.

    Attributes:
        frozen: What was chosen by an earlier call, as ``chosen.json`` has it; None: nothing was.
        ended: How cells have ended, by name.
        finalists: Those that are scored, once that is known.
    """

    planned: Study
    conduct: Conduct
    result: StudyResult
    frozen: Mapping[str, Any] | None = None
    ended: dict[str, Ended] = field(default_factory=dict)
    finalists: list[Candidate] = field(default_factory=list)
    _written: float = field(default_factory=time.monotonic)

    def note(self, ended: Mapping[str, Ended]) -> None:
        """Some have ended: now and then the files say so, for who looks at them while the study goes on."""
        self.ended |= ended
        if time.monotonic() - self._written >= _WRITTEN_SECONDS:
            self.write(over=False)

    def row(self, cell: Cell) -> Row:
        """What became of a cell; of one that chose, what it was when the choice was made."""
        name, command = cell.name, self.conduct.command(cell)
        before = self.frozen["cells"].get(name) if self.frozen is not None and cell.stage == CHOOSES else None
        if before is not None:
            how, score = Ended(before["status"], before["reason"]), before["score"]
        else:
            how, score = self.ended.get(name) or _left(self.conduct.run_of(cell)), None
            if how.status == "done":
                score = score_of(self.conduct.run_of(cell), self.planned.file.score)
                how = how if score is not None else Ended("done", "it has no score")
        candidate = cell.candidate
        settings = candidate.settings
        return Row(name, candidate.title, settings, cell.seed, cell.stage, how.status, score, how.reason, command)

    def choosing(self) -> list[Row]:
        """A row for each cell that chooses."""
        if not self.planned.file.chosen:
            return []
        return [self.row(cell) for cell in cells_of(self.planned.candidates, self.planned.file.seeds.choose, CHOOSES)]

    def write(self, *, over: bool) -> None:
        """Writes results and report, as far as the study is done.

        Args:
            over: This call ends; else its cells go on.
        """
        scoring = [self.row(cell) for cell in cells_of(self.finalists, self.planned.file.seeds.score, SCORES)]
        rows = [*self.choosing(), *scoring]
        self.result.rows = rows if over else [_going_on(row) for row in rows]
        write_results(self.result)
        write_report(self.planned, self.result, draw=over)
        self._written = time.monotonic()


def _left(folder: Path) -> Ended:
    """How a cell was left that has not ended in this call."""
    try:
        status = Run.read(folder).status
    except RunFolderError:
        return Ended("not begun", "the same command begins it")
    if status in ("done", "failed"):
        return Ended(status, "" if status == "done" else "in an earlier call; the same command begins it again")
    return Ended("interrupted", GOES_ON)


def _going_on(row: Row) -> Row:
    """A row while the study goes on, to which all cells come that have not ended."""
    if row.status == "interrupted":
        return replace(row, status="in hand", reason="")
    return replace(row, reason="") if row.status == "not begun" else row
