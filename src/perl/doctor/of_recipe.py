"""What of a recipe would keep it from starting here: everything a dry run refuses, its memory, its servers.

recipe -> findings
"""

from collections.abc import Iterator, Sequence

from perl.doctor.finding import Finding
from perl.errors import PerlError
from perl.training.forecast_text import summary_lines
from perl.training.plan import Plan
from perl.training.question import forecast_of
from perl.training.stages import prepare, read_recipe


def look_at_recipe(recipe: str, overrides: Sequence[str]) -> Iterator[Finding]:
    """A line for each mistake, as a dry run prints them; else its plan, and its servers where it has some.

    Args:
        recipe: A file or the name of a packaged one.
        overrides: As on the command line.
    """
    try:
        plan = prepare(read_recipe(recipe, overrides))
    except PerlError as error:
        for mistake in error.mistakes:
            yield Finding("PRL120", "problem", str(mistake))
        return
    yield Finding("PRL120", "ok", f"{recipe} can be trained: {plan.steps:,} steps of {plan.recipe.batch}")
    forecast = forecast_of(plan)
    ((_, column),) = forecast.strategies.items()
    lines = [line.partition(" ") for line in summary_lines(forecast)]
    message = "; ".join(f"{name} {rest.strip()}" for name, _, rest in lines)
    fix = "" if column.memory.fits else "`perl plan` compares strategies and sizes"
    yield Finding("PRL122", "ok" if column.memory.fits else "problem", message, fix)
    if plan.recipe.rollout.capabilities.needs_servers:
        yield from _servers(plan)


def _servers(plan: Plan) -> Iterator[Finding]:
    from perl.rollouts.open_engine import check_servers

    count = plan.recipe.rollout.server_count
    if plan.recipe.rollout.started is not None:
        yield Finding("PRL121", "note", f"{count} servers are started with the run, on its Ray cluster")
        return
    try:
        found = check_servers(plan.recipe.rollout, plan.longest_text, plan.form)
    except PerlError as error:
        for mistake in error.mistakes:
            yield Finding("PRL121", "problem", str(mistake))
        return
    message = f"{len(found)} of {count} answer{'s' if len(found) == 1 else ''}"
    silent = len(found) < count
    yield Finding("PRL121", "note" if silent else "ok", message, "`perl rollout command` starts one" if silent else "")
