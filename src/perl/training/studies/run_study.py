"""A study from its file to its results; start reading here.

study.yaml -> plan -> cells with the seeds that choose -> a choice for each arm -> cells with the seeds that score
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import PerlError
from perl.training.studies.account import Account
from perl.training.studies.carry_out import carry_out
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, Cell, at_baseline, cells_of, counted
from perl.training.studies.choose import Chosen, better_share, choose, completions_of, reward_at
from perl.training.studies.conduct import Conduct, Ended
from perl.training.studies.crew import Hire, crew
from perl.training.studies.results import (
    Row,
    StudyResult,
    check_results,
    check_scores,
    read_chosen,
    write_chosen,
)
from perl.training.studies.written_plan import Study, load_study, opened, step_of

if TYPE_CHECKING:
    from perl.training.studies.shared_servers import Served


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


def _carried_out(planned: Study, folder: Path, digest: str) -> StudyResult:
    tuned, seeds = bool(planned.file.chosen), planned.file.seeds
    frozen = read_chosen(folder, digest) if tuned else None
    check_results(folder)
    check_scores(folder, planned.file.score, (CHOOSES, SCORES) if frozen is None else (SCORES,))
    some = _served(planned)
    conduct = conduct_of(planned, folder, some)
    result = StudyResult(folder, digest)
    account = Account(planned, conduct, result, frozen, finalists=[] if tuned else list(planned.candidates))
    try:
        with crew(conduct, partial(_check_room, planned, some)) as hire:
            if tuned:
                if frozen is None:
                    _choose(account, hire)
                rows = account.choosing()
                result.chosen = chosen_of(planned, conduct, rows)
                _check_chosen(planned, result, rows)
                if frozen is None:  # before anything is scored, so that no score can change the choice
                    write_chosen(result, rows)
                account.finalists = finalists_of(planned, result.chosen)
            carry_out(conduct, hire, cells_of(account.finalists, seeds.score, SCORES), noted=account.note)
    finally:  # as far as it is done
        account.write(over=True)
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


def _check_ended(folder: Path, cells: Sequence[Cell], ended: Mapping[str, Ended]) -> None:
    """Refuses to choose while cells are left that ended for no reason of their own, or have not begun.

    Raises:
        PerlError: With how many.
    """
    lost = [how.reason for cell in cells if (how := ended.get(cell.name)) is not None and how.status == "lost"]
    if lost:
        what = f"{counted(len(lost), 'cell')} lost twice while choosing, so nothing is chosen and scored: {lost[0]}"
        raise PerlError(what, str(folder), "the same command goes on with them")
    waiting = [
        cell for cell in cells if ended.get(cell.name, Ended("not begun")).status in ("not begun", "interrupted")
    ]
    if waiting:
        what = f"{counted(len(waiting), 'cell')} not begun while choosing, so nothing is chosen and scored"
        raise PerlError(what, str(folder), "a larger budget, and the same command goes on")


def _check_chosen(planned: Study, result: StudyResult, rows: Sequence[Row]) -> None:
    """Refuses to go on with no choice at all, or none for what the others are held against.

    Raises:
        PerlError: With why the first cell has no score.
    """
    none = [title for title, one in result.chosen.items() if one.candidate is None]
    if planned.baseline in none or len(none) == len(result.chosen):
        of = planned.baseline if planned.baseline in none else "any arm"
        reason = next((f": {row.name}: {row.reason}" for row in rows if row.arm in none and row.reason), "")
        what = f"no candidate of {of} was trained to its end with every seed that chooses, so nothing is chosen{reason}"
        raise PerlError(what, str(result.folder), "the same command tries its cells again")


def chosen_of(planned: Study, conduct: Conduct, rows: Sequence[Row]) -> dict[str, Chosen]:
    """The choice of each arm, by cells that were trained to the end.

    Args:
        planned: The study.
        conduct: How its cells are carried out.
        rows: Of the cells that choose.
    """
    seeds, score, temperature = planned.file.seeds.choose, planned.file.score, planned.recipes[0].eval.temperature
    scores = {(Candidate(row.settings).key, row.seed): row.score for row in rows if row.score is not None}
    drawn = {
        cell.candidate.key: completions_of(conduct.run_of(cell))
        for cell in cells_of(planned.candidates, seeds[:1], CHOOSES)
        if score == "final" and temperature > 0
    }
    return {arm[0].title: choose(arm, scores, seeds, drawn) for arm in planned.arms}


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
        model=shared,
        alone=alone,
        score=file.score,
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
        hire: As :func:`perl.training.studies.crew.crew` gives it.

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
        _check_ended(conduct.folder, cells, ended)
        whole = [cell for cell in cells if ended[cell.name].status in ("paused", "done")]
        rewards = _rewards(conduct, whole, len(seeds), at)
        arms = [[one for one in arm if one in left] for arm in planned.arms]
        keep = halving.keep if halving is not None else 1.0
        kept = [one for arm in arms for one in better_share(arm, rewards, keep)]
        for cell in whole:
            if cell.candidate not in kept:
                ended[cell.name] = Ended("ended early", f"not among the better {keep:.0%} at {place:.0%} of the steps")
        left = kept
    cells = cells_of(left, seeds, CHOOSES)
    carry_out(conduct, hire, cells, noted=account.note)
    _check_ended(conduct.folder, cells, ended)


def steps_of(planned: Study, candidate: Candidate) -> int:
    """Optimizer steps of a cell; of a study with halving its recipe has a number."""
    return int(planned.recipe_of(candidate).train["max_steps"])


def _rewards(conduct: Conduct, whole: Sequence[Cell], seeds: int, at: Mapping[str, int]) -> dict[str, float]:
    """Mean reward of each candidate at a rung, by its key; of one that failed with a seed, none.

    Args:
        conduct: How cells are carried out.
        whole: Those that did not fail.
        seeds: How many there are of each candidate.
        at: The step of the rung, by cell.
    """
    each: dict[str, list[float]] = {}
    for cell in whole:
        reward = reward_at(conduct.run_of(cell), at[cell.name])
        if reward is not None:
            each.setdefault(cell.candidate.key, []).append(reward)
    return {key: sum(found) / len(found) for key, found in each.items() if len(found) == seeds}
