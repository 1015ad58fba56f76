"""What a trainer's arguments say of prompts -> the parts that choose them.

PromptsSection, data -> PromptSelection, sampler
"""

from typing import Any

from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import KL_IN_REWARD, off_reward
from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.sections import PromptsSection
from perl.trainer.arguments.config import own_setting, prompts_section
from perl.trainer.arguments.signal_checks import has_teacher
from perl.trainer.live import Position, generation_interval
from perl.trainer.prompts.chances import Curriculum, PromptMemory, difficulties, ranked
from perl.trainer.prompts.choice import ChosenPrompts, PromptChoice, read_ahead
from perl.trainer.prompts.order import ResumableRepeatSampler
from perl.trainer.prompts.selection import PromptSelection
from perl.trainer.sampling.rollout_source import RolloutSource


def made_selection(trainer: GRPOTrainer, position: Position, source: RolloutSource) -> PromptSelection | None:
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
    if trainer.environment_factories is not None:
        raise RecipeError("cannot be combined with environment_factory, which makes prompts", "prompts", "leave it out")
    if trainer._is_vlm:
        raise RecipeError("exchanges rows of tokens, and these have images", "prompts", "a model of text")
    memory = curriculum = None
    if section.memory:
        lag = read_ahead(args, own_setting(args, "rollout_prefetch"))
        memory = PromptMemory(len(data), explore=section.explore, floor=section.floor, lag=lag)
    if section.curriculum is not None:
        numbers_N = difficulties(data.column_names, section.curriculum, data.__getitem__, "prompts.curriculum")
        least = args.generation_batch_size // trainer.num_generations
        curriculum = Curriculum(ranked(numbers_N), section.curriculum_start, section.curriculum_until, least)

    def progress(batch: int) -> float:
        steps = args.max_steps if args.max_steps > 0 else trainer.state.max_steps
        return batch * generation_interval(args) / max(1, steps * args.gradient_accumulation_steps)

    shuffled = trainer.shuffle_dataset
    choice = PromptChoice(
        len(data), args.seed, shuffled=shuffled, memory=memory, curriculum=curriculum, progress=progress
    )
    return PromptSelection(trainer, position, source, choice)


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


def _teaches_too(args: Any) -> str:  # noqa: ANN401
    """What a group without variance teaches by, beside a KL term of the loss; empty: by nothing."""
    estimator = ADVANTAGES[own_setting(args, "advantage_estimator")]
    if estimator.flat != "0":
        return f"advantage_estimator: {estimator.name}"
    if off_reward(vars(args)):
        return KL_IN_REWARD
    return "a teacher" if has_teacher(args) else ""
