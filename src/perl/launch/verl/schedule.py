"""Steps, batches and the learning rate, in verl's words.

Handover -> overrides, what cannot be said

A step of verl is a batch of rollouts: here ``steps_per_generation`` over ``gradient_accumulation_steps`` optimizer
steps, times ``num_iterations``. verl counts saving, testing, warm-up and the learning rate's schedule in those.
"""

import math
from collections.abc import Mapping

from perl.launch.verl.handover import Handover
from perl.launch.verl.objective import Mapped

_ACTOR, _OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"
_ADAMW = ("adamw_torch", "adamw_torch_fused")
_RATES = "constant, constant_with_warmup, cosine or cosine_with_min_lr"
_OF_MEGATRON: Mapping[str, str] = {"constant_with_warmup": "constant"}


def schedule(job: Handover) -> Mapped:
    """The overrides of batches, steps, optimizer and rate.

    Args:
        job: The recipe with its data.
    """
    mapped = Mapped()
    _batches(job, mapped)
    _optimizer(job, mapped)
    _rate(job, mapped)
    _saving(job, mapped)
    if job.arguments.advantage_estimator == "gae":
        _critic_warmup(job, mapped)
    return mapped


def verl_steps(job: Handover) -> int:
    """Steps of verl, each a batch of rollouts."""
    return math.ceil(job.steps / job.steps_per_batch)


def _batches(job: Handover, mapped: Mapped) -> None:
    arguments = job.arguments
    accumulated = arguments.gradient_accumulation_steps or 1
    generation = arguments.steps_per_generation or accumulated
    if generation % accumulated:
        what = f"{generation} passes a batch of rollouts are no whole number of steps of {accumulated} passes"
        mapped.refuse("train.steps_per_generation", what, f"a multiple of {accumulated}")
        return
    if job.steps % job.steps_per_batch:
        what = f"{job.steps} steps are no whole number of batches of rollouts, {job.steps_per_batch} steps each"
        mapped.refuse("train.max_steps", what, f"a multiple of {job.steps_per_batch}")
    prompts = job.prompts_per_step * job.updates_per_batch
    problems = len(job.train)
    if problems < prompts:  # verl would divide by its 0 steps an epoch
        mapped.refuse("train.prompts_per_step", f"{problems} problems for {prompts} prompts a batch", f"{problems}")
        return
    steps = verl_steps(job)
    gpus = job.recipe.engine.gpus_in_all
    completions = prompts * arguments.num_generations
    if completions % gpus:
        what = f"{completions} completions a batch cannot be divided over {gpus} GPUs"
        least = job.prompts_per_step * gpus // math.gcd(gpus, completions)
        mapped.refuse("train.prompts_per_step", what, f"{least}, or engine.gpus by which {completions} can be divided")
    mapped.overrides |= {
        "data.train_batch_size": prompts,
        f"{_ACTOR}.ppo_mini_batch_size": job.prompts_per_step,
        f"{_ACTOR}.ppo_epochs": arguments.num_iterations,
        "actor_rollout_ref.rollout.n": arguments.num_generations,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": math.ceil(steps / (problems // prompts)),
    }


def _optimizer(job: Handover, mapped: Mapped) -> None:
    arguments = job.arguments
    name = getattr(arguments.optim, "value", arguments.optim)
    if name not in _ADAMW:
        mapped.refuse("train.optim", f"{name}: it is AdamW there", "adamw_torch")
    if not arguments.max_grad_norm:
        mapped.refuse("train.max_grad_norm", "0 would make every gradient 0 there", "1e9, which never clips")
    mapped.overrides |= {
        f"{_OPTIM}.lr": arguments.learning_rate,
        f"{_OPTIM}.weight_decay": arguments.weight_decay,
        f"{_OPTIM}.betas": [arguments.adam_beta1, arguments.adam_beta2],
        f"{_OPTIM}.clip_grad": arguments.max_grad_norm,
    }
    if not job.megatron:
        mapped.overrides |= {f"{_OPTIM}.optimizer": "AdamW", f"{_ACTOR}.grad_clip": arguments.max_grad_norm}
    if arguments.adam_epsilon != 1e-8:
        key = "adam_eps" if job.megatron else "eps"
        mapped.overrides[f"{_OPTIM}.override_optimizer_config"] = {key: arguments.adam_epsilon}


def _rate(job: Handover, mapped: Mapped) -> None:
    arguments = job.arguments
    name = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    kwargs = dict(arguments.lr_scheduler_kwargs or {})
    least = kwargs.pop("min_lr_rate", 0.0) if name == "cosine_with_min_lr" else 0.0
    if name == "cosine_with_min_lr" and "min_lr" in kwargs:
        least = kwargs.pop("min_lr") / arguments.learning_rate
    kind = "cosine" if name.startswith("cosine") else _OF_MEGATRON.get(name, name)
    known = ("constant", "cosine", "linear") if job.megatron else ("constant", "cosine")
    if kind not in known or name == "cosine_with_restarts":
        what = f"{name} is no schedule of verl{'' if job.megatron else ' with FSDP'}"
        more = "" if job.megatron else ", or linear with engine.strategy: megatron"
        mapped.refuse("train.lr_scheduler_type", what, f"{_RATES}{more}")
        return
    if kwargs:
        mapped.refuse("train.lr_scheduler_kwargs", f"{', '.join(kwargs)} is not read there", "min_lr_rate goes")
    warm = 0 if name == "constant" else _warmup(job)
    if warm % job.steps_per_batch:
        what = f"{warm} steps of warm-up are no whole number of batches of rollouts"
        mapped.refuse("train.warmup_steps", what, f"a multiple of {job.steps_per_batch}")
    mapped.overrides[f"{_OPTIM}.lr_warmup_steps"] = warm // job.steps_per_batch
    mapped.overrides[f"{_OPTIM}.lr_warmup_steps_ratio"] = 0.0
    if job.megatron:
        mapped.overrides |= {
            f"{_OPTIM}.lr_decay_style": kind,
            f"{_OPTIM}.min_lr": least * arguments.learning_rate,
            f"{_OPTIM}.lr_warmup_init": 0.0,
        }
        return
    mapped.overrides[f"{_OPTIM}.lr_scheduler_type"] = kind
    if kind == "cosine":
        mapped.overrides |= {f"{_OPTIM}.min_lr_ratio": least, f"{_OPTIM}.num_cycles": 0.5}
    if job.steps_per_batch > 1 and (kind == "cosine" or warm):
        mapped.notes.append("rate: verl moves it once a batch of rollouts, not at each of its optimizer steps")


def _warmup(job: Handover) -> int:
    """Optimizer steps of warm-up, as transformers reads them: below 1 a share of all."""
    return _steps_of(job.arguments.warmup_steps, job)


def _steps_of(given: float, job: Handover) -> int:
    """Optimizer steps, as transformers reads a number of them: below 1 a share of all, rounded up."""
    return math.ceil(job.steps * given) if 0 < given < 1 else int(given)


def _critic_warmup(job: Handover, mapped: Mapped) -> None:
    """Batches in which the critic alone trains: verl's policy trains from the step that it names, the first is 1."""
    waits = int(job.arguments.critic_warmup_steps)
    if waits % job.steps_per_batch:
        what = f"{waits} steps of the critic alone are no whole number of batches of rollouts"
        mapped.refuse("train.critic_warmup_steps", what, f"a multiple of {job.steps_per_batch}")
    mapped.overrides["trainer.critic_warmup"] = waits // job.steps_per_batch + 1 if waits else 0
    if waits and job.arguments.lr_scheduler_type != "constant":
        mapped.notes.append("rate: the policy's begins to move after the critic's warm-up in verl, here with it")


def _saving(job: Handover, mapped: Mapped) -> None:
    arguments = job.arguments
    strategy = str(getattr(arguments.save_strategy, "value", arguments.save_strategy))
    every = _steps_of(arguments.save_steps, job)
    if strategy not in ("steps", "no"):
        mapped.refuse("train.save_strategy", f"{strategy}: verl saves by steps", "steps")
    if strategy == "steps" and every % job.steps_per_batch:
        what = f"{every} steps are no whole number of batches of rollouts, {job.steps_per_batch} steps each"
        mapped.refuse("train.save_steps", what, f"a multiple of {job.steps_per_batch}")
    often = strategy == "steps" and every > 0
    frequency = max(1, every // job.steps_per_batch) if often else verl_steps(job)
    mapped.overrides |= {
        "trainer.save_freq": frequency,  # and at the last step, in any case
        "trainer.max_actor_ckpt_to_keep": arguments.save_total_limit,
    }
    if arguments.advantage_estimator == "gae":
        mapped.overrides["trainer.max_critic_ckpt_to_keep"] = arguments.save_total_limit
    _testing(job, mapped)


def _testing(job: Handover, mapped: Mapped) -> None:
    """The held-out problems are scored before and after the training, as is done here, and in between if asked."""
    arguments, steps = job.arguments, verl_steps(job)
    heldout = job.heldout is not None and job.recipe.eval.enabled
    when = str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy))
    frequency = steps if heldout else -1
    if when == "epoch":
        mapped.refuse("train.eval_strategy", "epoch: verl tests by steps", "steps")
    if when == "steps":
        every = _steps_of(arguments.eval_steps or arguments.logging_steps, job)
        if every % job.steps_per_batch:
            mapped.refuse("train.eval_steps", "no whole number of batches", f"a multiple of {job.steps_per_batch}")
        frequency = max(1, every // job.steps_per_batch)
    mapped.overrides |= {
        "trainer.test_freq": frequency,
        "trainer.val_before_train": bool(heldout or arguments.eval_on_start),
    }
