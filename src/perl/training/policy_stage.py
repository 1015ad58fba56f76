"""The stage that trains: from a base to an adapter that is saved, proven to be the trained one, and described.

Plan, base, run -> trainer, trained -> adapter/ -> curves, card
"""

import logging
from contextlib import suppress
from pathlib import Path
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
    RewardError,
    RunFolderError,
    warn,
)
from perl.hub.card.candidate import source_of_run
from perl.hub.card.facts import published_label
from perl.hub.cards import write_card
from perl.launch.together import see_files
from perl.policy.checkpoint import discard_incomplete, latest_step, step_of
from perl.policy.guards import check_saved_adapter, check_saved_model
from perl.policy.model import answering_fingerprint, base_dtype, base_identity, source_fingerprint
from perl.policy.name import weights_digest
from perl.policy.probe import write_probe
from perl.policy.quantised import quantisation_of
from perl.policy.saved.adapter import WEIGHTS
from perl.policy.teacher import teacher_settings
from perl.recipe.recipe import is_first_process
from perl.rewards import Reward
from perl.rewards.custom import Failures, code_digest
from perl.run.devices import processor_name
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.joint_work import Processes, joined
from perl.run.logs import log_rows
from perl.trainer.callbacks.adapter import NOTHING_TRAINED, AdapterCallback
from perl.trainer.callbacks.alarms import HealthAlarms
from perl.trainer.callbacks.plots import draw_plots
from perl.trainer.callbacks.step_logs import LearningCurves, SamplesLog
from perl.trainer.publishing import shown_algorithm
from perl.trainer.trainer import PeftGRPOTrainer
from perl.training.callbacks.graceful_stop import GracefulStop
from perl.training.callbacks.hub_checkpoints import HubCheckpoints
from perl.training.callbacks.live_progress import LiveProgress
from perl.training.callbacks.run_record import RunRecord
from perl.training.checked_recipe import located
from perl.training.forecast import forecast_of
from perl.training.forecast_text import forecast_lines
from perl.training.plan import Plan
from perl.training.scores import between_steps

logger = logging.getLogger("perl")

# Prompts on which the saved adapter is compared with the one in memory.
_PROBE_PROMPTS = 4


def train_policy(plan: Plan, model: PreTrainedModel, run: Run) -> PeftGRPOTrainer:
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
    custom = [(reward, reward.failures) for reward in plan.rewards if reward.failures is not None]
    stop = GracefulStop([failures for _, failures in custom])
    for callback in (*_callbacks(plan, run), stop):
        trainer.add_callback(callback)
    if is_first_process():
        discard_incomplete(run.checkpoints)
    if checkpoint:
        logger.info("resuming from step %d", step_of(checkpoint))
    with stop.listening(), located(plan.recipe):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    stop.look()  # a last evaluation may have failed too
    if alarms.stopped is not None:
        raise plan.recipe.located(alarms.error(alarms.stopped))
    _check_trained(trainer, plan, run)
    if stop.failed is not None:
        raise plan.recipe.located(_failed(*custom[stop.failed], trainer.state.global_step))
    if stop.requested:
        what = f"stopped after step {trainer.state.global_step} of {plan.steps}"
        raise InterruptedRunError(what, str(run.path), "the same command goes on")
    return trainer


def _callbacks(plan: Plan, run: Run) -> list[TrainerCallback]:
    """What happens beside the steps; the same classes that a script takes from :mod:`perl.callbacks`."""
    hub = plan.recipe.hub
    scores = between_steps(plan, run)
    pushing = [HubCheckpoints(hub.repo_id, private=hub.private, run=run)] if hub.push == "every_save" else []
    live = [LiveProgress(say=logger.info)] if logger.isEnabledFor(logging.INFO) else []
    logs = [LearningCurves(run.path, title=run_title(run)), SamplesLog(run.path)]
    return [*([scores] if scores else []), *pushing, *logs, *live, RunRecord(run)]


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


def _failed(reward: Reward, failures: Failures, step: int) -> RewardError:
    """The error of a custom reward that failed too often."""
    what = "failed too often on another process of this run, see its log"
    if failures.too_many:
        what = f"failed on {failures.count} samples, at last: {failures.newest}"
    hint = f"stopped after step {step} with a checkpoint; fix it, and the same command goes on"
    return RewardError(what, f"rewards.{reward.name}", hint)


def save_adapter(trainer: PeftGRPOTrainer, plan: Plan, run: Run, processes: Processes) -> None:
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
    rows = plan.problems.train.select(range(min(_PROBE_PROMPTS, len(plan.problems.train))))
    prompts = render_prompts(list(rows), plan.tokenizer)
    width = min(len(prompt.token_ids) for prompt in prompts)
    return torch.tensor([prompt.token_ids[-width:] for prompt in prompts], device=device)


def record_identity(plan: Plan, model: PreTrainedModel, run: Run) -> None:
    """Records what the run is, before it trains.

    Raises:
        RunFolderError: The run was started with other weights of the base.
    """
    base, revision = base_identity(model)
    base = str(Path(base).resolve()) if Path(base).is_dir() else base  # a card is made elsewhere than the run
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
        **_reward_code(plan, run),
        data={"train": plan.problems.train_version, "eval": plan.problems.heldout_version},
        hardware={"device": processor_name(plan.arguments.device), "count": plan.arguments.world_size},
        planned_steps=plan.steps,
        forecast=_forecast_lines(plan),
    )


def _reward_code(plan: Plan, run: Run) -> dict[str, Any]:
    """What custom rewards are, and after which steps they were changed, which is said where it is found."""
    code = {reward.name: code_digest(reward.name) for reward in plan.rewards if reward.failures is not None}
    then, changed = run.facts.get("reward_code", code), list(run.facts.get("rewards_changed", []))
    other = [name for name in code if name in then and then[name] != code[name]]
    step = latest_step(run.checkpoints)
    if other and step and is_first_process():
        what = "the code of %s was changed since this run was stopped: its first %d steps were trained on the other"
        warn("PRL350", what, ", ".join(other), step)
        changed.append(step)
    return {"reward_code": code, "rewards_changed": changed}


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


def run_title(run: Run) -> str:
    """Over its pictures."""
    return f"{run.path.name}: {run.facts['method']} on {published_label(str(run.facts['base']))}"


def finish(run: Run) -> None:
    """What a person looks at first, of a run that has been trained: curves with the last scores, and the card."""
    try:
        draw_plots(run.metrics, run.plots, run_title(run), rewarded=any(run.facts["rewards"].values()))
    except MissingExtraError as error:
        warn("PRL306", "%s", error)
    write_card(run)
