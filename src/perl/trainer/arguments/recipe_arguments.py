"""A recipe as the trainer's arguments.

Recipe -> PeftRLConfig
"""

import re

from perl.algorithms.named import KEY
from perl.errors import PerlError, RecipeError
from perl.recipe import Recipe
from perl.recipe.recipe import world_size
from perl.recipe.sections import FIELD_OF_SETTING
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.arguments.derived_fields import APPLIED


def training_arguments(recipe: Recipe, output_dir: str) -> PeftRLConfig:
    """The trainer's arguments of a recipe.

    Args:
        recipe: Of the run.
        output_dir: Where checkpoints go.

    Raises:
        RecipeError: TRL or transformers refuse a combination of fields.
    """
    generations = recipe.batch.num_generations
    stands_for = recipe.batch.world_size // world_size()  # processes: a plan is made by one before there are several
    derived = {
        "num_generations": generations,
        "per_device_train_batch_size": recipe.batch.per_device_train_batch_size * max(1, stands_for),
        "gradient_accumulation_steps": recipe.batch.gradient_accumulation_steps,
        "reward_weights": [setting.weight for setting in recipe.rewards.values()],
        "use_cpu": recipe.engine.device == "cpu",
        "strategy": recipe.engine.strategy,
        "disable_tqdm": True,
        **{
            FIELD_OF_SETTING[section, name]: value
            for section in ("peft", "rollout", "teacher", "prompts")
            for name, value in getattr(recipe, section).model_dump().items()
        },
        "rollout_sync_folder": recipe.rollout.sync_folder or str(recipe.output_dir / "sync"),
    }
    asked = {name: value for name, value in recipe.train.items() if name != "prompts_per_step"}
    asked |= {KEY: recipe.algorithm, APPLIED: recipe.algorithm}  # whose fields are in train
    # A group must not be split between evaluation batches.
    rows = generations if generations > 1 else recipe.batch.per_device_train_batch_size
    # Trackers name a run after its folder, in a project that is named after the recipe.
    tracked_as = {"run_name": recipe.output_dir.resolve().name, "project": recipe.name}
    defaults = {"per_device_eval_batch_size": rows, **tracked_as}
    try:
        arguments = PeftRLConfig(**{**defaults, **asked, **derived, "output_dir": output_dir})
    except PerlError as error:
        fields = PeftRLConfig.__dataclass_fields__
        places = {name: f"train.{name}" for name in fields}
        places |= {"strategy": "engine.strategy", "peft_method": "peft.method"}
        mirrored = ("teacher", "prompts")
        places |= {name: f"{part}.{key}" for (part, key), name in FIELD_OF_SETTING.items() if part in mirrored}
        raise error.moved(lambda where: places.get(where, where)) from None
    except (ValueError, TypeError) as error:
        named = [name for name in asked if re.search(rf"\b{name}\b", str(error))]
        raise RecipeError(str(error), ".".join(["train", *named[:1]])) from error
    arguments.of_a_recipe = True  # whose plan says what is trained
    return arguments
