"""What is wrong with a trainer's arguments: words that do not exist, numbers out of bounds, settings in contradiction.

arguments -> errors that name the argument, or the recipe's key where the mistake is about sampling

A recipe is held to the same by its sections; a script by the constructors of its arguments and of its trainer.
"""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from pydantic import ValidationError
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.estimators import ADVANTAGES, evaluation_mistake, generations_mistake
from perl.algorithms.kl_place import kl_mistakes
from perl.algorithms.named import ALGORITHMS, KEY
from perl.algorithms.overrides import FIELDS_OF_ADVANTAGES, counts, has_signal, nothing_teaches, without_rewards
from perl.algorithms.reading import sometimes_read
from perl.algorithms.registry import LOSSES, delta_mistakes, function_at
from perl.algorithms.train_fields import defaults_of, train_fields, train_model, words_of_fields
from perl.errors import DataError, MissingExtraError, Mistake, RecipeError, did_you_mean, raise_all
from perl.policy.sharding import FSDP2, check_push, check_strategy
from perl.recipe.layers import Layer
from perl.recipe.optional_packages import (
    ADDED_TRACKERS,
    missing_trackers,
    named_trackers,
    send_no_statistics,
    tracker_mistakes,
    unusable_trackers,
)
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import FIELD_OF_SETTING
from perl.recipe.validation import SectionKind, checked, mistakes_of
from perl.run.devices import check_device
from perl.trainer.arguments.derived_fields import check_applied
from perl.trainer.live import generation_interval, updates_of_a_batch
from perl.trainer.overrides import LOSS, OF_A_LOSS, is_replaced, reasons_for_trls_loss

# Of ours in a script these may be what a recipe refuses, as TRL takes them: 0 for never, a rate as text.
_FREER = ("learning_rate", "logging_steps", "save_steps")
# TRL's own whose impossible values it trains with, or takes late.
_OF_TRL = ("beta", "epsilon", "epsilon_high", "num_generations", "num_iterations", "steps_per_generation")
# Transformers takes these as text or as a member of the enumeration.
_ENUMERATIONS = {
    "optim": OptimizerNames,
    "lr_scheduler_type": SchedulerType,
    "save_strategy": SaveStrategy,
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "hub_strategy": HubStrategy,
}


def check_types(args: Any) -> None:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Refuses values of another type, and numbers that cannot be, as a recipe does; NumPy's become Python's.

    Looks at our own fields and at a few of TRL's, where they are not as usual; words are looked at elsewhere.

    Raises:
        RecipeError: Names each argument.
    """
    ours = itertools.takewhile(lambda kind: kind is not GRPOConfig, type(args).__mro__)
    own = {name for kind in ours for name in vars(kind).get("__annotations__", ())} | {*_OF_TRL}
    own = own.difference(FIELD_OF_SETTING.values(), words_of_fields(), [KEY], _FREER)
    for name in train_fields():
        if hasattr(getattr(args, name), "item"):  # a number of NumPy or torch
            setattr(args, name, _plain(getattr(args, name)))
    given = {name: _plain(getattr(args, name)) for name in train_fields() if name in own}
    usual = {name: train_fields()[name].default for name in given}
    given = {name: v for name, v in given.items() if type(v) is not type(usual[name]) or not bool(v == usual[name])}
    found: list[Mistake] = []
    try:
        train_model(tuple(given)).model_validate(given)
    except ValidationError as error:
        found += mistakes_of(error, train_model(tuple(given)), given, (), Layer())
    rate = args.learning_rate
    if isinstance(rate, Real) and not 0 <= float(rate) < math.inf:
        found.append(Mistake(f"must be a finite number of 0 or more, not {rate}", "learning_rate"))
    raise_all(RecipeError, found)


def _plain(value: Any) -> Any:  # noqa: ANN401 (of any field)
    """A number of NumPy or torch as one of Python, a path as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def check_enumerations(args: GRPOConfig) -> None:
    """Refuses a word that is none of transformers'.

    Raises:
        RecipeError: Names each argument and the nearest word.
    """
    words = {name: tuple(member.value for member in kind) for name, kind in _ENUMERATIONS.items()}
    raise_all(RecipeError, _unknown_words(args, words))


def check_trackers(args: GRPOConfig) -> None:
    """Refuses a tracker that is unknown, not installed, or would ask for a login; the others send no statistics.

    Those that packages of the user's have added are given to transformers, which makes their callbacks.

    Raises:
        RecipeError: Names each, and the nearest word or what to do.
        MissingExtraError: Its package is not installed.
    """
    send_no_statistics(args.report_to)
    given = {"report_to": args.report_to, "trackio_space_id": args.trackio_space_id}
    raise_all(RecipeError, [*tracker_mistakes(args.report_to, "report_to")])
    raise_all(MissingExtraError, [*missing_trackers(args.report_to, "report_to")])
    raise_all(RecipeError, [*unusable_trackers(given)])
    for name in ADDED_TRACKERS.keys() & set(named_trackers(args.report_to)):
        INTEGRATION_TO_CALLBACK[name] = function_at(ADDED_TRACKERS[name])


def check_arguments(args: GRPOConfig, *, own_loss: bool) -> None:
    """Refuses arguments that TRL would look at late, while it trains, or never.

    Args:
        args: As TRL has completed them.
        own_loss: Whether a subclass computes the loss; then the loss's name and its ratio are that subclass's words.

    Raises:
        RecipeError: Names each argument, and the nearest word.
        PerlError: The device cannot be used, or the launcher asks for a strategy that is not proven.
    """
    check_applied(args)
    check_strategy(args)
    check_push(getattr(args, "strategy", ""), asked=args.push_to_hub)
    check_teacher(args)
    words = {"loss_type": tuple(LOSSES), **words_of_fields()}
    if own_loss:
        del words["loss_type"], words["importance_sampling_level"]
    words = {name: choices for name, choices in words.items() if hasattr(args, name)}  # TRL's own lack some of ours
    found = _unknown_words(args, words)
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    try:  # numbers that a recipe refuses and TRL trains with
        checked(RolloutSection, {name: float(value) for name, value in given.items() if isinstance(value, Real)})
    except RecipeError as error:
        found += error.mistakes
    if args.beta < 0:
        found.append(Mistake(f"must be greater than or equal to 0, not {args.beta:g}", "beta"))
    raise_all(RecipeError, found or step_mistakes(args))
    check_device(args.device)


def algorithm_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Impossible numbers of our own fields, and advantages that two fields ask for in two ways."""
    found = kl_mistakes(vars(args))
    if args.multi_objective_aggregation == "normalize_then_sum" and args.advantage_estimator != "group":
        what = (
            f"normalize_then_sum has advantages of its own, not those of advantage_estimator {args.advantage_estimator}"
        )
        found.append(Mistake(what, "multi_objective_aggregation", "advantage_estimator: group, or sum_then_normalize"))
    when = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    in_evaluations = evaluation_mistake(args.advantage_estimator, args.num_generations_eval, when)
    found += [in_evaluations] if in_evaluations is not None else []
    if getattr(args, KEY) is not None:  # without a name all is as in TRL
        found += delta_mistakes(vars(args))
    return found + critic_mistakes(args) + selection_mistakes(args)


def check_sets(args: GRPOConfig, train_dataset: Any, eval_dataset: Any, *, asks: bool = False) -> None:  # noqa: ANN401
    """Refuses data without prompts, and a best checkpoint by a metric that none of several evaluation sets has.

    Args:
        args: Of the trainer.
        train_dataset: As TRL takes it.
        eval_dataset: Likewise.
        asks: Whether an environment makes the prompts.

    Raises:
        DataError: Names the columns that there are.
        RecipeError: Names the metrics that there are.
    """
    columns = getattr(train_dataset, "column_names", None)
    if columns and "prompt" not in columns and not asks:
        what = f"has no column 'prompt', it has {', '.join(map(str, columns))}"
        raise DataError(what, "train_dataset", "rename_column(..., 'prompt')")
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == IntervalStrategy.NO or not isinstance(eval_dataset, dict):
        return
    name = metric.removeprefix("eval_")
    if not any(name.startswith(f"{key}_") for key in eval_dataset):
        found = " or ".join(f"eval_{key}_{name}" for key in eval_dataset)
        raise RecipeError(f"{metric} is of no single evaluation set", "metric_for_best_model", found)


def check_step(trainer: GRPOTrainer) -> None:
    """Refuses settings of our own loss where TRL's would be computed, which does not know them.

    A loss of a subclass may call ours on TRL's micro-batches, but no critic and no teacher runs beside those.

    Raises:
        RecipeError: Names the setting, and what makes the loss TRL's.
    """
    if trainer.step_is_ours:
        return
    because = reasons_for_trls_loss(trainer)
    replaced = [f"{type(trainer).__name__}.{name}" for name in OF_A_LOSS if is_replaced(trainer, name)]
    named = " and ".join(dict.fromkeys([*because, *replaced]))
    found = unknown_to_trl(trainer.args, f"is not known to TRL's step, which runs here because of {named}")
    own_loss = is_replaced(trainer, *LOSS) and not because
    raise_all(RecipeError, [one for one in found if not own_loss or one.where in ("teacher", "advantage_estimator")])


def step_mistakes(args: GRPOConfig) -> list[Mistake]:
    """The same for what arguments alone decide, before a model is loaded."""
    reasons = {
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "entropy_coef": args.entropy_coef != 0.0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
    }
    named = [name for name, holds in reasons.items() if holds]
    what = f"is not known to TRL's step, which runs because of {' and '.join(named)}"
    return unknown_to_trl(args, what) if named else []


def unknown_to_trl(args: GRPOConfig, what: str) -> list[Mistake]:
    """A mistake for each setting of the loss that TRL's does not have."""
    loss = LOSSES.get(args.loss_type)
    found = [] if loss is None or loss.in_trl else [Mistake(f"{args.loss_type} {what}", "loss_type")]
    for name, usual in defaults_of("objective").items():
        if getattr(args, name, usual) != usual:
            found.append(Mistake(f"{getattr(args, name)} {what}", name, f"{usual}"))
    if has_teacher(args):
        found.append(Mistake(f"a teacher {what}", "teacher", "leave one of the two out"))
    estimator = getattr(args, "advantage_estimator", "group")
    if ADVANTAGES[estimator].critic:
        found.append(Mistake(f"{estimator} trains a critic, which {what}", "advantage_estimator", "one without"))
    return found


def _unknown_words(args: GRPOConfig, known: Mapping[str, tuple[str, ...]]) -> list[Mistake]:
    found = []
    for name, words in known.items():
        given = getattr(args, name)
        if not isinstance(given, str):
            found.append(Mistake(f"must be one of {', '.join(words)}, not {given!r}", name))
        elif given not in words:
            found.append(Mistake(f"there is no {given!r}", name, did_you_mean(given, words)))
    return found


def section_of_arguments(kind: type[SectionKind], section: str, values: Mapping[str, Any]) -> SectionKind:
    """A recipe's section of arguments.

    Args:
        kind: The section's model.
        section: Its name.
        values: By the names of its settings.

    Raises:
        RecipeError: Names the argument of each value that is impossible or contradicts another.
    """
    try:
        return checked(kind, values)
    except RecipeError as error:
        names = {key: FIELD_OF_SETTING.get((section, key), section) for key in kind.model_fields}
        raise error.moved(lambda setting: re.sub(r"^[^.]*", lambda key: names.get(key[0], section), setting)) from None


def check_sampling(args: GRPOConfig, how: RolloutSection) -> None:
    """Refuses to sample from a policy that the loss, even corrected, is not about.

    vLLM's log-probabilities are of the distribution after the nucleus and the like have cut it, the trainer's of the
    whole one: their ratio is the probability that was cut off, not a difference of policies (it is below 1 for every
    token, 0.9 in the mean at top_p 0.8).

    Raises:
        RecipeError: The correction would be biased, or there is none where rollouts are sampled ahead.
    """
    if not how.capabilities.log_probs:
        return
    found = []
    neutral = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
    for name, values in neutral.items():
        asked = getattr(args, name)
        if args.vllm_importance_sampling_correction and asked not in values:
            what = f"{asked:g} cuts off what the importance correction would count as a difference of policies"
            hint = f"{values[0]:g}, or train.vllm_importance_sampling_correction: false"
            found.append(Mistake(what, f"rollout.{name}", hint))
    for name in ("generation_kwargs", "vllm_structured_outputs_regex"):
        if getattr(args, name):
            found.append(Mistake("is not handed to vLLM here", f"train.{name}", "leave it out, or transformers"))
    sequences = args.vllm_importance_sampling_mode.startswith("sequence")
    if args.loss_type == "vespo" and args.vllm_importance_sampling_correction and sequences:
        what = "vespo corrects each token by itself"
        found.append(Mistake(what, "train.vllm_importance_sampling_mode", "token_truncate or token_mask"))
    estimator = ADVANTAGES.get(getattr(args, "advantage_estimator", "group"))
    if how.prefetch and estimator is not None and estimator.writes_greedy:
        what = "rollouts sampled ahead gain nothing where each step waits for greedy completions of the policy as it is"
        found.append(Mistake(what, "rollout.prefetch", "0, or another advantage_estimator than remax"))
    if how.prefetch and not args.vllm_importance_sampling_correction:
        what = "rollouts that are sampled ahead are from an older policy and need the importance correction"
        found.append(Mistake(what, "rollout.prefetch", "0, or train.vllm_importance_sampling_correction: true"))
    raise_all(RecipeError, found)


def check_staleness(args: GRPOConfig, how: RolloutSection) -> None:
    """Refuses a bound on the age of rollouts that cannot be kept, or beside which nothing is sampled ahead.

    Raises:
        RecipeError: Says which bound would do.
    """
    bound = how.max_staleness
    if bound is None:
        return
    interval, accumulation = generation_interval(args), args.gradient_accumulation_steps
    least = updates_of_a_batch(interval, accumulation) - 1
    if bound < least:
        what = f"{bound} cannot be kept: {least + 1} updates train on the same rollouts, the last after {least} others"
        hint = f"{least} or more, or a lower num_iterations or steps_per_generation"
        raise RecipeError(what, "rollout.max_staleness", hint)
    if not how.prefetch and bound > least:
        what = (
            f"{bound} bounds what is sampled ahead, and rollout.prefetch is 0: rollouts are {least} steps old at most"
        )
        raise RecipeError(what, "rollout.max_staleness", "leave it out, or rollout.prefetch: 1")
    if how.prefetch and bound == least and interval >= accumulation:
        what = f"{bound} lets nothing be sampled ahead, and rollout.prefetch is {how.prefetch}"
        raise RecipeError(what, "rollout.max_staleness", f"{least + 1} or more, or rollout.prefetch: 0")


def has_teacher(args: Any) -> bool:  # noqa: ANN401 (TRL's arguments or ours)
    """Whether there is a teacher."""
    return any(getattr(args, f"teacher_{key}", None) is not None for key in ("adapter", "hint", "system_prompt"))


def check_teacher(args: Any) -> None:  # noqa: ANN401 (TRL's arguments or ours)
    """Refuses an algorithm without the teacher that it needs, and a teacher where none can be.

    Raises:
        RecipeError: Says what to set.
    """
    row = ALGORITHMS.get(getattr(args, KEY, None) or "")
    found = []
    if row is not None and row.needs_teacher and not has_teacher(args):
        what = f"{row.name} has nobody to learn from"
        found.append(Mistake(what, "teacher", "teacher: {adapter: RUN}, or {hint: TEXT} or {system_prompt: TEXT}"))
    if has_teacher(args) and getattr(args, "strategy", "") == FSDP2:
        found.append(Mistake("a base in shards (fsdp2) has no teacher", "teacher", "engine.strategy: ddp"))
    if has_teacher(args) and getattr(args, "peft_method", "") == "full":
        what = "the base itself is trained by peft.method full, and no teacher is left"
        found.append(Mistake(what, "teacher", "a method with an adapter, as lora"))
    raise_all(RecipeError, found)


def _single_completion(args: Any, *, rewarded: bool) -> list[Mistake]:  # noqa: ANN401 (TRL's arguments or ours)
    """What is wrong with a single completion of each prompt, whether a reward counts or not."""
    signal = has_signal(vars(args), rewarded=rewarded)
    found = generations_mistake(getattr(args, "advantage_estimator", "group"), args.num_generations, signal=signal)
    return [] if found is None else [found]


def taught_alone(args: Any, *, rewarded: bool, continued: bool) -> bool:  # noqa: ANN401 (TRL's arguments or ours)
    """Whether a teacher alone gives the first step a gradient.

    A KL term gives none where the policy begins as its reference, as a new adapter does.

    Args:
        args: Of the trainer.
        rewarded: Whether a reward counts.
        continued: Whether an adapter is continued.
    """
    return not rewarded and not getattr(args, "entropy_weight", 0.0) and not (args.beta and continued)


def check_signal(args: GRPOConfig, weights: Sequence[float] | None, *, rewarded: bool) -> None:
    """Refuses a training that nothing teaches, and settings of advantages where only a teacher does.

    Args:
        args: Of the trainer.
        weights: Of its rewards; None: 1 each.
        rewarded: False: no reward was given, and a teacher stands for them.

    Raises:
        RecipeError: Names the argument.
    """
    if weights is not None and not weights:  # TRL says how many there must be
        return
    rewarded = rewarded and (weights is None or counts(weights))
    if not rewarded and not has_teacher(args):
        raise_all(RecipeError, nothing_teaches(weights or (), "reward_weights"))
    raise_all(RecipeError, _single_completion(args, rewarded=rewarded))
    if rewarded:
        return
    names = sometimes_read().union(FIELDS_OF_ADVANTAGES, defaults_of("objective"), ("beta", "loss_type"))
    usual = {field.name: field.default for field in dataclasses.fields(args) if field.name in names}
    row = ALGORITHMS.get(getattr(args, KEY, None) or "")
    given = {name: getattr(args, name) for name in usual}
    raise_all(RecipeError, without_rewards(row, given, usual))


def critic_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Settings of a critic that is not trained, or that cannot be; an estimator that a single completion leaves empty.

    Args:
        args: Before TRL has looked at them.
    """
    row = ADVANTAGES.get(args.advantage_estimator)
    if row is None:  # said elsewhere
        return []
    found = _single_completion(args, rewarded=not has_teacher(args))  # beside a teacher this is known later
    if not row.critic:
        what = f"belongs to a critic, and advantage_estimator {row.name} has none"
        with_critic = " or ".join(name for name, other in ADVANTAGES.items() if other.critic)
        hint = f"advantage_estimator: {with_critic}, or algorithm: ppo"
        vain = [name for name, usual in defaults_of("critic").items() if getattr(args, name) != usual]
        return found + [Mistake(what, name, hint) for name in vain]
    # What it does not go with: it needs a frozen base, run layer by layer as it stands.
    needed = f"advantage_estimator {row.name} trains a critic"
    if 0 < args.max_steps <= args.critic_warmup_steps:
        what = f"the policy waits for {args.critic_warmup_steps} steps, and there are only {args.max_steps}"
        found.append(Mistake(what, "critic_warmup_steps", f"fewer than {args.max_steps}"))
    if args.peft_method == "full" and args.peft_type is None:
        what = f"{needed} on the frozen base, and full trains the base itself"
        found.append(Mistake(what, "peft_method", "any other method, or an algorithm without a critic"))
    if args.fp16:
        found.append(Mistake(f"{needed}, whose loss is not scaled", "fp16", "bf16: true"))
    for name in ("compile_layers", "torch_compile"):
        if getattr(args, name):
            found.append(Mistake(f"{needed} by hooks, which compiled layers may not run", name, "false"))
    return found


def selection_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Settings that the loss does not read, that contradict each other, or that leave no single tokens to select.

    Args:
        args: Before TRL has looked at them.
    """
    row = LOSSES.get(args.loss_type)
    if row is None:  # said elsewhere
        return []
    found = []
    for name in dict.fromkeys(name for other in LOSSES.values() for name in other.fields if train_fields()[name].ours):
        if name not in row.fields and getattr(args, name) != train_fields()[name].default:
            readers = " or ".join(other.name for other in LOSSES.values() if name in other.fields)
            what = f"belongs to {readers}, and loss_type {row.name} does not read it"
            found.append(Mistake(what, name, f"algorithm: {readers}"))
    if row.selection is None:
        return found
    if "cov_low" in row.fields and not args.cov_low < args.cov_high:
        found.append(Mistake(f"must be a number below cov_high {args.cov_high:g}, not {args.cov_low:g}", "cov_low"))
    if args.importance_sampling_level != "token":
        what = (
            f"{args.importance_sampling_level} gives a completion one ratio, and {row.name} treats single tokens apart"
        )
        found.append(Mistake(what, "importance_sampling_level", "token"))
    return found
