"""``perl report``, ``perl compare`` and ``perl watch``: runs, looked at by a person."""

import json
from pathlib import Path

import click

from perl.cli.output import say, set_up_output
from perl.errors import RunFolderError


@click.command("report", short_help="Make one page of runs: curves, scores, completions, what differs.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write [default: report.html].")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON; a page only with --output.")
def report(runs: tuple[str, ...], *, output: Path | None, as_json: bool) -> None:
    """Make a page of each RUN's folder, or of the output folder of a script; several are drawn over each other.

    The page is one file that needs no network. A run that still trains is shown as far as it is; the same command makes
    the page anew.
    """
    set_up_output(quiet=True)
    from perl.reports.page import report as make_page

    if as_json and output is None:
        from perl.reports.page_data import page_data
        from perl.reports.run_log import read_runs

        say(json.dumps(page_data(read_runs(runs)), indent=2))
        return
    made = make_page(list(runs), output or Path("report.html"))
    say(json.dumps(made.data, indent=2) if as_json else made)


@click.command("compare", short_help="Compare runs in one table: score, what differs, how sure a difference is.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--to", metavar="RUN", help="Compare the others with this one [default: the best].")
@click.option(
    "--score",
    metavar="KEY",
    help="TASK, TASK/avg@K, TASK/pass@K, best (eval.best), or a name in metrics.jsonl "
    "[default: the score at the end, else reward].",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Write a CSV file too.")
def compare(runs: tuple[str, ...], *, to: str | None, score: str | None, as_json: bool, csv_file: Path | None) -> None:
    """Put each RUN beside the others: run folders, output folders of scripts, patterns, or folders of runs.

    Runs that differ in nothing but their seeds are one row, with a row for each seed below it. `perl report` makes a
    page of them, `perl eval compare` compares evaluations on several tasks.
    """
    set_up_output(quiet=True)
    from perl.reports.comparison.table import compare as compared

    if csv_file is not None and not csv_file.parent.is_dir():
        raise RunFolderError("no such folder", str(csv_file.parent), "make it, or name another file with --csv")
    found = compared(runs, to=to, score=score)
    if csv_file is not None:
        _write(csv_file, found.to_csv())
    say(found.to_json() if as_json else found)
    if csv_file is not None:
        say(f"csv      {csv_file}", err=as_json)


def _write(path: Path, text: str) -> None:
    from perl.run.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise RunFolderError(f"cannot be written: {error.strerror or error}", str(path)) from None


@click.command("watch", short_help="Watch a run in the terminal: step, time left, values, the newest completion.")
@click.argument("run", type=click.Path(path_type=Path))
def watch(run: Path) -> int:
    """Show RUN's folder, drawn anew as steps come, until the run ends; Ctrl-C leaves it, and the run goes on.

    Where the output is no terminal, a line is printed for each new step. Exits as the run does: with 0 if it is done,
    1 if it failed, 130 if it was interrupted; with 0 if you leave it before.
    """
    set_up_output(quiet=True)
    from rich.console import Console

    from perl.reports.watch import watch as follow

    return follow(run, Console(highlight=False), say)
