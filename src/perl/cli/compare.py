"""``perl compare``: runs as one table, sorted by score."""

from pathlib import Path

import click

from perl.cli.output import say, set_up_output
from perl.errors import RunFolderError


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
def command(runs: tuple[str, ...], *, to: str | None, score: str | None, as_json: bool, csv_file: Path | None) -> None:
    """Put each RUN beside the others: run folders, output folders of scripts, patterns, or folders of runs.

    Runs that differ in nothing but their seeds are one row, with a row for each seed below it. `perl report` makes a
    page of them, `perl eval compare` compares evaluations on several tasks.
    """
    set_up_output(quiet=True)
    from perl.reports.comparison.table import compare

    if csv_file is not None and not csv_file.parent.is_dir():
        raise RunFolderError("no such folder", str(csv_file.parent), "make it, or name another file with --csv")
    found = compare(runs, to=to, score=score)
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
