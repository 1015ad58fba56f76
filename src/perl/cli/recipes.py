"""``perl recipes``: what is packaged, or one of them to start from."""

import json
import shutil
from pathlib import Path

import click

from perl.assets import packaged_recipes
from perl.errors import RecipeError, did_you_mean


@click.command("recipes", short_help="List the packaged recipes, or print one.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(name: str | None, *, as_json: bool) -> None:
    """List the packaged recipes, or print the recipe NAME to start your own from."""
    packaged = packaged_recipes()
    if name is not None:
        if name not in packaged:
            raise RecipeError(f"no recipe named {name!r}", hint=did_you_mean(name, packaged))
        click.echo(packaged[name].read_text(encoding="utf-8"), nl=False)
        return
    summaries = {key: _first_comment(path) for key, path in packaged.items()}
    if as_json:
        click.echo(json.dumps([{"name": key, "summary": text} for key, text in summaries.items()], indent=2))
        return
    width = max(len(key) for key in summaries)
    columns = shutil.get_terminal_size((110, 24)).columns
    for key, text in summaries.items():
        click.echo(f"{key:{width}}  {text}"[: max(columns, 60)])


def _first_comment(path: Path) -> str:
    """The first line of a recipe's header."""
    line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
