"""Everything that is looked at, in the order in which a run needs it.

machine, recipe -> findings
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from perl.doctor import machine, software
from perl.doctor.finding import Finding


def examine(recipe: str | None, overrides: Sequence[str], runs: Path) -> Iterator[Finding]:
    """All findings, one after the other.

    Args:
        recipe: A file or the name of a packaged one; None: the machine alone.
        overrides: Of the recipe.
        runs: Where runs are written.
    """
    yield from software.look_at_versions()
    yield from software.look_at_extras()
    yield from software.look_at_vllm()
    yield from machine.look_at_accelerator()
    yield from machine.look_at_cores()
    yield from machine.look_at_memory()
    yield from machine.look_at_folders(runs)
    yield from software.look_at_hub()
    if recipe is not None:
        from perl.doctor.of_recipe import look_at_recipe

        yield from look_at_recipe(recipe, overrides)
