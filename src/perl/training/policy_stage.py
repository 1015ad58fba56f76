"""The stage that trains: from a base to an adapter that is saved, proven to be the trained one, and described.

Plan, base, run -> trainer, trained -> adapter/ -> curves, card
"""

import logging
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainerState

from perl.algorithms.named import named_facts
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
from perl.policy.checkpoint import discard_incomplete, latest_step
from perl.policy.fingerprint import answering_fingerprint, base_dtype, source_fingerprint
from perl.policy.guards import check_saved_adapter, check_saved_model
from perl.policy.model import base_identity, load_base
from perl.policy.multimodal import loader_of
from perl.policy.name import weights_digest
from perl.policy.probe import write_probe
from perl.policy.quantised import quantisation_of
from perl.policy.saved.adapter import WEIGHTS
from perl.policy.teacher import teacher_settings
from perl.recipe.recipe import is_first_process
from perl.rewards.verifier import start_workers
from perl.run.code import code_digest
from perl.run.devices import processor_name
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.host import host
from perl.run.joint_work import joined
from perl.run.logs import log_rows
from perl.trainer.callbacks.adapter import NOTHING_TRAINED, AdapterCallback
from perl.trainer.callbacks.alarms import HealthAlarms
from perl.trainer.callbacks.run_callback import Logs
from perl.trainer.callbacks.step_logs import LearningCurves, SamplesLog, draw_plots
from perl.trainer.publishing import shown_algorithm
from perl.trainer.trainer import PeftGRPOTrainer
from perl.training.callbacks.graceful_stop import GracefulStop
from perl.training.callbacks.hub_checkpoints import HubCheckpoints
from perl.training.callbacks.live_progress import LiveProgress
from perl.training.forecast import forecast_of
from perl.training.forecast_text import forecast_lines
from perl.training.plan import Plan
from perl.training.scores import between_steps

logger = logging.getLogger("perl")

# Prompts on which the saved adapter is compared with the one in memory.
_PROBE_PROMPTS = 4


def load(plan: Plan, run: Run) -> PreTrainedModel:
    """The base; records what the run is, before it trains.

    Raises:
        RunFolderError: The run was started with other weights of the base.
    """
    if plan.judging is not None:
        start_workers(plan.judging.workers)  # before a GPU is used; they import while the weights are read
    with plan.recipe.locating():
        whole = plan.method.name == "full"  # it is written as a whole
        args = plan.arguments
        model = load_base(plan.recipe.model, args.device, args.strategy, args.shards, with_towers=whole)
    base, revision = base_identity(model)
    base = str(Path(base).resolve()) if Path(base).is_dir() else base  # a card is made elsewhere than the run
    fingerprint, source = answering_fingerprint(model), source_fingerprint(model)
    known, dtype = run.facts.get("fingerprint", {}).get("base", fingerprint), base_dtype(model)
    if known != fingerprint:
        what, hint = f"was started with other weights of {plan.recipe.model.name}", "choose another with --output"
        if (then := run.facts.get("base_dtype", dtype)) != dtype:  # auto depends on the device
            what, hint = f"{what}: they were loaded in {then}, here in {dtype}", f"model.dtype={then}, or {hint}"
        raise RunFolderError(what, str(run.path), hint)
    forecast: list[str] = []
    # A run does not end for want of an estimate, as of a model that is built like none that we know.
    with suppress(PerlError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        forecast = list(forecast_lines(forecast_of(plan))) if is_first_process() else []
    fingerprints = {"base": fingerprint} | ({"source": source} if source not in (None, fingerprint) else {})
    run.record(
        base=base,
        revision=revision,
        quantization=quantisation_of(model),
        loader=loader_of(model),
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
        rewards=plan.reward_weights,
        **_reward_code(plan, run),
        data={"train": plan.problems.train_version, "eval": plan.problems.heldout_version},
        hardware={"device": processor_name(plan.arguments.device), "count": plan.arguments.world_size},
        planned_steps=plan.steps,
        forecast=forecast,  # as ``perl plan`` tells it, on what is here
    )
    return model


def _reward_code(plan: Plan, run: Run) -> dict[str, Any]:
    """What custom rewards and tools are, and after which steps they were changed, which is said where it is found."""
    code = {reward.name: code_digest(reward.name) for reward in plan.rewards if reward.failures is not None}
    code |= {} if plan.asking is None else plan.asking.agent.digests
    then, changed = run.facts.get("reward_code", code), list(run.facts.get("rewards_changed", []))
    other = [name for name in code if name in then and then[name] != code[name]]
    step = latest_step(run.checkpoints)
    if other and step and is_first_process():
        what = "the code of %s was changed since this run was stopped: its first %d steps were trained on the other"
        warn("PRL350", what, ", ".join(other), step)
        changed.append(step)
    return {"reward_code": code, "rewards_changed": changed}


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


class RunRecord(TrainerCallback):
    """Keeps ``run.json`` up to date: steps, first and last reward; hands steps and checkpoints to the host."""

    def __init__(self, run: Run) -> None:
        """Takes the folder to record in, which holds the checkpoints."""
        self.run = run

    def on_log(self, _: object, state: TrainerState, __: object, logs: Logs = None, **___: object) -> None:
        """Records a step; the summary at the end of training is not one."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        if not (self.run.path / "recipe.yaml").is_file():
            raise RunFolderError("was removed while the run wrote to it", str(self.run.path), "start it again")
        host().logged(state.global_step, logs)
        if "reward" not in logs:  # evaluation, or a step that trains on an earlier step's rollouts
            self.run.record(steps=state.global_step)
            return
        last = logs["reward"]
        known = None if last is None or not math.isfinite(last) else last
        first = self.run.facts.get("reward", {}).get("first", known)
        self.run.record(steps=state.global_step, reward={"first": first, "last": known})

    def on_save(self, *_: object, **__: object) -> None:
        """A checkpoint is whole."""
        host().saved(self.run.path)


def train_policy(plan: Plan, model: PreTrainedModel, run: Run) -> PeftGRPOTrainer:
    """Trains, from the newest checkpoint if there is one; a signal ends it in order."""
    newest = joined().by_main(lambda: latest_step(run.checkpoints))  # another process may see an older one
    checkpoint = run.checkpoints / f"checkpoint-{newest}" if newest else None
    alarms = HealthAlarms(plan.recipe.alarms.stop, run.path)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # of environments, which are a recipe's own setting here
    trainer = PeftGRPOTrainer(
        model=model,
        reward_funcs=[reward.function for reward in plan.rewards],
        args=plan.arguments,
        train_dataset=plan.problems.train,
        eval_dataset=plan.problems.heldout if plan.arguments.eval_strategy != "no" else None,
        processing_class=plan.tokenizer,
        tools=None if plan.asking is None else list(plan.asking.agent.tools),
        environment_factory=None if plan.asking is None else plan.asking.agent.factory,
        callbacks=[alarms],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log; LiveProgress shows the same in a line
    trainer.rollout_source.verdicts.judging = plan.judging
    trainer.base_fingerprint = source_of_run(run)
    custom = [(reward, reward.failures) for reward in plan.rewards if reward.failures is not None]
    stop = GracefulStop([failures for _, failures in custom])
    hub, scores = plan.recipe.hub, between_steps(plan, run)
    pushing = [HubCheckpoints(hub.repo_id, private=hub.private, run=run)] if hub.push == "every_save" else []
    live = [LiveProgress(say=logger.info)] if logger.isEnabledFor(logging.INFO) else []
    logs = [LearningCurves(run.path, title=run_title(run)), SamplesLog(run.path)]
    for callback in (*([scores] if scores else []), *pushing, *logs, *live, RunRecord(run), stop):
        trainer.add_callback(callback)
    if is_first_process():
        discard_incomplete(run.checkpoints)
    if checkpoint:
        logger.info("resuming from step %d", newest)
    with stop.listening(), plan.recipe.locating():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    stop.look()  # a last evaluation may have failed too
    if alarms.stopped is not None:
        raise plan.recipe.located(alarms.error(alarms.stopped))
    _check_trained(trainer, plan, run)
    if stop.failed is not None:
        reward, failures = custom[stop.failed]
        what = "failed too often on another process of this run, see its log"
        if failures.too_many:
            what = f"failed on {failures.count} samples, at last: {failures.newest}"
        hint = f"stopped after step {trainer.state.global_step} with a checkpoint; fix it, and the same command goes on"
        raise plan.recipe.located(RewardError(what, f"rewards.{reward.name}", hint))
    if stop.requested:
        what = f"stopped after step {trainer.state.global_step} of {plan.steps}"
        raise InterruptedRunError(what, str(run.path), "the same command goes on")
    return trainer


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


def save_adapter(trainer: PeftGRPOTrainer, plan: Plan, run: Run) -> None:
    """Writes the adapter, then each process proves that it is the one that it trained."""
    fingerprint, processes = run.facts["fingerprint"], joined()
    trainer.save_adapter(run.adapter)
    see_files(run.adapter, processes)
    if trainer.critic_training is not None:
        trainer.save_critic(run.critic)
    difference = 0.0
    if isinstance(trainer.policy, PeftModel):
        # (B, T) the ends of a few training prompts, all of one length
        rows = plan.problems.train.select(range(min(_PROBE_PROMPTS, len(plan.problems.train))))
        prompts = plan.rendered(list(rows))
        width = min(len(prompt.token_ids) for prompt in prompts)
        probe = torch.tensor([prompt.token_ids[-width:] for prompt in prompts], device=trainer.args.device)
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
