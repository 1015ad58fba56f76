"""``perl recipes``: what is packaged, one of them to start from, or every setting there is."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from perl.cli.output import say
from perl.errors import RecipeError, did_you_mean
from perl.recipe.assets import packaged_recipes
from perl.run.tables import plain_table


@click.command("recipes", short_help="List the packaged recipes, print one, or list every setting.")
@click.argument("name", required=False)
@click.option("--settings", is_flag=True, help="List every section and key with its default and meaning.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(name: str | None, *, settings: bool, as_json: bool) -> None:
    """List the packaged recipes, or print the recipe NAME to start your own from."""
    packaged = packaged_recipes()
    if name is not None:
        if name not in packaged:
            raise RecipeError(f"no recipe named {name!r}", hint=did_you_mean(name, packaged))
        say(packaged[name].read_text(encoding="utf-8"), end="")
        return
    rows = list(_settings()) if settings else [(key, _first_comment(path)) for key, path in packaged.items()]
    if as_json:
        say(json.dumps([{"name": key, "summary": text} for key, text in rows], indent=2))
        return
    columns = max(shutil.get_terminal_size().columns, 60) if sys.stdout.isatty() else None
    for line in plain_table(rows, (False, False)):
        say(line[:columns])


def _first_comment(path: Path) -> str:
    """The first line of a recipe's header."""
    line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _settings() -> Iterator[tuple[str, str]]:
    """Key and sentence of every setting, from where it is defined."""
    from perl.algorithms.named import KEY
    from perl.recipe.section import Section
    from perl.recipe.sections import FIELD_OF_SETTING, SECTIONS, Columns, DataSource, RewardSetting
    from perl.recipe.train_fields import REFUSED, train_fields

    yield "extends", "A recipe file or a packaged recipe whose settings this one changes."
    yield KEY, " ".join(train_fields()[KEY].help.split())
    models: dict[str, type[Section]] = {
        **SECTIONS,
        "data.train": DataSource,
        "data.train.columns": Columns,
        "rewards.NAME": RewardSetting,
    }
    for section, model in models.items():
        for key, field in model.model_fields.items():
            default = "" if field.is_required() or field.default in (None, {}) else f" [{field.default}]"
            yield f"{section}.{key}", f"{field.description}{default if len(default) < 40 else ''}"
    elsewhere = {KEY, *FIELD_OF_SETTING.values()}
    for name, known in train_fields().items():
        if name not in REFUSED and name not in elsewhere:
            yield f"train.{name}", " ".join(known.help.split())
