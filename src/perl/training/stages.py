"""The whole of a run, from recipe to scored adapter, stage by stage. Start reading here.

Recipe -> Plan -> base -> answers of the base -> adapter, trained -> adapter/, checked -> scores of both -> card
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from perl.errors import MissingExtraError, RecipeError, warn
from perl.hub.push.login import check_login, publishing_mistakes
from perl.hub.push.publish import publish
from perl.hub.run_card import write_card
from perl.launch.meeting import check_joined
from perl.launch.together import ProcessGroup, log_on_main, together, wait_until
from perl.methods.registry import METHODS
from perl.policy.model import load_base
from perl.policy.sharding import check_strategy
from perl.recipe import Recipe
from perl.recipe.recipe import is_first_process, launched
from perl.recipe.sections import PeftSection
from perl.rewards.verifier import start_workers
from perl.rollouts.open_engine import check_servers
from perl.run.devices import threads_kept, use_threads
from perl.run.folder import Run, follow_run, open_run
from perl.run.host import host
from perl.run.joint_work import joined
from perl.trainer.callbacks.plots import draw_plots
from perl.trainer.callbacks.trackers import log_scores
from perl.training.checked_recipe import checked_recipe, located
from perl.training.on_ray import train_on_ray
from perl.training.on_verl import train_on_verl
from perl.training.plan import Plan, make_plan
from perl.training.policy_stage import record_identity, run_title, save_adapter, train_policy
from perl.training.reward_trial import check_rewards_work
from perl.training.scores import score_base, score_best, score_run

logger = logging.getLogger("perl")


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = (), output_dir: str | Path | None = None
) -> Run:
    """Trains a recipe, or goes on with it where it was stopped.

    Args:
        recipe: A recipe file, the name of a packaged one, a mapping, or a :class:`perl.Recipe`.
        overrides: ``section.key=value``, the value in YAML.
        output_dir: The run folder; None: the recipe's ``train.output_dir``, else ``runs/NAME``.

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
        if checked.engine.on_verl:
            with located(checked):
                check_login(checked.hub)
            return _published(checked, train_on_verl(checked, _finish))
        if checked.engine.on_ray:
            plan = prepare(checked)
            with located(checked):
                run = train_on_ray(checked, plan, recipe, overrides, train)
            return _published(checked, run)
    with threads_kept(), together() as processes:
        run = _train(processes.agreed(read_recipe(recipe, overrides, output_dir)), processes)
    return run if is_first_process() else _as_written(run)


def _as_written(run: Run) -> Run:
    """The run of another process, with the facts that the main one, which is done, has written."""

    def is_done() -> bool:
        run.facts.update(Run.read(run.path).facts)
        return run.status == "done"

    if not host().keeps_files:
        wait_until(is_done)
    return run


def _train(recipe: Recipe, processes: ProcessGroup) -> Run:
    with log_on_main():
        plan = prepare(recipe)
    with located(recipe):
        check_joined(plan.arguments.world_size)
        check_strategy(plan.arguments)
    every = joined()
    with ExitStack() as opened:
        with every.failing_together():
            run = opened.enter_context(open_run(recipe)) if every.main else follow_run(recipe)
            goes_on = every.by_main(lambda: _goes_on(plan, run))
        opened.enter_context(processes.named())
        if goes_on:
            processes.share(run)
            _carry_out(plan, run)
        if not every.main:
            return run
        if goes_on:
            _finish(run)
        else:
            logger.info("done before: %s", run.path)
    return _published(recipe, run)


def _goes_on(plan: Plan, run: Run) -> bool:
    """Whether something is left to do of a run.

    Then its rewards have been tried and what must answer before weights are loaded does; what a kill left for servers
    is cleared.
    """
    rollout = plan.recipe.rollout
    if run.status == "done":
        return False
    with located(plan.recipe):
        check_rewards_work(plan.recipe, plan.problems)
        check_login(plan.recipe.hub)
        if rollout.capabilities.needs_servers:
            check_servers(rollout, plan.longest_text, plan.form)
        # Servers that may still use what is in there come first; see the engine that is opened for them.
        elif rollout.sync_folder is None:
            shutil.rmtree(run.path / "sync", ignore_errors=True)
    return True


def _carry_out(plan: Plan, run: Run) -> None:
    """What all processes do together: base, training, scores; the main one writes."""
    processes = joined()
    with processes.failing_together():
        if plan.judging is not None:
            start_workers(plan.judging.workers)  # before a GPU is used; they import while the weights are read
        with located(plan.recipe):
            model = load_base(plan.recipe.model, plan.arguments.device, plan.arguments.strategy)
        record_identity(plan, model, run)
        score_base(plan, model, run)
    trainer = train_policy(plan, model, run)
    with processes.failing_together():
        save_adapter(trainer, plan, run, processes)
        score_run(plan, model, trainer, run)
        if plan.recipe.hub.push == "best":
            score_best(plan, trainer, run)
        if processes.main:
            log_scores(trainer, run.path / "eval")
    processes.meet()  # what the main process calls done is so on all of them


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    *,
    on_verl: bool = False,
) -> Recipe:
    """The recipe with everything checked that needs neither data nor model, method and reward names included.

    Args:
        source: A recipe file, the name of a packaged one, a mapping, or a recipe.
        overrides: ``section.key=value``.
        output_dir: The run folder; None: the recipe's.
        on_verl: Whether it may be one that verl trains, which this package's own trainer cannot.

    Raises:
        RecipeError: With every mistake found.
    """
    recipe = checked_recipe(source, overrides, (publishing_mistakes,))
    if recipe.engine.on_verl and not on_verl:
        what = "verl: verl trains it, in processes that it starts itself; here is this package's own trainer"
        raise recipe.located(RecipeError(what, "engine.name", "perl train RECIPE, or perl export-verl RECIPE -o DIR"))
    if recipe.model.dtype == "auto" and _trains_the_bases(recipe.peft):
        recipe = replace(recipe, model=recipe.model.model_copy(update={"dtype": "float32"}))
    return recipe if output_dir is None else recipe.with_train(output_dir=str(output_dir))


def _trains_the_bases(peft: PeftSection) -> bool:
    """Whether the recipe trains tensors of the base, or copies of them; they must be float32."""
    method = METHODS.get(peft.method if peft.type is None else "")
    named = peft.type == "LN_TUNING" or bool((peft.kwargs or {}).get("modules_to_save"))
    return named or (method is not None and method.trains_the_bases)


def prepare(recipe: Recipe, *, engine_here: bool = True) -> Plan:
    """Sets the process's threads from the recipe's engine section, and plans the run.

    Args:
        recipe: Of the run.
        engine_here: False: to be looked at; what writes rollouts may be missing here.

    Raises:
        PerlError: The data, the model or an optional package is not what the recipe needs.
    """
    if recipe.engine.threads is not None:
        use_threads(recipe.engine.threads)
    with located(recipe):
        return make_plan(_as_shared(recipe), engine_here=engine_here)


def _as_shared(recipe: Recipe) -> Recipe:
    """The recipe as its processes share the work: one alone holds everything, whatever strategy it names."""
    if recipe.batch.world_size > 1:
        return recipe
    return replace(recipe, engine=recipe.engine.model_copy(update={"strategy": "ddp"}))


def _published(recipe: Recipe, run: Run) -> Run:
    publish(recipe.hub, run)
    return run


def _finish(run: Run) -> None:
    """What a person looks at first, of a run that has been trained: curves with the last scores, and the card."""
    try:
        draw_plots(run.metrics, run.plots, run_title(run), rewarded=any(run.facts["rewards"].values()))
    except MissingExtraError as error:
        warn("PRL306", "%s", error)
    write_card(run)
