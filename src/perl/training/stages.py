"""The whole of a run, from recipe to scored adapter, stage by stage. Start reading here.

Recipe -> Plan -> base -> answers of the base -> adapter, trained -> adapter/, checked -> scores of both -> card
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.errors import RecipeError
from perl.hub.push.publish import publish
from perl.launch.together import together
from perl.recipe import Recipe
from perl.recipe.recipe import is_first_process, launched
from perl.run.devices import threads_kept, use_threads
from perl.run.folder import Run
from perl.run.joint_work import joined
from perl.training.on_ray import train_on_ray
from perl.training.on_verl import train_on_verl
from perl.training.plan import Plan
from perl.training.policy_stage import finish, load, save_adapter, train_policy
from perl.training.prepare import opened_run, prepare, read_recipe, seen_done
from perl.training.scores import score_base, score_run
from perl.training.stored_run import RESUME_FROM, kept


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    resume_from: str | None = None,
) -> Run:
    """Trains a recipe, or goes on with it where it was stopped.

    Args:
        recipe: A recipe file, the name of a packaged one, a mapping, or a :class:`perl.Recipe`.
        overrides: ``section.key=value``, the value in YAML.
        output_dir: The run folder; None: the recipe's ``train.output_dir``, else ``runs/NAME``.
        resume_from: Where ``engine.storage`` of the same run has kept it, on another machine; None: the run folder.

    Returns:
        The run, done. A run that was done before is returned as it is.

    Raises:
        PerlError: The recipe, its data, its model or the folder cannot be used; nothing was started.
        InterruptedRunError: Ctrl-C or SIGTERM; the same call goes on.
        RewardError: A custom reward failed too often; fixed, the same call goes on.
        RolloutError: No server answers any more; when one does, the same call goes on.
        BrokenPromiseError: A guard failed; the adapter must not be used.
    """
    if not launched():
        checked = read_recipe(recipe, overrides, output_dir, on_verl=True)
        if checked.engine.name != "local":
            return _train_elsewhere(checked, recipe, overrides, resume_from)
    with threads_kept(), together() as group:
        agreed = group.agreed(read_recipe(recipe, overrides, output_dir))
        if agreed.engine.threads is not None:
            use_threads(agreed.engine.threads)
        plan = prepare(agreed)
        with opened_run(agreed, plan, group, resume_from) as (run, goes_on):
            if goes_on:
                with kept(run, agreed.engine):
                    _carry_out(plan, run)
        if is_first_process():
            publish(plan.recipe.hub, run)
    return seen_done(run)


def _train_elsewhere(
    checked: Recipe,
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str],
    resume_from: str | None,
) -> Run:
    """By verl, or by processes on a Ray cluster, each of which reads the recipe and trains it as here."""
    if checked.engine.on_verl:
        if resume_from is not None:
            raise RecipeError("verl keeps its own checkpoints, in the run folder", RESUME_FROM)
        run = train_on_verl(checked, finish)
    else:
        plan = prepare(checked)
        with checked.locating():
            run = train_on_ray(checked, plan, recipe, overrides, train, resume_from)
    publish(checked.hub, run)
    return run


def _carry_out(plan: Plan, run: Run) -> None:
    """What all processes do together; the main one writes."""
    processes = joined()
    with processes.failing_together():
        model = load(plan, run)
        score_base(plan, model, run)
    trainer = train_policy(plan, model, run)
    with processes.failing_together():
        save_adapter(trainer, plan, run)
        score_run(plan, model, trainer, run)
    processes.meet()  # what the main process calls done is so on all of them
    if processes.main:
        finish(run)
