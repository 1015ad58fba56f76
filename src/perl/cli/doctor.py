"""``perl doctor``, ``explain``, ``plan`` and ``rollout``: what a run needs, and what keeps it from starting here."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from perl.doctor.codes import Finding
from typing import Any

from perl.recipe.sections import STRATEGIES

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command("doctor", short_help="Look at this machine, and at a recipe: what is missing, what is slow.")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(recipe: str | None, overrides: tuple[str, ...], *, as_json: bool) -> int:
    """Look at versions, devices, vLLM, the Hub, folders, cores and threads; with RECIPE also at what it needs.

    A line for each finding, with what to do about it. Exits with 1 if there is a problem.
    """
    set_up_output(quiet=True)
    from perl.doctor.examine import examine

    findings: list[Finding] = []
    for finding in examine(recipe, overrides, Path("runs")):
        findings.append(finding)
        if not as_json:
            say(str(finding), colour=_COLOURS[finding.level])
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        say("`perl explain CODE` says more of a line")
    return EXIT_FAILED if any(finding.level == "problem" for finding in findings) else EXIT_DONE


@click.command("explain", short_help="Explain the code of a line, as PRL108.")
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Print what CODE means, why it matters, an example and what to do; without CODE all of them, a line each."""
    from perl.doctor.codes import codes, explained, find_code

    if code is None:
        say("\n".join(f"{row.name}  {row.title}" for row in codes().values()))
        return
    row = find_code(code)
    say(f"{row.name}: {row.title}\n\n{explained(row)}".rstrip())


@click.command("plan", short_help="Print what a run needs and takes: memory, FLOPs, seconds.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--processes", metavar="N", help="That train, one a GPU (engine.processes).")
@click.option("--per-node", type=click.IntRange(1), help="Of them on each node [default: up to 8; on a CPU all].")
@click.option("--gpu", help="What each process has: T4, L4, A10, RTX 4090, A100, H100, H200, gigabytes as 24, or CPU.")
@click.option(
    "--strategy",
    metavar="|".join(STRATEGIES),
    help="engine.strategy [default: both are compared, unless it is set].",
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
def plan(
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

    overrides = with_options(overrides, {"processes": processes, "strategy": strategy})
    checked_recipe(recipe, overrides)
    from perl.training.hardware import hardware_named

    if asked["gpu"] is not None:
        hardware_named(asked["gpu"])
    from perl.training.forecast import answer
    from perl.training.forecast_text import forecast_lines, forecast_values
    from perl.training.prepare import read_recipe

    forecast = answer(read_recipe(recipe, overrides), **asked)
    if as_json:
        say(json.dumps(forecast_values(forecast), indent=2))
        return
    say("\n".join(forecast_lines(forecast)))


@click.group("rollout", short_help="Print how to start a recipe's vLLM servers, or check those that run.")
def rollout() -> None:
    """Print how to start the vLLM servers that a recipe samples from, or check those that run."""


@rollout.command("command", short_help="Print the command that starts a server for RECIPE.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the server.")
def print_command(recipe: str, overrides: tuple[str, ...], port: int) -> None:
    """Print the command that starts a stock vLLM server for RECIPE, to be run where the server shall be.

    Reads the recipe, its data and the model's config; loads no weights.
    """
    set_up_output(quiet=True)
    from perl.training.prepare import prepare, read_recipe

    plan = prepare(read_recipe(recipe, overrides), engine_here=False)
    say(plan.server_command(port, on_cpu=plan.recipe.engine.device == "cpu"))


@rollout.command("check", short_help="Check whether RECIPE's servers are compatible.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON.")
def check(recipe: str, overrides: tuple[str, ...], *, as_json: bool) -> None:
    """Ask the servers of RECIPE for their version, model and longest text, and whether they can be given an adapter.

    That a server answers like the policy is proven when training begins.
    """
    set_up_output(quiet=True)
    from perl.errors import RecipeError
    from perl.rollouts.open_engine import check_servers
    from perl.training.prepare import prepare, read_recipe

    plan = prepare(read_recipe(recipe, overrides))
    if not plan.recipe.rollout.capabilities.needs_servers:
        raise RecipeError("names no servers", "rollout.servers", "backend: vllm-server, servers: [URL, ...]")
    found = check_servers(plan.recipe.rollout, plan.longest_text, plan.form)
    if as_json:
        say(json.dumps(found, indent=2))
        return
    for server in found:
        what = f"vLLM {server['version']}, serves {server['base_name']}"
        say(f"{server['url']}  {what}, up to {server['longest']} tokens ({plan.longest_text} are needed)")
    silent = plan.recipe.rollout.server_count - len(found)
    if silent:
        say(f"{silent} of the recipe's servers do not answer")
