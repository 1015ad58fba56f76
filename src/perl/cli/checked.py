"""A recipe of the command line, with what can be said against it before anything slow is imported.

RECIPE, SECTION.KEY=VALUE, --processes, --strategy -> Recipe
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perl.recipe import Recipe


def with_options(overrides: Sequence[str], processes: str | None, strategy: str | None) -> tuple[str, ...]:
    """The overrides with the two options that are keys of a recipe, whose values are checked as theirs."""
    asked = {"engine.processes": processes, "engine.strategy": strategy}
    return (*overrides, *(f"{key}={value}" for key, value in asked.items() if value is not None))


def checked_recipe(recipe: str, overrides: Sequence[str]) -> "Recipe":
    """The recipe, checked without torch.

    Raises:
        RecipeError: With every mistake found.
    """
    from perl.algorithms.registry import loss_mistakes
    from perl.methods.on_quantised import quantization_mistakes
    from perl.methods.on_shards import strategy_mistakes
    from perl.methods.settings import method_mistakes
    from perl.recipe import load_recipe
    from perl.rewards import reward_mistakes

    checks = (loss_mistakes, method_mistakes, quantization_mistakes, strategy_mistakes, reward_mistakes)
    return load_recipe(recipe, overrides, checks)
