"""A study from its file to its results; start reading here.

study.yaml -> plan -> cells with the seeds that choose -> a choice for each arm -> cells with the seeds that score
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.errors import PerlError
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.training.studies.carry_out import Conduct, Ended, carry_out
from perl.training.studies.cells import Candidate, Cell, cells_of
from perl.training.studies.choose import Chosen, best_half, choose, reward_at, score_of
from perl.training.studies.report import write_report
from perl.training.studies.results import CHOOSES, SCORES, Row, StudyResult, write_results
from perl.training.studies.written_plan import Study, load_study, opened


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
    conduct = conduct_of(planned, folder)
    result, ended = StudyResult(folder, digest), dict[str, Ended]()
    seeds = planned.file.seeds
    tuned = bool(planned.file.chosen)
    if tuned:
        ended |= _choosing(planned, conduct)
        for arm in planned.arms:
            result.chosen[arm[0].title] = choose(arm, _scores(planned, conduct, seeds.choose), seeds.choose)
    finalists = finalists_of(planned, result.chosen) if tuned else list(planned.candidates)
    ended |= carry_out(conduct, cells_of(finalists, seeds.score))
    result.rows = [
        *(_row(planned, conduct, cell, CHOOSES, ended) for cell in cells_of(planned.candidates, seeds.choose) if tuned),
        *(_row(planned, conduct, cell, SCORES, ended) for cell in cells_of(finalists, seeds.score)),
    ]
    write_results(result)
    write_report(planned, result)
    return result


def conduct_of(planned: Study, folder: Path) -> Conduct:
    """How a study's cells are carried out."""
    file, recipes = planned.file, planned.recipes
    sections = {recipe.model for recipe in recipes}
    on_cpu = all(recipe.engine.device in ("auto", "cpu") for recipe in recipes)
    shared = recipes[0].model if len(sections) == 1 and on_cpu and recipes[0].model.quantization is None else None
    alone = [one.title for one, recipe in zip(planned.candidates, recipes, strict=True) if _changes_servers(recipe)]
    how = file.at_once, file.threads, file.budget
    return Conduct(folder, planned.recipe, planned.every, *how, model=shared, alone=frozenset(alone))


def _changes_servers(recipe: Recipe) -> bool:
    """Whether a cell puts weights into servers, under which adapters of other cells would be computed wrongly."""
    method = METHODS.get(recipe.peft.method) if recipe.peft.type is None else None
    is_lora = method is not None and method.delta in ("lora", "low_rank") and recipe.rollout.sync != "merged"
    return recipe.rollout.capabilities.needs_servers and not is_lora


def finalists_of(planned: Study, chosen: Mapping[str, Chosen]) -> list[Candidate]:
    """What is scored: each arm as it was chosen, and as it is with what was chosen for the baseline.

    The second, whether or not it was tried for that arm, is how studies compare that use one rate for all; beside the
    first it shows what that hides.
    """
    base = planned.baseline
    of_baseline = chosen[base].candidate if base is not None else None
    found = {one.candidate.key: one.candidate for one in chosen.values() if one.candidate is not None}
    if of_baseline is not None:
        for arm in planned.arms:
            one = Candidate(arm[0].arm, of_baseline.chosen)
            found.setdefault(one.key, one)
    return list(found.values())


def _choosing(planned: Study, conduct: Conduct) -> dict[str, Ended]:
    """Trains with the seeds that choose; with halving, only the better candidates of each arm to the end."""
    seeds, halving = planned.file.seeds.choose, planned.file.halving
    left = list(planned.candidates)
    ended: dict[str, Ended] = {}
    for place in halving.at if halving is not None else ():
        cells = cells_of(left, seeds)
        at = {cell.name: max(1, round(place * steps_of(planned, cell.candidate))) for cell in cells}
        ended |= carry_out(conduct, cells, at)
        rewards = _rewards(conduct, left, seeds, at)
        arms = [[one for one in arm if one in left] for arm in planned.arms]
        keep = halving.keep if halving is not None else 1.0
        kept = [one for arm in arms for one in best_half(arm, rewards, keep)]
        for cell in cells:
            if cell.candidate not in kept and ended[cell.name].status in ("paused", "done"):
                ended[cell.name] = Ended("ended early", f"not among the better {keep:.0%} at {place:.0%} of the steps")
        left = kept
    return ended | carry_out(conduct, cells_of(left, seeds))


def steps_of(planned: Study, candidate: Candidate) -> int:
    """Optimizer steps of a cell, for halving.

    Raises:
        PerlError: The recipe counts epochs.
    """
    steps = int(planned.recipe_of(candidate).train.get("max_steps") or -1)
    if steps <= 0:
        raise PerlError("halving needs a number of steps", "train.max_steps", "overrides: {train.max_steps: 100}")
    return steps


def _rewards(
    conduct: Conduct, some: Sequence[Candidate], seeds: Sequence[int], at: Mapping[str, int]
) -> dict[str, float]:
    """Mean reward of each candidate at a rung over the seeds; of one that failed with a seed, none."""
    found = {}
    for one in some:
        each = [reward_at(conduct.run_of(cell), at[cell.name]) for cell in cells_of([one], seeds)]
        known = [reward for reward in each if reward is not None]
        if len(known) == len(seeds):
            found[one.key] = sum(known) / len(known)
    return found


def _scores(planned: Study, conduct: Conduct, seeds: Sequence[int]) -> dict[tuple[str, int], float]:
    found = {}
    for cell in cells_of(planned.candidates, seeds):
        score = score_of(conduct.run_of(cell), planned.file.score)
        if score is not None:
            found[cell.candidate.key, cell.seed] = score
    return found


def _row(planned: Study, conduct: Conduct, cell: Cell, stage: str, ended: Mapping[str, Ended]) -> Row:
    how = ended.get(cell.name, Ended("not begun"))
    score = score_of(conduct.run_of(cell), planned.file.score) if how.status == "done" else None
    reason = how.reason
    if how.status == "done" and score is None:
        reason = "it has no score"
    return Row(
        cell.name,
        cell.candidate.title,
        cell.candidate.settings,
        cell.seed,
        stage,
        how.status,
        score,
        reason,
        conduct.command(cell),
    )
