"""What a trainer's arguments say of prompts -> the parts that choose them.

PromptsSection, data -> PromptSelection, sampler
"""

from typing import Any

from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.sections import PromptsSection
from perl.trainer.config import own_setting, prompts_section
from perl.trainer.live import Metrics, Position
from perl.trainer.prompts.choice import ChosenPrompts, PromptChoice, read_ahead
from perl.trainer.prompts.curriculum import Curriculum, difficulties, ranked
from perl.trainer.prompts.memory import PromptMemory
from perl.trainer.prompts.order import ResumableRepeatSampler
from perl.trainer.prompts.refill import Shape
from perl.trainer.prompts.selection import Around, Groups, PromptSelection
from perl.trainer.rollout_source import RolloutSource


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
    groups = args.generation_batch_size // trainer.num_generations
    raise_all(RecipeError, selection_mistakes(section, args, _size(data), groups))
    _check_data(trainer)
    rows, generations = args.per_device_train_batch_size * args.steps_per_generation, trainer.num_generations
    if section.refill and rows % generations:
        what = f"replaces whole groups, and the {rows} completions of a process are no whole groups of {generations}"
        raise RecipeError(what, "prompts.refill", "batches of which each process has whole groups")
    choice = PromptChoice(
        len(data),
        args.seed,
        shuffled=trainer.shuffle_dataset,
        memory=_memory(section, trainer, len(data)),
        curriculum=_curriculum(section, data),
        progress=lambda batch: _progress(trainer, batch),
    )
    return PromptSelection(
        trainer,
        choice,
        data,
        cap=section.refill,
        shape=Shape(
            generations,
            trainer.accelerator.num_processes,
            trainer.accelerator.process_index,
            trainer._tokenizer.pad_token_id,
        ),
        groups=Groups(
            generations,
            trainer.reward_weights.detach().cpu(),
            each=trainer.multi_objective_aggregation == "normalize_then_sum",
        ),
        around=Around(position, metrics, logs=lambda: trainer._logs, end=source.end_training),
    )


def selection_mistakes(section: PromptsSection, args: Any, size: int | None, groups: int) -> list[Mistake]:  # noqa: ANN401
    """What is wrong with a section for a training's arguments and data.

    Args:
        section: Acts.
        args: Of the trainer.
        size: Prompts of the data; None: not known.
        groups: Prompts of a generation batch.
    """
    found = []
    estimator = ADVANTAGES[own_setting(args, "advantage_estimator")]
    if section.refill and (estimator.flat != "0" or estimator.critic or args.num_generations == 1):
        what = f"replaces groups whose rewards agree, from which advantage_estimator: {estimator.name} learns too"
        if args.num_generations == 1:
            what = "replaces groups whose rewards agree, and a single completion is no group"
        found.append(Mistake(what, "prompts.refill", "leave it out"))
    if size is None:
        found.append(
            Mistake("chooses among prompts, and this data set is a stream", "prompts", "a data set with a length")
        )
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
    return ChosenPrompts(sampler, trainer.prompt_selection.choice, epoch)


def _size(data: Any) -> int | None:  # noqa: ANN401 (any data set)
    return len(data) if hasattr(data, "__len__") else None


def _check_data(trainer: GRPOTrainer) -> None:
    """Refuses what makes prompts of its own, or rows that are more than tokens."""
    if trainer.environment_factories is not None:
        raise RecipeError("chooses the data's prompts, and an environment makes its own", "prompts", "leave it out")
    if trainer._is_vlm:
        raise RecipeError("exchanges rows of tokens, and these have images", "prompts", "a model of text")


def _memory(section: PromptsSection, trainer: GRPOTrainer, size: int) -> PromptMemory | None:
    if not section.memory:
        return None
    lag = read_ahead(trainer.args, own_setting(trainer.args, "rollout_prefetch"))
    return PromptMemory(size, explore=section.explore, floor=section.floor, lag=lag)


def _curriculum(section: PromptsSection, data: Any) -> Curriculum | None:  # noqa: ANN401
    if section.curriculum is None:
        return None
    numbers_N = difficulties(data.column_names, section.curriculum, data.__getitem__, "prompts.curriculum")
    return Curriculum(ranked(numbers_N), section.curriculum_start, section.curriculum_until)


def _progress(trainer: GRPOTrainer, batch: int) -> float:
    """Share of a training that is behind when a generation batch is made."""
    args = trainer.args
    each = args.steps_per_generation * args.num_iterations
    steps = args.max_steps if args.max_steps > 0 else trainer.state.max_steps
    return batch * each / max(1, steps * args.gradient_accumulation_steps)
