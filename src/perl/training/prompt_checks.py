"""How many steps a run takes of its prompts, and whether they can be chosen as its recipe says.

data, arguments -> steps; PromptsSection, data -> mistakes, completions at most
"""

from datasets import Dataset

from perl.errors import DataError, RecipeError, raise_all
from perl.recipe import Recipe
from perl.recipe.sections import PromptsSection
from perl.trainer.config import PeftRLConfig
from perl.trainer.live import generation_interval
from perl.trainer.prompts.curriculum import difficulties
from perl.trainer.prompts.making import choice_mistakes
from perl.trainer.prompts.refill import extra_prompts


def steps_of(train: Dataset, arguments: PeftRLConfig, recipe: Recipe) -> int:
    """Optimizer steps, as transformers counts them.

    Raises:
        DataError: There are too few problems for a step, or a curriculum's column is absent or holds no numbers.
        RecipeError: Prompts cannot be chosen so.
    """
    prompts_per_generation = arguments.generation_batch_size // arguments.num_generations
    batches = len(train) // prompts_per_generation
    if batches == 0:
        raise DataError(
            f"{len(train)} training problems are too few for a step of {prompts_per_generation} prompts",
            "data.train",
            f"set train.prompts_per_step to {len(train)} or less",
        )
    _check_choice(train, arguments, recipe.prompts, recipe.batch.world_size)
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    micro_batches = batches * generation_interval(arguments)
    steps_per_epoch = max(1, -(-micro_batches // recipe.batch.gradient_accumulation_steps))
    return int(-(-arguments.num_train_epochs * steps_per_epoch // 1))


def most_completions(section: PromptsSection, arguments: PeftRLConfig, processes: int) -> int:
    """Of a batch of rollouts, with all that a refill may sample."""
    groups = arguments.generation_batch_size // arguments.num_generations
    return int((groups + extra_prompts(section.refill, groups, processes)) * arguments.num_generations)


def _check_choice(train: Dataset, arguments: PeftRLConfig, section: PromptsSection, processes: int) -> None:
    """Refuses what the trainer would refuse, before a model is loaded."""
    if not section.acts:
        return
    raise_all(RecipeError, choice_mistakes(section, arguments, len(train), processes))
    if section.curriculum is not None:
        difficulties(train.column_names, section.curriculum, train.__getitem__, "prompts.curriculum")
