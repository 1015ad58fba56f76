"""``perl recipes``: what is packaged, or every setting there is; ``perl new``: a recipe for a model, data and a GPU."""

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perl.cli.output import say, set_up_output
from perl.errors import PerlError, RecipeError, did_you_mean
from perl.recipe.assets import packaged_recipes
from perl.run.tables import plain_table

if TYPE_CHECKING:
    from perl.recipe.settings_list import Setting

# Of a line, where no terminal says how many characters it has; and at least.
_WIDTH, _LEAST = 100, 60
_COLUMN = 44


@click.command("recipes", short_help="List the packaged recipes, print one, or list every setting.")
@click.argument("name", required=False)
@click.option("--search", metavar="WORDS", help="List the recipes whose name or text has all these words.")
@click.option("--settings", is_flag=True, help="List every key with its default, or say all about the key NAME.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(name: str | None, search: str | None, *, settings: bool, as_json: bool) -> None:
    """List the packaged recipes, those of the folder NAME, or print the recipe NAME to start your own from.

    With --settings, list every setting with its default, or those of NAME: a section, as train, or a key, as
    train.beta, about which everything is printed. `perl new` writes a recipe for your model and data.
    """
    width = max(shutil.get_terminal_size((_WIDTH, 0)).columns, _LEAST)
    if settings:
        if search is not None:
            raise click.UsageError("--search looks through recipes, not through settings: --settings WORD finds those")
        _print_settings(name, width, as_json=as_json)
        return
    packaged = packaged_recipes()
    if name in packaged and search is None:
        say(packaged[name].read_text(encoding="utf-8"), end="")
        return
    chosen = _chosen(packaged, name, search)
    rows = [(key, _first_comment(path)) for key, path in chosen.items()]
    if as_json:
        listed = [{"name": key, "folder": key.rpartition("/")[0], "summary": text} for key, text in rows]
        say(json.dumps(listed, indent=2))
        return
    if name is None and search is None:
        folders = _folders(packaged)
        rows = [row for row in rows if "/" not in row[0]] + [
            (f"{folder}/", f"{len(paths)} recipes: {_first_comment(paths[0])}") for folder, paths in folders.items()
        ]
    for line in plain_table(rows, (False, False)):
        say(line[:width] if sys.stdout.isatty() else line)


def _chosen(packaged: dict[str, Path], name: str | None, words: str | None) -> dict[str, Path]:
    """The recipe of this name or those in a folder, of these those whose name or text has every word."""
    folder = f"{name.rstrip('/')}/" if name is not None else ""
    found = {key: path for key, path in packaged.items() if key.startswith(folder) or key == name}
    if name is not None and not found:
        near = did_you_mean(name, [*packaged, *_folders(packaged)])
        raise RecipeError(f"no recipe named {name!r}", hint=near or f"`perl recipes --search {name}` reads their texts")
    texts = {key: f"{key}\n{path.read_text(encoding='utf-8')}".lower() for key, path in found.items() if words}
    for word in (words or "").lower().split():
        found = {key: path for key, path in found.items() if word in texts[key]}
    if not found:
        raise RecipeError(f"no recipe has {words!r} in its name or text", hint="`perl recipes` lists them all")
    return found


def _folders(packaged: dict[str, Path]) -> dict[str, list[Path]]:
    """Folder -> its recipes, what the others extend first: its summary is the folder's."""
    found: dict[str, list[Path]] = {}
    for key, path in packaged.items():
        folder, slash, rest = key.partition("/")
        if slash:
            paths = found.setdefault(folder, [])
            paths.insert(0 if rest == "base" else len(paths), path)
    return found


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


_NEW_OPTIONS = {
    "data.train.columns.prompt": "--prompt",
    "data.train.columns.answer": "--answer",
    "data.train.subset": "--subset",
    "data.train": "--data",
    "data.eval": "--eval",
    "model": "--model",
    "rewards": "--reward",
    "agent": "--environment",
    "gpu": "--gpu",
}


@click.command("new", short_help="Write a commented recipe for your model, data and GPU.")
@click.option("--model", required=True, help="Hub id, folder, or sandbox:base.")
@click.option("--data", required=True, help="sandbox:TASK, a .jsonl, .json, .csv or .parquet file, or a Hub data set.")
@click.option("--subset", help="Of a Hub data set's configurations.")
@click.option(
    "--eval",
    "held_out",
    help="Held-out problems, or 20% of --data [default: the Hub data set's split test, or 10%].",
)
@click.option("--prompt", help="Column of the question [default: prompt, question, problem, ...].")
@click.option("--answer", help="Column of the gold answer [default: answer, solution, ...].")
@click.option("--reward", multiple=True, help="A reward's name, or my_rewards:score; repeatable [default: accuracy].")
@click.option(
    "--environment", help="FILE.py or FILE.py:Class, whose methods are tools; one that is not there is begun."
)
@click.option("--gpu", help="T4, L4, A10, RTX 4090, A100, H100, H200, gigabytes as 24, or cpu [default: what is here].")
@click.option("-o", "--output", default="recipe.yaml", show_default=True, help="File to write.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def new(*, data: str, subset: str | None, held_out: str | None, **given: Any) -> None:  # noqa: ANN401 (the others)
    """Write a commented recipe for your model, data and GPU, of sizes that fit by the estimates of `perl plan`.

    Nothing is written before data and model have been read and the recipe has passed a dry run's checks.
    """
    set_up_output(quiet=False)
    from perl.training.new_recipe import new_recipe

    train = {"name": data, **({"subset": subset} if subset else {})}
    try:
        written = new_recipe(data={"train": train, **({"eval": held_out} if held_out else {})}, **given)
    except PerlError as error:
        # The option that gave what a mistake is about; a file's name stays.
        raise error.moved(
            lambda where: next((one for key, one in _NEW_OPTIONS.items() if f"{where}.".startswith(f"{key}.")), where)
        ) from error
    path = given["output"]
    say("\n".join([f"written  {path}", *written.summary, f"look     perl train {path} --dry-run"]))
    say(f"train    perl train {path}")
