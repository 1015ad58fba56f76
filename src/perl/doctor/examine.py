"""Everything that would keep a run from starting here or make it slow, in the order in which a run needs it.

machine, recipe -> findings
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from perl.doctor import machine, software
from perl.doctor.codes import Finding
from perl.errors import PerlError


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
        yield from _look_at_recipe(recipe, overrides)


def _look_at_recipe(recipe: str, overrides: Sequence[str]) -> Iterator[Finding]:
    """A line for each mistake, as a dry run prints them; else its plan, and its servers where it has some."""
    from perl.rollouts.open_engine import check_servers
    from perl.training.forecast import forecast_of
    from perl.training.forecast_text import first_prompt, summary_lines
    from perl.training.prepare import prepare, read_recipe

    try:
        plan = prepare(read_recipe(recipe, overrides))
    except PerlError as error:
        yield from _problems("PRL120", error)
        return
    message = f"{recipe} can be trained: {plan.steps:,} steps of {plan.recipe.batch}; {first_prompt(plan)}"
    yield Finding("PRL120", "ok", message)
    forecast = forecast_of(plan)
    ((_, column),) = forecast.strategies.items()
    lines = [line.partition(" ") for line in summary_lines(forecast)]
    message = "; ".join(f"{name} {rest.strip()}" for name, _, rest in lines)
    fix = "" if column.memory.fits else "`perl plan` compares strategies and sizes"
    yield Finding("PRL122", "ok" if column.memory.fits else "problem", message, fix)
    if not plan.recipe.rollout.capabilities.needs_servers:
        return
    count = plan.recipe.rollout.server_count
    if plan.recipe.rollout.started is not None:
        yield Finding("PRL121", "note", f"{count} servers are started with the run, on its Ray cluster")
        return
    try:
        found = check_servers(plan.recipe.rollout, plan.longest_text, plan.form)
    except PerlError as error:
        yield from _problems("PRL121", error)
        return
    message = f"{len(found)} of {count} answer{'s' if len(found) == 1 else ''}"
    silent = len(found) < count
    yield Finding("PRL121", "note" if silent else "ok", message, "`perl rollout command` starts one" if silent else "")


def _problems(code: str, error: PerlError) -> Iterator[Finding]:
    for mistake in error.mistakes:
        yield Finding(code, "problem", str(mistake))
