"""The whole of a run, from recipe to scored adapter, stage by stage. Start reading here.

Recipe -> Plan -> base -> answers of the base -> adapter, trained -> adapter/, checked -> scores of both -> card
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from perl.algorithms.named import named_facts
from perl.data import render_prompts
from perl.errors import (
    BrokenPromiseError,
    InterruptedRunError,
    MissingExtraError,
    PerlError,
    RecipeError,
    RewardError,
    RunFolderError,
)
from perl.hub.card.candidate import source_of_run
from perl.hub.push.login import check_login, publishing_mistakes
from perl.hub.push.publish import publish
from perl.hub.run_card import write_card
from perl.launch.agreement import check_joined
from perl.launch.together import Together, comes_true, said_once, see_files, together
from perl.methods.registry import METHODS
from perl.policy.checkpoint import discard_incomplete, latest_step, step_of
from perl.policy.guards import check_saved_adapter, check_saved_model
from perl.policy.model import (
    answering_fingerprint,
    base_dtype,
    base_identity,
    load_base,
    source_fingerprint,
)
from perl.policy.name import weights_digest
from perl.policy.probe import write_probe
from perl.policy.quantised import quantisation_of
from perl.policy.saved.adapter import WEIGHTS
from perl.policy.sharding import check_strategy
from perl.policy.teacher import teacher_settings
from perl.recipe import Recipe
from perl.recipe.recipe import is_first_process, launched
from perl.recipe.sections import PeftSection
from perl.rewards import Reward
from perl.rewards.verifier import start_workers
from perl.rollouts.open_engine import check_servers
from perl.run.devices import processor_name, threads_kept, use_threads
from perl.run.files import sha256_of
from perl.run.folder import Run, follow_run, open_run
from perl.run.host import host
from perl.run.joint_work import Processes, joined
from perl.run.logs import log_rows
from perl.run.warned import warn
from perl.trainer.callbacks.adapter import NOTHING_TRAINED, AdapterCallback
from perl.trainer.callbacks.alarms import HealthAlarms
from perl.trainer.callbacks.learning_curves import LearningCurves
from perl.trainer.callbacks.plots import draw_plots
from perl.trainer.callbacks.samples_log import SamplesLog
from perl.trainer.shown_settings import shown_algorithm
from perl.trainer.trackers import log_scores
from perl.trainer.trainer import PeftGRPOTrainer
from perl.training.callbacks.graceful_stop import GracefulStop
from perl.training.callbacks.hosted import Hosted
from perl.training.callbacks.hub_checkpoints import HubCheckpoints
from perl.training.callbacks.live_progress import LiveProgress
from perl.training.callbacks.run_record import RunRecord
from perl.training.checked_recipe import checked_recipe
from perl.training.forecast import forecast_of
from perl.training.forecast_text import forecast_lines
from perl.training.on_ray import train_on_ray
from perl.training.on_verl import train_on_verl
from perl.training.plan import Plan, make_plan
from perl.training.scores import between_steps, score_base, score_best, score_run

logger = logging.getLogger("perl")

# Prompts on which the saved adapter is compared with the one in memory.
_PROBE_PROMPTS = 4


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
            return _published(checked, train_on_verl(checked, _finish))
        if checked.engine.on_ray:
            plan = prepare(checked)
            with _located(checked):
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
        comes_true(is_done)
    return run


def _train(recipe: Recipe, processes: Together) -> Run:
    with said_once():
        plan = prepare(recipe)
    with _located(recipe):
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
    """Whether something is left to do of a run; then what it needs answers."""
    if run.status == "done":
        return False
    _check_services(plan, run)
    return True


def _check_services(plan: Plan, run: Run) -> None:
    """What must answer before weights are loaded."""
    with _located(plan.recipe):
        check_login(plan.recipe.hub)
    _check_servers(plan, run)


def _carry_out(plan: Plan, run: Run) -> None:
    """What all processes do together: base, training, scores; the main one writes."""
    processes = joined()
    with processes.failing_together():
        if plan.judging is not None:
            start_workers(plan.judging.workers)  # before a GPU is used; they import while the weights are read
        with _located(plan.recipe):
            model = load_base(plan.recipe.model, plan.arguments.device, plan.arguments.strategy)
        _record_identity(plan, model, run)
        score_base(plan, model, run)
    trainer = _train_policy(plan, model, run)
    with processes.failing_together():
        _save_adapter(trainer, plan, run, processes)
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
    if output_dir is None:
        return recipe
    return replace(recipe, train=MappingProxyType({**recipe.train, "output_dir": str(output_dir)}))


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
    with _located(recipe):
        return make_plan(_as_shared(recipe), engine_here=engine_here)


def _as_shared(recipe: Recipe) -> Recipe:
    """The recipe as its processes share the work: one alone holds everything, whatever strategy it names."""
    if recipe.batch.world_size > 1:
        return recipe
    return replace(recipe, engine=recipe.engine.model_copy(update={"strategy": "ddp"}))


def _published(recipe: Recipe, run: Run) -> Run:
    publish(recipe.hub, run)
    return run


def _check_servers(plan: Plan, run: Run) -> None:
    """Waits for the servers that rollouts come from, before weights are loaded; clears what a kill left for them."""
    # Servers that may still use what is in there come first; see the engine that is opened for them.
    if plan.recipe.rollout.sync_folder is None and not plan.recipe.rollout.capabilities.needs_servers:
        shutil.rmtree(run.path / "sync", ignore_errors=True)
    if plan.recipe.rollout.capabilities.needs_servers:
        with _located(plan.recipe):
            check_servers(plan.recipe.rollout, plan.longest_text, plan.form)


@contextmanager
def _located(recipe: Recipe) -> Iterator[None]:
    """What is found wrong inside names the file and line of the key."""
    try:
        yield
    except PerlError as error:
        raise recipe.located(error) from error


def _record_identity(plan: Plan, model: PreTrainedModel, run: Run) -> None:
    base, revision = base_identity(model)
    fingerprint, source = answering_fingerprint(model), source_fingerprint(model)
    known, dtype = run.facts.get("fingerprint", {}).get("base", fingerprint), base_dtype(model)
    if known != fingerprint:
        raise _other_weights(plan, run, dtype)
    fingerprints = {"base": fingerprint} | ({"source": source} if source not in (None, fingerprint) else {})
    run.record(
        base=base,
        revision=revision,
        quantization=quantisation_of(model),
        base_dtype=dtype,
        repo_id=plan.recipe.hub.repo_id,
        method=plan.method.name,
        seed=plan.arguments.seed,
        trainable_parameters=plan.trainable_parameters,
        total_parameters=plan.total_parameters,
        fingerprint={**run.facts.get("fingerprint", {}), **fingerprints},
        settings=_settings(plan),
        loss=plan.arguments.loss_type,
        ratio_level=plan.arguments.importance_sampling_level,
        **named_facts(plan.arguments),
        rewards={reward.name: reward.weight for reward in plan.rewards},
        data={"train": plan.problems.train_version, "eval": plan.problems.heldout_version},
        hardware={"device": processor_name(plan.arguments.device), "count": plan.arguments.world_size},
        planned_steps=plan.steps,
        forecast=_forecast_lines(plan),
    )


def _forecast_lines(plan: Plan) -> list[str]:
    """What ``perl plan`` says of the run on what is here, for who looks at it later; nothing where it cannot tell."""
    if not is_first_process():
        return []
    # A run does not end for want of an estimate, as of a model that is built like none that we know.
    with suppress(PerlError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return list(forecast_lines(forecast_of(plan)))
    return []


def _other_weights(plan: Plan, run: Run, dtype: str) -> RunFolderError:
    """Why a run cannot go on with the base that was loaded; ``dtype: auto`` depends on the device."""
    what = f"was started with other weights of {plan.recipe.model.name}"
    then = run.facts.get("base_dtype", dtype)
    if then == dtype:
        return RunFolderError(what, str(run.path), "choose another with --output")
    hint = f"model.dtype={then}, or choose another with --output"
    return RunFolderError(f"{what}: they were loaded in {then}, here in {dtype}", str(run.path), hint)


def _settings(plan: Plan) -> dict[str, Any]:
    """The run's settings, for a person to read."""
    recipe, arguments = plan.recipe, plan.arguments
    quantization = recipe.model.quantization
    return {
        **plan.settings,
        **({"base loaded as": quantization} if quantization is not None else {}),
        **(teacher_settings(recipe.teacher, plan.teacher) if recipe.teacher.acts else {}),
        **({"prompts": recipe.prompts.shown} if recipe.prompts.acts else {}),
        "optimizer": arguments.optim.value,
        "learning rate": f"{arguments.learning_rate:g}",
        "KL coefficient (beta)": arguments.beta,
        **shown_algorithm(arguments, plan.method),
        "batch": str(recipe.batch),
        "sampling": f"temperature {arguments.temperature:g}, at most {arguments.max_completion_length} tokens",
    }


def _train_policy(plan: Plan, model: PreTrainedModel, run: Run) -> PeftGRPOTrainer:
    """Trains, from the newest checkpoint if there is one; a signal ends it in order."""
    checkpoint = _checkpoint_of_main(run)
    alarms = HealthAlarms(plan.recipe.alarms.stop, run.path)
    trainer = PeftGRPOTrainer(
        model=model,
        reward_funcs=[reward.function for reward in plan.rewards],
        args=plan.arguments,
        train_dataset=plan.problems.train,
        eval_dataset=plan.problems.heldout if plan.arguments.eval_strategy != "no" else None,
        processing_class=plan.tokenizer,
        callbacks=[alarms],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log; LiveProgress shows the same in a line
    trainer.rollout_source.verdicts.judging = plan.judging
    trainer.base_fingerprint = source_of_run(run)
    custom = [reward for reward in plan.rewards if reward.failures is not None]
    stop = GracefulStop([reward.failures for reward in custom if reward.failures is not None])
    for callback in (*_callbacks(plan, run), stop):
        trainer.add_callback(callback)
    if is_first_process():
        discard_incomplete(run.checkpoints)
    if checkpoint:
        logger.info("resuming from step %d", step_of(checkpoint))
    with stop.listening(), _located(plan.recipe):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    stop.look()  # a last evaluation may have failed too
    if alarms.stopped is not None:
        raise plan.recipe.located(alarms.error(alarms.stopped))
    _check_trained(trainer, plan, run)
    if stop.failed is not None:
        raise plan.recipe.located(_failed(custom[stop.failed], trainer.state.global_step))
    if stop.requested:
        raise InterruptedRunError(
            f"stopped after step {trainer.state.global_step} of {plan.steps}", str(run.path), "the same command goes on"
        )
    return trainer


def _callbacks(plan: Plan, run: Run) -> list[TrainerCallback]:
    """What happens beside the steps; the same classes that a script takes from :mod:`perl.callbacks`."""
    hub = plan.recipe.hub
    scores = between_steps(plan, run)
    pushing = [HubCheckpoints(hub.repo_id, private=hub.private, run=run)] if hub.push == "every_save" else []
    live = [LiveProgress(say=logger.info)] if logger.isEnabledFor(logging.INFO) else []
    logs = [LearningCurves(run.path, title=_title(run)), SamplesLog(run.path), RunRecord(run)]
    return [*([scores] if scores else []), *pushing, *logs, *live, Hosted(run)]


def _check_trained(trainer: PeftGRPOTrainer, plan: Plan, run: Run) -> None:
    """Refuses to score and publish an adapter that is as it began.

    Raises:
        BrokenPromiseError: No step of a whole training had a gradient, however often the run was gone on with.
    """
    (watch,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, AdapterCallback))
    began = watch.movement is not None  # not where a run is gone on with after its last step
    if (began and not watch.idle) or trainer.state.global_step < plan.steps:
        return
    # Of a run that was gone on with, the log tells of the steps before, if it has them all.
    rows = joined().by_main(lambda: log_rows(run.metrics.read_text(encoding="utf-8")))
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row] if plan.arguments.logging_steps == 1 else []
    if (began and not watch.begun_at) or (norms and all(norm == 0 for norm in norms)):
        hint = "rewards of a prompt's completions must differ: another reward, harder or easier problems, no top_k: 1"
        raise BrokenPromiseError(f"{NOTHING_TRAINED} of {plan.steps} steps", str(plan.recipe.output_dir), hint)


def _checkpoint_of_main(run: Run) -> Path | None:
    """The newest complete checkpoint as the main process finds it; what another process lists may be older."""
    step = joined().by_main(lambda: latest_step(run.checkpoints))
    return run.checkpoints / f"checkpoint-{step}" if step else None


def _failed(reward: Reward, step: int) -> RewardError:
    """The error of a custom reward that failed too often."""
    failures = reward.failures
    here = failures is not None and failures.too_many
    what = f"failed on {failures.count} samples, at last: {failures.newest}" if here and failures else None
    return RewardError(
        what or "failed too often on another process of this run, see its log",
        f"rewards.{reward.name}",
        f"stopped after step {step} with a checkpoint; fix it, and the same command goes on",
    )


def _save_adapter(trainer: PeftGRPOTrainer, plan: Plan, run: Run, processes: Processes) -> None:
    """Writes the adapter, then each process proves that it is the one that it trained."""
    fingerprint = run.facts["fingerprint"]
    trainer.save_adapter(run.adapter)
    see_files(run.adapter, processes)
    if trainer.critic_training is not None:
        trainer.save_critic(run.critic)
    difference = 0.0
    if isinstance(trainer.policy, PeftModel):
        probe = _probe(plan, trainer.args.device)
        difference = check_saved_adapter(trainer.policy, run.adapter, probe)
        log_probs = trainer.policy_log_probs(probe, torch.ones_like(probe))
        if processes.main:
            write_probe(run.path, probe, log_probs)
        digest = sha256_of(run.adapter / WEIGHTS)
    else:
        check_saved_model(trainer.policy, run.adapter)
        digest = weights_digest(run.adapter)
    run.record(
        steps=trainer.state.global_step, fingerprint={**fingerprint, "adapter": digest}, reload_difference=difference
    )


def _probe(plan: Plan, device: torch.device) -> torch.Tensor:
    """(B, T) the ends of a few training prompts, all of one length."""
    prompts = render_prompts(
        list(plan.problems.train.select(range(min(_PROBE_PROMPTS, len(plan.problems.train))))), plan.tokenizer
    )
    width = min(len(prompt.token_ids) for prompt in prompts)
    return torch.tensor([prompt.token_ids[-width:] for prompt in prompts], device=device)


def _finish(run: Run) -> None:
    """What a person looks at first, of a run that has been trained."""
    _draw(run)
    write_card(run)


def _draw(run: Run) -> None:
    """The curves of a run as they are when it is done, with the scores of its last step."""
    try:
        draw_plots(run.metrics, run.plots, _title(run), rewarded=any(run.facts["rewards"].values()))
    except MissingExtraError as error:
        warn("PRL306", "%s", error)


def _title(run: Run) -> str:
    return f"{run.path.name}: {run.facts['method']} on {run.facts['base']}"
