"""``perl new``: a commented recipe for a model, data and a GPU."""

from typing import Any

import click

from perl.cli.output import say, set_up_output
from perl.errors import PerlError

_OPTIONS = {
    "data.train.columns.prompt": "--prompt",
    "data.train.columns.answer": "--answer",
    "data.train.subset": "--subset",
    "data.train": "--data",
    "data.eval": "--eval",
    "model": "--model",
    "rewards": "--reward",
    "gpu": "--gpu",
}


@click.command("new", short_help="Write a commented recipe for your model, data and GPU.")
@click.option("--model", required=True, help="Hub id, folder, or sandbox:base.")
@click.option("--data", required=True, help="sandbox:TASK, a .jsonl, .json, .csv or .parquet file, or a Hub data set.")
@click.option("--subset", help="Of a Hub data set's configurations.")
@click.option("--eval", "held_out", help="Problems that are held out [default: the Hub data set's split test].")
@click.option("--prompt", help="Column of the question [default: prompt, question, problem, ...].")
@click.option("--answer", help="Column of the gold answer [default: answer, solution, ...].")
@click.option("--reward", multiple=True, help="A reward's name, or my_rewards:score; repeatable [default: accuracy].")
@click.option("--gpu", help="T4, L4, A10, RTX 4090, A100, H100, H200, gigabytes as 24, or cpu [default: what is here].")
@click.option("-o", "--output", default="recipe.yaml", show_default=True, help="File to write.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def command(*, data: str, subset: str | None, held_out: str | None, **given: Any) -> None:  # noqa: ANN401 (the others)
    """Write a commented recipe for your model, data and GPU, of sizes that fit by the estimates of `perl plan`.

    Nothing is written before data and model have been read and the recipe has passed a dry run's checks.
    """
    set_up_output(quiet=False)
    from perl.training.new_recipe import new_recipe

    train = {"name": data, **({"subset": subset} if subset else {})}
    try:
        written = new_recipe(data={"train": train, **({"eval": held_out} if held_out else {})}, **given)
    except PerlError as error:
        raise error.moved(_option) from error
    path = given["output"]
    say("\n".join([f"written  {path}", *written.summary, f"look     perl train {path} --dry-run"]))
    say(f"train    perl train {path}")


def _option(where: str) -> str:
    """The option that gave what a mistake is about; a file's name stays."""
    known = (option for key, option in _OPTIONS.items() if where == key or where.startswith(f"{key}."))
    return next(known, where)
