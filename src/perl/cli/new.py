"""``perl new``: five questions, or their answers as options, and a commented recipe that fits the GPU."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from perl.cli.output import say, set_up_output
from perl.errors import PerlError

if TYPE_CHECKING:
    from datasets import Dataset

_OPTIONS = {
    "data.train.columns.prompt": "--prompt",
    "data.train.columns.answer": "--answer",
    "data.train.subset": "--subset",
    "data.train": "--data",
    "data.eval": "--eval",
    "model": "--model",
    "rewards": "--reward",
    "prompt": "--prompt",
    "answer": "--answer",
    "reward": "--reward",
    "gpu": "--gpu",
}
_OUTPUT = "recipe.yaml"


@click.command("new", short_help="Write a commented recipe for your model, data and GPU.")
@click.option("--model", help="Hub id, folder, or sandbox:base.")
@click.option("--data", help="sandbox:TASK, a .jsonl, .json, .csv or .parquet file, or a Hub data set.")
@click.option("--subset", help="Of a Hub data set's configurations.")
@click.option("--eval", "held_out", help="Problems that are held out [default: the Hub data set's split test].")
@click.option("--prompt", help="Column of the question [default: prompt, question, problem, ...].")
@click.option("--answer", help="Column of the gold answer [default: answer, solution, ...].")
@click.option("--reward", multiple=True, help="A reward's name, or my_rewards:score; repeatable [default: accuracy].")
@click.option("--gpu", help="T4, L4, A10, RTX 4090, A100, H100, H200, gigabytes as 24, or cpu [default: what is here].")
@click.option("-o", "--output", help=f"File to write [default: {_OUTPUT}].")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def command(**given: Any) -> None:  # noqa: ANN401 (the options above)
    """Write a commented recipe for your model, data and GPU, of sizes that fit by the estimates of `perl plan`.

    Asks for model, data, where the answers are, GPU and file, as far as no option says so; without a terminal nothing
    is asked. Nothing is written before data and model have been read and the recipe has passed a dry run's checks.
    """
    set_up_output(quiet=False)
    asks = sys.stdin is not None and sys.stdin.isatty()
    if given["output"] is not None or not asks:
        from perl.training.draft import check_output

        check_output(given["output"] or _OUTPUT, force=given["force"])
    try:
        if asks:
            _ask(given)
        written = _write(given)
    except PerlError as error:
        raise error.moved(_option) from error
    for line in written:
        say(line)


def _write(given: dict[str, Any]) -> list[str]:
    """Writes the recipe; what was written, and what to do with it."""
    missing = [f"--{name}" for name in ("model", "data") if not given[name]]
    if missing:
        raise PerlError(f"{' and '.join(missing)} must be given where nobody can be asked", hint="perl new --help")
    from perl.training.draft import new_recipe

    path = given["output"] or _OUTPUT
    written = new_recipe(
        given["model"],
        _sources(given),
        path,
        prompt=given["prompt"],
        answer=given["answer"],
        reward=given["reward"],
        gpu=given["gpu"],
        force=given["force"],
    )
    return [
        f"written  {path}",
        *written.summary,
        f"look     perl train {path} --dry-run",
        f"train    perl train {path}",
    ]


def _sources(given: dict[str, Any]) -> dict[str, Any]:
    train = {"name": given["data"], **({"subset": given["subset"]} if given["subset"] else {})}
    return {"train": train, **({"eval": given["held_out"]} if given["held_out"] else {})}


def _ask(given: dict[str, Any]) -> None:
    """Asks for what no option says; what cannot be read is asked for again."""
    from perl.training.draft import check_model, check_output, check_reward, device_named
    from perl.training.draft_data import rows_of

    if given["model"]:
        check_model(given["model"])
    for name in given["reward"]:
        check_reward(name, given["output"])
    if given["gpu"]:
        device_named(given["gpu"])
    read: list[Dataset] = []

    def read_columns(data: str) -> None:
        read[:] = [rows_of(_sources({**given, "data": data})["train"])]

    if not given["model"]:
        text = "Model: a Hub id, a folder, or sandbox:base"
        given["model"] = _until_right(text, "sandbox:base", check_model)
    if given["data"]:
        read_columns(given["data"])
    else:
        text = "Data: a .jsonl, .json, .csv or .parquet file, a Hub data set, or sandbox:TASK"
        given["data"] = _until_right(text, "sandbox:addition", read_columns)
    _ask_for_columns(given, read[0])
    _check_data(given)
    if not given["gpu"]:
        here = device_named(None)
        text = "GPU: a name as T4 or H100, gigabytes as 24, or cpu"
        usual = "cpu" if here.on_cpu else here.name
        reply = _until_right(text, usual, lambda gpu: None if gpu == usual else device_named(gpu))
        given["gpu"] = None if reply == usual else reply  # with the memory that was seen, which a name does not say
    if not given["output"]:
        given["output"] = _until_right(
            "Write the recipe to", _OUTPUT, lambda path: check_output(path, force=given["force"])
        )


def _ask_for_columns(given: dict[str, Any], rows: "Dataset") -> None:
    """Where answers are, or which reward judges; the question's column too where its name is not a usual one."""
    from perl.sandbox import is_sandbox
    from perl.training.draft import check_reward
    from perl.training.draft_data import ANSWERS, check_column, check_question, guessed, guessed_question

    if is_sandbox(given["data"]):
        return
    known = rows.column_names
    for role in ("prompt", "answer"):
        check_column(given[role], known, role)
    say(f"The data has the columns {', '.join(known)}.")

    def check_prompt(name: str) -> None:
        check_question(rows, check_column(name, known, "prompt"))

    def check_answer(reply: str) -> None:
        if reply in known or ":" not in reply:
            check_column(reply, known, "answer")
        else:
            check_reward(reply, given["output"])

    question = given["prompt"] or guessed_question(rows)
    if question is None:
        question = given["prompt"] = _until_right("Which of them holds the question?", None, check_prompt)
    check_question(rows, question)
    if given["answer"] or given["reward"]:
        return
    others = [name for name in known if name != question]
    text = "Which holds the gold answer? Or a reward of your own, as my_rewards:score"
    reply = _until_right(text, guessed(ANSWERS, others), check_answer)
    given.update({"reward": (reply,)} if ":" in reply and reply not in known else {"answer": reply})


def _check_data(given: dict[str, Any]) -> None:
    """Refuses options that do not suit the data."""
    from perl.training.draft_data import held_out_of, sources_of, with_columns

    sources = sources_of(_sources(given))
    train = with_columns(sources["train"], given["prompt"], given["answer"], judged=False)
    if "eval" in sources:
        held_out_of(train, sources["eval"])


def _until_right(text: str, default: str | None, check: Callable[[str], object]) -> str:
    """Asks until the check refuses nothing."""
    while True:
        try:
            reply = str(click.prompt(text, default=default)).strip()
        except click.Abort:
            say("")  # what is said next begins a line
            raise
        try:
            check(reply)
        except PerlError as error:
            for mistake in error.moved(_no_option).mistakes:
                say(f"error: {mistake}", err=True, colour="red")
        else:
            return reply


def _no_option(where: str) -> str:
    """Of a reply there is no option to name; a file's name stays."""
    return "" if _option(where).startswith("--") else where


def _option(where: str) -> str:
    """The option that gave what a mistake is about; a file's name stays."""
    known = (option for key, option in _OPTIONS.items() if where == key or where.startswith(f"{key}."))
    return next(known, where)
