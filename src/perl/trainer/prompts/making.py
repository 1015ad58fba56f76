"""What a trainer's arguments say of prompts -> the parts that choose them.

PromptsSection, data -> PromptSelection, sampler
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import KL_IN_REWARD, off_reward
from perl.algorithms.registry import function_at
from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.sections import PromptsSection
from perl.trainer.arguments.argument_checks import has_teacher
from perl.trainer.arguments.config import own_setting, prompts_section
from perl.trainer.live import Metrics, Position, generation_interval
from perl.trainer.prompts.choice import ChosenPrompts, PromptChoice, read_ahead
from perl.trainer.prompts.curriculum import Curriculum, difficulties, ranked
from perl.trainer.prompts.memory import PromptMemory
from perl.trainer.prompts.order import ResumableRepeatSampler
from perl.trainer.prompts.refill import BatchLayout
from perl.trainer.prompts.selection import PromptSelection, RewardGroups, SelectionHooks
from perl.trainer.sampling.rollout_source import RolloutSource


def made_selection(
    trainer: GRPOTrainer, position: Position, metrics: Metrics, source: RolloutSource
) -> PromptSelection | None:
    """What selects a trainer's prompts; None: they come in TRL's order.

    Raises:
        RecipeError: The settings do not fit the training.
        DataError: The column of a curriculum is absent, or holds something else than numbers.
    """
    section, args, data = prompts_section(trainer.args), trainer.args, trainer.train_dataset
    if not section.acts:
        return None
    size = len(data) if hasattr(data, "__len__") else None
    raise_all(RecipeError, choice_mistakes(section, args, size, trainer.accelerator.num_processes))
    _check_data(trainer)
    generations = trainer.num_generations
    choice = PromptChoice(
        len(data),
        args.seed,
        shuffled=trainer.shuffle_dataset,
        memory=_memory(section, trainer, len(data)),
        curriculum=_curriculum(section, data, args.generation_batch_size // trainer.num_generations),
        progress=lambda batch: _progress(trainer, batch),
    )
    return PromptSelection(
        trainer,
        choice,
        data,
        cap=section.refill,
        shape=BatchLayout(
            generations,
            trainer.accelerator.num_processes,
            trainer.accelerator.process_index,
            trainer._tokenizer.pad_token_id,
        ),
        groups=RewardGroups(
            generations,
            trainer.reward_weights.detach().cpu(),
            each=trainer.multi_objective_aggregation == "normalize_then_sum",
            advantages=_advantages(own_setting(args, "advantage_estimator")),
        ),
        hooks=SelectionHooks(position, metrics, logs=lambda: trainer._logs, end=source.end_training),
    )


def choice_mistakes(
    section: PromptsSection,
    args: Any,  # noqa: ANN401 (TRL's or ours)
    size: int | None,
    processes: int,
) -> list[Mistake]:
    """What is wrong with a section for a training's arguments and data.

    Args:
        section: Acts.
        args: Of the trainer.
        size: Prompts of the data; None: not known.
        processes: That the training has.
    """
    found, generations = [], args.num_generations
    groups = args.generation_batch_size // generations
    rows = args.generation_batch_size // processes
    for key, does in (("refill", "replaces"), ("memory", "rests prompts of")):
        if not getattr(section, key):
            continue
        if generations == 1:
            what = f"{does} groups whose rewards agree, and a single completion is no group"
            found.append(Mistake(what, f"prompts.{key}", "leave it out"))
        elif taught_by := _teaches_too(args):
            what = f"{does} groups whose rewards agree, from which {taught_by} learns too"
            found.append(Mistake(what, f"prompts.{key}", "leave it out"))
    if section.refill and rows % generations:
        what = f"replaces whole groups, and the {rows} completions of a process are no whole groups of {generations}"
        found.append(Mistake(what, "prompts.refill", "batches of which each process has whole groups"))
    if args.ignore_data_skip:
        what = "starts the data again on resume, which chosen prompts cannot"
        found.append(Mistake(what, "ignore_data_skip", "leave it out"))
    if size is None:
        what = "chooses among prompts, and this data set is a stream"
        found.append(Mistake(what, "prompts", "a data set with a length"))
    elif size <= groups:
        what = f"chooses among {size} prompts, and a generation batch takes {groups}: there is nothing to choose"
        found.append(Mistake(what, "prompts", "more prompts, or a lower prompts_per_step"))
    return found


def sampler_of(trainer: GRPOTrainer, sampler: Sampler[int]) -> Sampler[int]:
    """TRL's sampler as one that can start in any epoch, or that takes chosen prompts; a subclass's own stays."""
    if type(sampler) is not RepeatSampler:
        if trainer.prompt_selection is not None:
            what = "chooses prompts, and this trainer has a sampler of its own"
            raise RecipeError(what, "prompts", "leave prompts out, or _get_train_sampler as it is")
        return sampler

    def epoch() -> int:
        return int(trainer.state.epoch or 0)

    if trainer.prompt_selection is None:
        return ResumableRepeatSampler(sampler, epoch_of=epoch)
    return ChosenPrompts(sampler, epoch, trainer.prompt_selection.choice)


def _check_data(trainer: GRPOTrainer) -> None:
    """Refuses what makes prompts of its own, or rows that are more than tokens."""
    if trainer.environment_factories is not None:
        raise RecipeError("cannot be combined with environment_factory, which makes prompts", "prompts", "leave it out")
    if trainer._is_vlm:
        raise RecipeError("exchanges rows of tokens, and these have images", "prompts", "a model of text")


def _teaches_too(args: Any) -> str:  # noqa: ANN401
    """What a group without variance teaches by, beside a KL term of the loss; empty: by nothing."""
    estimator = ADVANTAGES[own_setting(args, "advantage_estimator")]
    if estimator.flat != "0":
        return f"advantage_estimator: {estimator.name}"
    if off_reward(vars(args)):
        return KL_IN_REWARD
    return "a teacher" if has_teacher(args) else ""


def _advantages(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Of an estimator that has groups without a signal though their rewards differ; None: of one that reads more."""
    estimator = ADVANTAGES[name]
    return function_at(estimator.function) if not estimator.reads else None


def _memory(section: PromptsSection, trainer: GRPOTrainer, size: int) -> PromptMemory | None:
    if not section.memory:
        return None
    lag = read_ahead(trainer.args, own_setting(trainer.args, "rollout_prefetch"))
    return PromptMemory(size, explore=section.explore, floor=section.floor, lag=lag)


def _curriculum(section: PromptsSection, data: Any, least: int) -> Curriculum | None:  # noqa: ANN401
    if section.curriculum is None:
        return None
    numbers_N = difficulties(data.column_names, section.curriculum, data.__getitem__, "prompts.curriculum")
    return Curriculum(ranked(numbers_N), section.curriculum_start, section.curriculum_until, least)


def _progress(trainer: GRPOTrainer, batch: int) -> float:
    """Share of a training that is behind when a generation batch is made."""
    args = trainer.args
    each = generation_interval(args)
    steps = args.max_steps if args.max_steps > 0 else trainer.state.max_steps
    return batch * each / max(1, steps * args.gradient_accumulation_steps)
