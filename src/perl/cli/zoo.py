"""``perl zoo``: find an adapter among its peers, rank, pull, add and verify it."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_FAILED, Mistake, PerlError, raise_all
from perl.recipe.assets import CHECKOUT, zoo_folder
from perl.zoo.catalogue import VARIABLE, open_zoo

EPILOG = """\b
Examples:
  perl zoo list --base 1.5B --sort perl-average
  perl zoo rank sandbox:addition
  perl zoo show perl-7b-dora
  perl zoo pull NAME my_adapter
  perl zoo add runs/mine --zoo my_zoo --ship
  perl zoo html -o zoo.html
"""


def _zoo_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = f"Folder of the zoo [default: ${VARIABLE}, else the one that comes with the package]."
    return click.option("--zoo", "folder", type=click.Path(), help=text)(command)


def _format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in ("json", "csv", "markdown"):
        text = f"Print as {name.upper() if name != 'markdown' else 'Markdown'}."
        command = click.option(f"--{name}", "style", flag_value=name, help=text)(command)
    return command


@click.group("zoo", epilog=EPILOG, short_help="List, rank, pull, add and verify adapters of the zoo.")
def command() -> None:
    """Adapters, ours and published ones: base, method, scores, where they lie, and what is wrong with them."""


@command.command("list", short_help="List adapters.")
@click.option("--base", help="Part of the base's name.")
@click.option("--method", help="As in peft.method.")
@click.option("--task", help="Only adapters with a score on it.")
@click.option("--sort", help="A task, from the best score down; or any other column [default: --task, else name].")
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--columns", help="Names with commas between; tasks are columns too, and TASK.base, TASK.gain.")
@click.option("--hub", is_flag=True, help="Also adapters that the Hub has by the tag perl-rl.")
@_format_options
@_zoo_option
def list_entries(
    *,
    task: str | None,
    sort: str | None,
    reverse: bool,
    columns: str | None,
    hub: bool,
    style: str | None,
    folder: str | None,
    **facts: str | None,
) -> None:
    """List the adapters of the zoo.

    Scores of different protocols stand in one column here; `perl zoo rank TASK` says which may be compared.
    """
    set_up_output(quiet=True)
    from perl.run.tables import as_records, printed
    from perl.zoo import table

    rows = [table.row_of(entry) for entry in open_zoo(folder).entries.values()]
    if hub:
        from perl.hub.zoo_entries.material import hub_adapters

        rows += hub_adapters()
    rows = table.ordered(table.select(rows, task=task, **facts), sort or task, reverse=reverse)
    a_task = task or (sort if sort not in table.FACTS else None)
    if style == "json" and columns is None:
        say(json.dumps(as_records(rows), indent=2))
    else:
        say(printed(rows, table.columns_of(columns, a_task, rows), style).rstrip("\n"))


@command.command("show", short_help="Say everything about an adapter.")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the entry as its file holds it.")
@_zoo_option
def show(name: str, *, as_json: bool, folder: str | None) -> None:
    """Say everything about the adapter NAME: scores, settings, where it lies, what is wrong with it."""
    from perl.zoo.summary import sheet

    entry = open_zoo(folder).entry(name)
    say(entry.to_json().rstrip("\n") if as_json else "\n".join(sheet(entry)))


@command.command("rank", short_help="Rank adapters by their score on a task, as far as they may be compared.")
@click.argument("task")
@click.option("--base", help="Only adapters whose base has this in its name.")
@click.option("--protocol", help="Part of a protocol's hash, or of a source [default: what most scores share].")
@_format_options
@_zoo_option
def rank(task: str, *, base: str | None, protocol: str | None, style: str | None, folder: str | None) -> None:
    """Rank the adapters that were scored on TASK under one protocol; scores that errors cannot tell apart are ties."""
    from perl.run.tables import as_records, printed
    from perl.zoo.ranking import COLUMNS, rank_task
    from perl.zoo.table import row_of, select

    entries = open_zoo(folder).entries
    rows = select([row_of(entry) for entry in entries.values()], base=base)
    found = rank_task([entries[str(row["name"].value)] for row in rows], task, protocol)
    if style == "json":
        ranks = as_records(found.rows, [*COLUMNS, "error"])
        facts = {"task": task, "protocol": found.protocol, "ranks": ranks, "others": found.others}
        say(json.dumps({**facts, "notes": found.notes}, indent=2))
    elif style == "csv":
        say(printed(found.rows, [*COLUMNS, "error"], style).rstrip("\n"))
    else:
        bullet = "- " if style == "markdown" else ""
        say(f"{task}, {found.protocol}\n\n{printed(found.rows, COLUMNS, style)}\n")
        say("\n".join(f"{bullet}{note}" for note in found.notes))


@command.command("pull", short_help="Put an adapter's files into a folder, verified.")
@click.argument("name")
@click.argument("destination", required=False, type=click.Path())
@_zoo_option
def pull(name: str, destination: str | None, *, folder: str | None) -> None:
    """Put the files of the adapter NAME into DESTINATION [default: NAME], each compared with its SHA-256."""
    set_up_output(quiet=False)
    from perl.policy.saved.download import pull as pull_files

    zoo = open_zoo(folder)
    say(pull_files(zoo, name, Path(destination or zoo.entry(name).name).expanduser()))


@command.command("add", short_help="Make an entry of a run or of an adapter on the Hub.")
@click.argument("source")
@click.option("--name", help="Of the entry [default: after the source].")
@click.option("--licence", help="SPDX identifier [default: the card's].")
@click.option("--ship", is_flag=True, help="Copy the adapter's files into the zoo.")
@click.option(
    "--seed-run",
    "seeds",
    multiple=True,
    type=click.Path(),
    help="Run of the same recipe with another seed; repeatable.",
)
@click.option("--note", "notes", multiple=True, help="What one must know; repeatable.")
@click.option("--force", is_flag=True, help="Replace the entry of that name.")
@_zoo_option
def add(source: str, *, folder: str | None, **options: Any) -> None:  # noqa: ANN401 (as click hands them over)
    """Make an entry of SOURCE, a run folder or an adapter on the Hub; it must have results of its own."""
    set_up_output(quiet=False)
    place = Path(folder or os.environ.get(VARIABLE) or zoo_folder()).expanduser()
    if place == zoo_folder() and not place.is_relative_to(CHECKOUT / "model_cards"):
        raise PerlError("is the installed package's zoo, which is not written to", str(place), "--zoo DIR begins one")
    from perl.hub.zoo_entries.adding import add as add_entry

    entry = add_entry(source, place, **options)
    say(place / "entries" / f"{entry.name}.json")
    say("`perl zoo render` brings its tables up to date", err=True)


@command.command("verify", short_help="Evaluate an adapter again and compare.")
@click.argument("name")
@click.option("--task", "tasks", multiple=True, help="Only this one; repeatable.")
@click.option("-k", "--k", type=click.IntRange(min=1), help="Completions a problem [default: the entry's].")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many problems.")
@click.option("--data", type=click.Path(), help="Folder with the tasks' data as JSON lines [default: the Hub].")
@click.option("-o", "--output", type=click.Path(), help="For results [default: they are not kept].")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@_zoo_option
def verify(name: str, *, tasks: tuple[str, ...], as_json: bool, folder: str | None, **options: Any) -> int:  # noqa: ANN401
    """Evaluate the adapter NAME again under its own protocol; exit code 1 if a score is another one."""
    set_up_output(quiet=as_json)
    zoo = open_zoo(folder)
    zoo.entry(name)  # before anything heavy
    from perl.hub.zoo_entries.verification import verify as evaluate_again

    found = evaluate_again(zoo, name, list(tasks) or None, **options)
    say(json.dumps(found.as_dict(), indent=2) if as_json else "\n".join(found.lines()))
    return 0 if found.agrees else EXIT_FAILED


@command.command("html", short_help="Write the zoo as one page for a browser.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), default="zoo.html", show_default=True, help="The page."
)
@_zoo_option
def html(*, output: str, folder: str | None) -> None:
    """Write the zoo as one page that needs no network: a table that can be sorted, and all that is known of each."""
    from perl.zoo.summary import html_page

    _write({Path(output).expanduser(): html_page(open_zoo(folder))})


@command.command("render", short_help="Write MODEL_ZOO.md, or check it.")
@click.option("--check", is_flag=True, help="Only compare; exit code 2 if it is not what the entries say.")
@_zoo_option
def render(*, check: bool, folder: str | None) -> None:
    """Write MODEL_ZOO.md out of the entries."""
    from perl.zoo.summary import rendered

    zoo = open_zoo(folder)
    raise_all(PerlError, [mistake for error in zoo.malformed.values() for mistake in error.mistakes])
    texts = rendered(zoo)
    if check:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        raise_all(PerlError, [Mistake("is not what the entries say", str(path), "perl zoo render") for path in stale])
    else:
        _write(texts)


def _write(texts: Mapping[Path, str]) -> None:
    """Pages are for others to see, and entries may have been written by hand: they pass the gate, then are written."""
    from perl.hub.gate import ZOO, gate_mistakes
    from perl.run.files import named, write_text

    known = {"zoo.html" if path.suffix == ".html" else path.name: text.encode() for path, text in texts.items()}
    raise_all(PerlError, gate_mistakes(known, among=ZOO))
    for path, text in texts.items():
        with named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        say(path)
