"""``perl plan``: what a run costs in memory, FLOPs and time, before it is paid for."""

import json
from typing import Any

import click

from perl.cli.output import say, set_up_output
from perl.recipe.sections import STRATEGIES


@click.command("plan", short_help="Print what a run needs and takes: memory, FLOPs, seconds.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--processes", metavar="N", help="That train, one a GPU (engine.processes).")
@click.option("--gpu", help="What each process has: T4, L4, A10, RTX 4090, A100, H100, H200, gigabytes as 24, or CPU.")
@click.option("--memory", type=click.FloatRange(0, min_open=True), help="Its gigabytes, as it is sold.")
@click.option(
    "--strategy",
    metavar="|".join(STRATEGIES),
    help="engine.strategy [default: all three are compared, unless it is set].",
)
@click.option(
    "--completion-tokens",
    "completion",
    type=click.IntRange(1),
    help="Of a completion on average [default: half of the most].",
)
@click.option("--run", type=click.Path(), help="Folder of an earlier run, whose completions' lengths are taken.")
@click.option("--measure", "measured", is_flag=True, help="Run a few passes here, and plan with what they reach.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    processes: str | None,
    strategy: str | None,
    as_json: bool,
    **asked: Any,  # noqa: ANN401 (the fields of a Question)
) -> None:
    """Print what RECIPE costs on so many processes, before it is paid for; no weights are loaded.

    Numbers are derived from the model's config and the prompts. Seconds are a wide range, from data sheets; with
    --measure they are of what the hardware at hand reaches.
    """
    set_up_output(quiet=True)
    from perl.training.checked_recipe import checked_recipe, with_options

    overrides = with_options(overrides, processes, strategy)
    checked_recipe(recipe, overrides)
    from perl.training.hardware import hardware_named

    if asked["gpu"] is not None:
        hardware_named(asked["gpu"], asked["memory"])
    from perl.training.forecast import Question, answer
    from perl.training.forecast_text import forecast_lines, forecast_values
    from perl.training.stages import read_recipe

    forecast = answer(read_recipe(recipe, overrides), Question(**asked))
    if as_json:
        say(json.dumps(forecast_values(forecast), indent=2))
        return
    say("\n".join(forecast_lines(forecast)))
