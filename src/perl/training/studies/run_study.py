"""A study from its file to its results; start reading here.

study.yaml -> plan -> cells with the seeds that choose -> a choice for each arm -> cells with the seeds that score
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import PerlError
from perl.training.studies.carry_out import Conduct, Ended, Hire, carry_out, crew
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, Cell, at_baseline, cells_of
from perl.training.studies.choose import Chosen, best_half, choose, reward_at, score_of
from perl.training.studies.report import write_report
from perl.training.studies.results import Row, StudyResult, check_results, read_chosen, write_chosen, write_results
from perl.training.studies.written_plan import Study, load_study, opened, step_of

if TYPE_CHECKING:
    from perl.training.studies.shared_servers import Served

# So often, at most, are results and report written while cells train.
_WRITTEN_SECONDS = 120.0
_TO_DO = "the same command begins it"


def study(
    source: str | Path | Mapping[str, Any], output_dir: str | Path | None = None, *, new_plan: bool = False
) -> StudyResult:
    """Carries out a study, or goes on with it where it was stopped.

    Args:
        source: A study file, or its content.
        output_dir: Its folder; None: ``runs/studies/NAME``.
        new_plan: Keep another plan, with its results, beside this one.

    Returns:
        The results, which are in the folder too.

    Raises:
        PerlError: The study, a recipe of a cell, or the folder cannot be used; nothing was started.
        InterruptedRunError: Ctrl-C or SIGTERM; the same call goes on.
    """
    planned = load_study(source)
    folder = Path(output_dir) if output_dir is not None else Path("runs") / "studies" / planned.name
    with opened(planned, folder, new_plan=new_plan) as digest:
        return _carried_out(planned, folder, digest)


@dataclass
class Account:
    """What is known of a study so far, and its files.

    Attributes:
        ended: How cells have ended, by name.
        finalists: Those that are scored, once that is known.
    """

    planned: Study
    conduct: Conduct
    result: StudyResult
    ended: dict[str, Ended] = field(default_factory=dict)
    finalists: list[Candidate] = field(default_factory=list)
    _written: float = field(default_factory=time.monotonic)

    def note(self, ended: Mapping[str, Ended]) -> None:
        """Some have ended: now and then the files say so, for who looks at them while the study goes on."""
        self.ended |= ended
        if time.monotonic() - self._written >= _WRITTEN_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes results and report, as far as the study is done."""
        seeds, tuned = self.planned.file.seeds, bool(self.planned.file.chosen)
        choosing = cells_of(self.planned.candidates, seeds.choose, CHOOSES) if tuned else []
        cells = [*choosing, *cells_of(self.finalists, seeds.score, SCORES)]
        self.result.rows = [_row(self.planned, self.conduct, cell, self.ended) for cell in cells]
        write_results(self.result)
        write_report(self.planned, self.result)
        self._written = time.monotonic()


def _carried_out(planned: Study, folder: Path, digest: str) -> StudyResult:
    check_results(folder, lambda stage, name: score_of(folder / "cells" / stage / name, planned.file.score))
    some = _served(planned)
    conduct = conduct_of(planned, folder, some)
    result, tuned = StudyResult(folder, digest), bool(planned.file.chosen)
    frozen = read_chosen(folder, digest) if tuned else None
    account = Account(planned, conduct, result, finalists=[] if tuned else list(planned.candidates))
    try:
        with crew(conduct, partial(_check_room, planned, some)) as hire:
            if tuned:
                if frozen is None:
                    _choose(account, hire)
                else:
                    account.note({name: Ended(*how) for name, how in frozen["cells"].items()})
                result.chosen = _chosen(planned, conduct, account.ended, frozen)
                if frozen is None:  # before anything is scored, so that no score can change the choice
                    write_chosen(result, account.ended)
                account.finalists = finalists_of(planned, result.chosen)
            carry_out(conduct, hire, cells_of(account.finalists, planned.file.seeds.score, SCORES), noted=account.note)
    finally:  # as far as it is done
        account.write()
    return result


def _served(planned: Study) -> "list[Served]":
    """What candidates give to servers, which takes seconds to import where there are any."""
    if not any(recipe.rollout.capabilities.needs_servers for recipe in planned.recipes):
        return []
    from perl.training.studies.shared_servers import served

    return served(planned)


def _check_room(planned: Study, some: "Sequence[Served]", folder: Path) -> None:
    if some:
        from perl.training.studies.shared_servers import check_room

        check_room(planned, some, folder)


def _check_ended(folder: Path, ended: Mapping[str, Ended]) -> None:
    """Refuses to choose while cells are left that ended for no reason of their own, or have not begun.

    Raises:
        PerlError: With how many.
    """
    lost = [how.reason for how in ended.values() if how.status == "lost"]
    if lost:
        what = f"{len(lost)} cells that choose were lost twice, so nothing is chosen and scored: {lost[0]}"
        raise PerlError(what, str(folder), "the same command goes on with them")
    waiting = [name for name, how in ended.items() if how.status in ("not begun", "interrupted")]
    if waiting:
        what = f"{len(waiting)} cells that choose were not begun, so nothing is chosen and scored"
        raise PerlError(what, str(folder), "a larger budget, and the same command goes on")


def _chosen(
    planned: Study, conduct: Conduct, ended: Mapping[str, Ended], frozen: Mapping[str, Any] | None
) -> dict[str, Chosen]:
    """The choice of each arm, by cells that were trained to the end; as it was frozen, if it was."""
    scores = {}
    for cell in cells_of(planned.candidates, planned.file.seeds.choose, CHOOSES):
        how = ended.get(cell.name)
        score = score_of(conduct.run_of(cell), planned.file.score) if how is not None and how.status == "done" else None
        if score is not None:
            scores[cell.candidate.key, cell.seed] = score
    found = {arm[0].title: choose(arm, scores, planned.file.seeds.choose, planned.completions) for arm in planned.arms}
    if frozen is None:
        return found
    by_key = {one.key: one for one in planned.candidates}
    keys = frozen["chosen"]
    return {
        title: replace(one, candidate=by_key[keys[title]] if keys.get(title) is not None else None)
        for title, one in found.items()
    }


def conduct_of(planned: Study, folder: Path, some: "Sequence[Served] | None" = None) -> Conduct:
    """How a study's cells are carried out.

    Args:
        planned: The study.
        folder: Its own.
        some: What candidates give to servers; None: it is looked at.
    """
    some = _served(planned) if some is None else some
    file, recipes = planned.file, planned.recipes
    sections = {recipe.model for recipe in recipes}
    shared = recipes[0].model if len(sections) == 1 and recipes[0].model.quantization is None else None
    # Under their weights adapters of other cells would be computed wrongly.
    alone = frozenset(one.candidate.title for one in some if one.rank is None)
    how = file.at_once, file.threads, file.budget
    return Conduct(
        folder,
        planned.recipe,
        planned.every,
        *how,
        model=shared if file.ray is None else None,
        alone=alone,
        score=file.score,
        ray=file.ray,
        processes=max(recipe.engine.processes or 1 for recipe in recipes),
        on_cpu=all(recipe.engine.device == "cpu" for recipe in recipes),
    )


def finalists_of(planned: Study, chosen: Mapping[str, Chosen]) -> list[Candidate]:
    """What is scored: each arm as it was chosen, and as it is with what was chosen for the baseline.

    The second, whether or not it was tried for that arm, is how studies compare that use one rate for all; beside the
    first it shows what that hides.
    """
    base = planned.baseline
    of_baseline = chosen[base].candidate if base is not None and base in chosen else None
    found = {one.candidate.key: one.candidate for one in chosen.values() if one.candidate is not None}
    if of_baseline is not None:
        for arm in planned.arms:
            one = at_baseline(arm[0], of_baseline.chosen, planned.file.overrides)
            found.setdefault(one.key, one)
    return list(found.values())


def _choose(account: Account, hire: Hire) -> None:
    """Trains with the seeds that choose; with halving, only the better candidates of each arm to the end.

    Args:
        account: Of the study; gets how each cell ended.
        hire: As :func:`perl.training.studies.carry_out.crew` gives it.

    Raises:
        PerlError: Some are left, by which another candidate might be chosen.
    """
    planned, conduct, ended = account.planned, account.conduct, account.ended
    seeds, halving = planned.file.seeds.choose, planned.file.halving
    left = list(planned.candidates)
    for place in halving.at if halving is not None else ():
        cells = cells_of(left, seeds, CHOOSES)
        at = {cell.name: step_of(place, steps_of(planned, cell.candidate)) for cell in cells}
        carry_out(conduct, hire, cells, at, account.note)
        _check_ended(conduct.folder, {cell.name: ended[cell.name] for cell in cells})
        rewards = _rewards(conduct, left, seeds, at)
        arms = [[one for one in arm if one in left] for arm in planned.arms]
        keep = halving.keep if halving is not None else 1.0
        kept = [one for arm in arms for one in best_half(arm, rewards, keep)]
        for cell in cells:
            if cell.candidate not in kept and ended[cell.name].status in ("paused", "done"):
                ended[cell.name] = Ended("ended early", f"not among the better {keep:.0%} at {place:.0%} of the steps")
        left = kept
    carry_out(conduct, hire, cells_of(left, seeds, CHOOSES), noted=account.note)
    _check_ended(conduct.folder, ended)


def steps_of(planned: Study, candidate: Candidate) -> int:
    """Optimizer steps of a cell; of a study with halving its recipe has a number."""
    return int(planned.recipe_of(candidate).train["max_steps"])


def _rewards(
    conduct: Conduct, some: Sequence[Candidate], seeds: Sequence[int], at: Mapping[str, int]
) -> dict[str, float]:
    """Mean reward of each candidate at a rung over the seeds; of one that failed with a seed, none."""
    found = {}
    for one in some:
        each = [reward_at(conduct.run_of(cell), at[cell.name]) for cell in cells_of([one], seeds, CHOOSES)]
        known = [reward for reward in each if reward is not None]
        if len(known) == len(seeds):
            found[one.key] = sum(known) / len(known)
    return found


def _in_hand(conduct: Conduct, cell: Cell) -> Ended:
    """What is said of a cell that has not ended: whether it was begun."""
    begun = conduct.run_of(cell).is_dir()
    return Ended("begun" if begun else "not begun", "the same command goes on with it" if begun else _TO_DO)


def _row(planned: Study, conduct: Conduct, cell: Cell, ended: Mapping[str, Ended]) -> Row:
    how = ended.get(cell.name) or _in_hand(conduct, cell)
    score = score_of(conduct.run_of(cell), planned.file.score) if how.status == "done" else None
    reason = how.reason
    if how.status == "done" and score is None:
        reason = "it has no score"
    return Row(
        cell.name,
        cell.candidate.title,
        cell.candidate.settings,
        cell.seed,
        cell.stage,
        how.status,
        score,
        reason,
        conduct.command(cell),
    )
