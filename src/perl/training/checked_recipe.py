"""A recipe with what can be said against it before anything slow is imported.

RECIPE, SECTION.KEY=VALUE -> Recipe
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.algorithms.registry import load_extensions, loss_mistakes
from perl.methods.base_checks import quantization_mistakes, strategy_mistakes
from perl.methods.settings import method_mistakes
from perl.recipe import Recipe, load_recipe
from perl.recipe.recipe import SectionCheck
from perl.rewards import reward_mistakes


def checked_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str], further: Sequence[SectionCheck] = ()
) -> Recipe:
    """The recipe, checked without torch.

    Args:
        recipe: A file, the name of a packaged one, a mapping, or a recipe.
        overrides: ``section.key=value``.
        further: Checks beside those that need nothing slow.

    Raises:
        RecipeError: With every mistake found.
    """
    load_extensions()
    checks = (loss_mistakes, method_mistakes, quantization_mistakes, strategy_mistakes, reward_mistakes, *further)
    return load_recipe(recipe, overrides, checks)


def with_options(overrides: Sequence[str], engine: Mapping[str, str | None]) -> tuple[str, ...]:
    """The overrides with options of commands that are keys of a recipe's engine, whose values are checked as theirs."""
    return (*overrides, *(f"engine.{key}={value}" for key, value in engine.items() if value is not None))
