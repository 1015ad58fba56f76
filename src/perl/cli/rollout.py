"""``perl rollout``: how to start the vLLM server that a recipe needs, and whether those that run are compatible."""

import json

import click

from perl.cli.output import say, set_up_output


@click.group("rollout", short_help="Print how to start a recipe's vLLM servers, or check those that run.")
def command() -> None:
    """Print how to start the vLLM servers that a recipe samples from, or check those that run."""


@command.command("command", short_help="Print the command that starts a server for RECIPE.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the server.")
def print_command(recipe: str, overrides: tuple[str, ...], port: int) -> None:
    """Print the command that starts a stock vLLM server for RECIPE, to be run where the server shall be.

    Reads the recipe, its data and the model's config; loads no weights.
    """
    set_up_output(quiet=True)
    from perl.training.stages import prepare, read_recipe

    plan = prepare(read_recipe(recipe, overrides), engine_here=False)
    say(plan.server_command(port, on_cpu=plan.recipe.engine.device == "cpu"))


@command.command("check", short_help="Check whether RECIPE's servers are compatible.")
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
    from perl.training.stages import prepare, read_recipe

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
