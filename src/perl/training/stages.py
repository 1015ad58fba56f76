"""The whole of a run, from recipe to scored adapter, stage by stage. Start reading here.

Recipe -> Plan -> base -> answers of the base -> adapter, trained -> adapter/, checked -> scores of both -> card
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from perl.hub.push.publish import publish
from perl.hub.push.requests import check_login
from perl.launch.together import ProcessGroup, log_on_main, together, wait_until
from perl.policy.model import load_base
from perl.recipe import Recipe
from perl.recipe.recipe import is_first_process, launched
from perl.rewards.verifier import start_workers
from perl.run.devices import threads_kept
from perl.run.folder import Run, follow_run, open_run
from perl.run.host import host
from perl.run.joint_work import joined
from perl.trainer.callbacks.trackers import log_scores
from perl.training.checked_recipe import located
from perl.training.on_ray import train_on_ray
from perl.training.on_verl import train_on_verl
from perl.training.plan import Plan
from perl.training.policy_stage import finish, record_identity, save_adapter, train_policy
from perl.training.prepare import check_processes, left_to_do, prepare, read_recipe
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
            return _published(checked, train_on_verl(checked, finish))
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
    check_processes(plan)
    every = joined()
    with ExitStack() as opened:
        with every.failing_together():
            run = opened.enter_context(open_run(recipe)) if every.main else follow_run(recipe)
            goes_on = every.by_main(lambda: left_to_do(plan, run))
        opened.enter_context(processes.named())
        if goes_on:
            processes.share(run)
            _carry_out(plan, run)
        if not every.main:
            return run
        if goes_on:
            finish(run)
        else:
            logger.info("done before: %s", run.path)
    return _published(recipe, run)


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


def _published(recipe: Recipe, run: Run) -> Run:
    publish(recipe.hub, run)
    return run
