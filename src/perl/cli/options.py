"""Options of the command line that are keys of a recipe.

SECTION.KEY=VALUE, --processes, --strategy -> overrides
"""

from collections.abc import Sequence


def with_options(overrides: Sequence[str], processes: str | None, strategy: str | None) -> tuple[str, ...]:
    """The overrides with the two options that are keys of a recipe, whose values are checked as theirs."""
    asked = {"engine.processes": processes, "engine.strategy": strategy}
    return (*overrides, *(f"{key}={value}" for key, value in asked.items() if value is not None))
