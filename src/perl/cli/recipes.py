"""``perl recipes``: what is packaged, one of them to start from, or every setting there is."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perl.cli.output import say
from perl.errors import RecipeError, did_you_mean
from perl.recipe.assets import packaged_recipes
from perl.run.tables import plain_table

if TYPE_CHECKING:
    from perl.recipe.settings_list import Setting

# Of a line, where no terminal says how many characters it has; and at least.
_WIDTH, _LEAST = 100, 60
_COLUMN = 44


@click.command("recipes", short_help="List the packaged recipes, print one, or list every setting.")
@click.argument("name", required=False)
@click.option("--settings", is_flag=True, help="List every key with its default, or say all about the key NAME.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(name: str | None, *, settings: bool, as_json: bool) -> None:
    """List the packaged recipes, or print the recipe NAME to start your own from.

    With --settings, list every setting with its default, or those of NAME: a section, as train, or a key, as
    train.beta, about which everything is printed. `perl new` writes a recipe for your model and data.
    """
    width = max(shutil.get_terminal_size((_WIDTH, 0)).columns, _LEAST)
    if settings:
        _print_settings(name, width, as_json=as_json)
        return
    packaged = packaged_recipes()
    if name is not None:
        if name not in packaged:
            raise RecipeError(f"no recipe named {name!r}", hint=did_you_mean(name, packaged))
        say(packaged[name].read_text(encoding="utf-8"), end="")
        return
    rows = [(key, _first_comment(path)) for key, path in packaged.items()]
    if as_json:
        say(json.dumps([{"name": key, "summary": text} for key, text in rows], indent=2))
        return
    for line in plain_table(rows, (False, False)):
        say(line[:width])


def _print_settings(name: str | None, width: int, *, as_json: bool) -> None:
    from perl.recipe.settings_list import chosen_settings, settings

    found: Iterable[Setting] = settings() if name is None else chosen_settings(name)
    if as_json:
        said = [{"summary": one.text, **asdict(one)} for one in found]
        say(json.dumps([{key: row[key] for key in ("name", "default", "values", "summary")} for row in said], indent=2))
        return
    whole = name is not None and len({one.name.rpartition(".")[2] for one in found}) == 1
    for one in found:
        say("\n".join(one.page(width) if whole else [one.line(width, _COLUMN)]))


def _first_comment(path: Path) -> str:
    """The first line of a recipe's header."""
    line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
