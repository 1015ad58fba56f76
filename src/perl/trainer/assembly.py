"""What a trainer is made of: its parts, its reference and its callbacks, once TRL's constructor is through.

a complete trainer -> RolloutSource, LogProbPasses, OptimizerStep, ResumeState

This module alone hands the trainer's methods out; each part receives what its constructor names.
"""

import copy
import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from perl.data.prompts import asked_prompt
from perl.errors import RecipeError, raise_all, warn
from perl.methods.optim import lora_plus_optimizer, precondition_lora_fa
from perl.policy.guards import check_optimizer
from perl.policy.model import base_identity, base_of
from perl.policy.multimodal import freeze_towers
from perl.policy.teacher import find_teacher, make_teacher, teacher_identity, teacher_settings
from perl.rewards.named import JUDGES
from perl.rewards.verifier import Judging
from perl.rollouts.agents.conversations import words_of
from perl.rollouts.agents.environments import guarded
from perl.rollouts.agents.tools import tool_mistakes
from perl.rollouts.engine import EngineSampling
from perl.trainer.arguments.argument_checks import taught_alone
from perl.trainer.arguments.config import own_setting, rollout_section, teacher_section
from perl.trainer.arguments.rollout_choice import choose_backend
from perl.trainer.callbacks.adapter import AdapterCallback
from perl.trainer.callbacks.alarms import HealthAlarms
from perl.trainer.callbacks.run_callback import bind_callbacks
from perl.trainer.callbacks.trackers import KeptRuns
from perl.trainer.group_rewards import GroupRewards
from perl.trainer.live import Position
from perl.trainer.overrides import is_replaced, may_hold_images
from perl.trainer.prompts.order import later_prompts
from perl.trainer.prompts.selection import made_selection
from perl.trainer.resume_state import ResumeState
from perl.trainer.sampling.conversations import Conversations
from perl.trainer.sampling.generation import Prompts
from perl.trainer.sampling.given_rewards import is_rewarded
from perl.trainer.sampling.greedy_baseline import check_greedy
from perl.trainer.sampling.rollout_check import RolloutCheck
from perl.trainer.sampling.rollout_source import RolloutSource
from perl.trainer.step.critic_training import CriticTraining
from perl.trainer.step.log_prob_passes import LogProbPasses
from perl.trainer.step.optimizer_step import OptimizerStep
from perl.trainer.step.teaching import TeacherModel, Teaching, check_prompts, context_of

_LONGEST_TEXTS = 64  # prompts whose tokens are counted to know the longest: its text is one of the longest


def make_parts(trainer: GRPOTrainer) -> None:
    """Gives a trainer whose model and arguments are complete its parts."""
    _take_towers(trainer)
    teacher = teacher_of(trainer)  # of the base as it is now, before passes change how it runs
    trainer._position = position = Position(trainer)
    trainer.rollout_source = source = _source(trainer, position)
    trainer._rollout_check = RolloutCheck(trainer, source, position)
    trainer.conversations = Conversations(trainer)
    trainer.log_prob_passes = passes = LogProbPasses(
        trainer, longest_prompt=partial(longest_that_may_come, trainer), asleep_bytes=lambda: source.asleep_bytes
    )
    trainer._group_rewards = rewards = GroupRewards(trainer)
    if rewards.estimator.writes_greedy:
        check_greedy(trainer)
    critic = CriticTraining(trainer, trainer.adaptation.method, passes) if rewards.estimator.critic else None
    trainer.critic_training = critic
    teaching = None
    if teacher is not None:
        tokens, by_rollout_func = partial(_tokens, trainer), trainer.rollout_func is not None
        alone = _taught_alone(trainer)
        teaching = Teaching(trainer, teacher, passes, tokens, by_rollout_func=by_rollout_func, alone=alone)
    trainer.optimizer_step = OptimizerStep(
        trainer, passes, trainer._rollout_check, position, critic=critic, teaching=teaching
    )
    trainer.prompt_selection = made_selection(trainer, position, source)
    trainer.resume_state = ResumeState(
        trainer,
        position,
        trainer.reference,
        teacher=None if teacher is None else teacher.identity,
        critic=critic,
        prompts=trainer.prompt_selection,
    )


def guarded_tools(tools: Any, factory: Any, args: GRPOConfig, processing_class: Any) -> Any:  # noqa: ANN401 (TRL's)
    """What makes environments, as TRL takes it, with faults that end no step; the base is shown tools.

    Args:
        tools: As TRL takes them.
        factory: Likewise; one, or several by name.
        args: Of the trainer.
        processing_class: The base's; None: TRL loads it, and asks whether it can be shown tools.

    Raises:
        RecipeError: The base cannot be shown tools.
    """
    factories = list(factory.values()) if isinstance(factory, dict) else [factory] if factory is not None else []
    if any(not callable(one) for one in factories):
        raise RecipeError("makes no environments", "environment_factory", "a class, or several by name")
    if tools is not None and not isinstance(tools, list | tuple):
        raise RecipeError("are no list", "tools", "a list of functions")
    raise_all(RecipeError, [*tool_mistakes(tools or [], "tools")])
    if not tools and factory is None:
        return None
    if isinstance(processing_class, PreTrainedTokenizerBase):
        words_of(processing_class, args.chat_template_kwargs or {}, "tools" if tools else "environment_factory")
    seconds = own_setting(args, "agent_call_timeout")
    if isinstance(factory, dict):
        return {name: guarded(one, seconds) for name, one in factory.items()}
    return factory if factory is None else guarded(factory, seconds)


def teacher_of(trainer: GRPOTrainer) -> TeacherModel | None:
    """The teacher that a trainer's arguments name.

    Raises:
        PerlError: Its adapter does not fit, or its prompts cannot be made of the trainer's data.
    """
    section = teacher_section(trainer.args)
    if not section.acts:
        return None
    if section.changes_prompts and trainer.environment_factories is not None:
        what = "puts a hint into the data's prompts, and an environment makes its own"
        raise RecipeError(what, "teacher", "teacher.adapter, or no environment_factory")
    args, given = trainer.args, trainer.eval_dataset
    of_evaluation = list(given.values()) if isinstance(given, dict) else [given]
    # Images are read with their rows, and a subclass's tokens may need what it does not have yet.
    known = not may_hold_images(trainer) and not is_replaced(trainer, "_tokenize_prompts")
    context = context_of(base_of(trainer.policy).config) if known else None
    starts_as_it = section.adapter is None and trainer._adapted.starts_as_base and _taught_alone(trainer)
    # The prompts of all data that is there, so that training does not end at one in the middle.
    for data in [trainer.train_dataset, *(of_evaluation if args.eval_strategy != "no" else [])]:
        if data is not None:
            same = starts_as_it and data is trainer.train_dataset
            check_prompts(data, section, partial(_tokens, trainer), int(args.max_completion_length), context, same=same)
    policy, saved = trainer.policy, None
    if section.adapter is not None:
        saved = find_teacher(section.adapter, base_identity(policy)[0], trainer.processing_class)
    identity, settings = teacher_identity(section, saved), teacher_settings(section, saved)
    return TeacherModel(make_teacher(policy, saved), section, identity, settings)


def _taught_alone(trainer: GRPOTrainer) -> bool:
    """Whether nothing but its teacher gives a trainer's first step a gradient."""
    return taught_alone(trainer.args, rewarded=is_rewarded(trainer), continued=trainer._adapted.continued)


def add_callbacks(trainer: GRPOTrainer) -> None:
    """Adds what proves that an adapter trains, and what says what is unhealthy about a training; trackers keep one run.

    Raises:
        RecipeError: The user gave two callbacks of a kind.
    """
    bind_callbacks(trainer)
    trainer.callback_handler.callbacks.insert(0, KeptRuns(trainer))
    trainer.add_callback(AdapterCallback(trainer))
    if not any(isinstance(callback, HealthAlarms) for callback in trainer.callback_handler.callbacks):
        alarms = HealthAlarms()
        alarms.by_default = True
        trainer.add_callback(alarms)
        alarms.serve(trainer)


def made_optimizer(
    trainer: GRPOTrainer, theirs: Callable[[], torch.optim.Optimizer], model: torch.nn.Module
) -> torch.optim.Optimizer:
    """The optimizer of a trainer's method, or the one that it was given, which must hold all that trains.

    Args:
        trainer: Whose optimizer it becomes.
        theirs: transformers' ``create_optimizer``, which leaves one that there is.
        model: What is trained.

    Raises:
        BrokenPromiseError: A trained parameter is in no group of it.
    """
    method, given = trainer.adaptation.method.optimizer, trainer.optimizer is not None
    if method == "lora_plus" and not given:
        kind, arguments = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
            trainer.args, trainer.model
        )
        arguments = {**arguments, "weight_decay": trainer.args.weight_decay}
        ratio = trainer.adaptation.options["loraplus_lr_ratio"]
        trainer.optimizer = lora_plus_optimizer(trainer.policy, kind, arguments, ratio)
    optimizer = theirs()
    if method == "lora_fa" and not given:
        precondition_lora_fa(trainer.policy, optimizer)
    check_optimizer(model, optimizer)
    return optimizer


def _source(trainer: GRPOTrainer, position: Position) -> RolloutSource:
    """What samples; from here on TRL's code takes an engine's rollouts for vLLM's, with log-probabilities."""
    args = trainer.args
    sampling = EngineSampling(
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
        end_token_ids=tuple(trainer.eos_token_ids),
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )
    prompts = Prompts(trainer.processing_class, partial(_tokens, trainer), partial(longest_that_may_come, trainer))
    how = choose_backend(rollout_section(args), trainer)
    source = RolloutSource(trainer, how, sampling, prompts, position, later=partial(later_prompts, trainer))
    if any(judge in trainer.reward_funcs for judge in JUDGES):
        source.verdicts.judging = Judging()
    if source.is_served:
        trainer.use_vllm, trainer.vllm_mode = True, "server"
    return source


def _tokens(trainer: GRPOTrainer, prompts: list[Any]) -> list[list[int]]:
    """The prompts' tokens, by the trainer's own method or a subclass's, either of which may change what it is given."""
    if trainer.environment_factories is not None:  # whose tools TRL shows by the batch at hand
        now, trainer._batch_environments = getattr(trainer, "_batch_environments", None), [None] * len(prompts)
    try:
        ids: list[list[int]] = trainer._tokenize_prompts(copy.deepcopy(prompts))[0]
    finally:
        if trainer.environment_factories is not None:
            trainer._batch_environments = now
    return ids


def _take_towers(trainer: GRPOTrainer) -> None:
    """Freezes what text does not reach of a multimodal model; where images may come TRL trains it, which is said."""
    main = trainer.args.process_index == 0
    if may_hold_images(trainer):
        if main:
            warn("PRL316", "prompts may hold images, which TRL's own step trains: padded, and as fast as TRL")
        return
    adapted = freeze_towers(base_of(trainer.policy))
    if adapted and isinstance(trainer.policy, PeftModel) and main:
        what = "%d tensors of the adapter are on %s, which text does not reach: they are frozen"
        warn("PRL316", what, len(adapted), adapted[0])


def askable(trainer: GRPOTrainer, prompts: list[Any]) -> list[Any]:
    """Prompts as they are asked, without keys that hold nothing; those with images stay as they are.

    Raises:
        DataError: A conversation that no answer can follow.
    """
    if may_hold_images(trainer):
        return prompts
    return [asked_prompt(one, "a prompt", "train_dataset") for one in prompts]


def longest_that_may_come(trainer: GRPOTrainer, seen: int, most: int | None = None) -> int:
    """Tokens of the longest prompt that may come: of those with the longest texts in the data set.

    Args:
        trainer: Of the data.
        seen: Of the rollouts at hand; the result where prompts are changed on the way, or the data is a stream.
        most: Prompts that are looked at; None: all of them.
    """
    data = trainer.train_dataset
    changed = trainer.rollout_func is not None or trainer.environment_factories is not None or may_hold_images(trainer)
    if changed or not isinstance(data, Dataset) or not len(data):  # a stream can be read only once
        return seen
    prompts = data["prompt"][:most]
    sizes = enumerate(len(str(prompt)) for prompt in prompts)
    longest = heapq.nlargest(_LONGEST_TEXTS, sizes, key=lambda found: found[1])
    return max(seen, *map(len, _tokens(trainer, [prompts[index] for index, _ in longest])))
