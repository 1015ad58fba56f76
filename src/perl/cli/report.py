"""``perl report``: one page about runs, to be looked at in a browser."""

import json
from pathlib import Path

import click

from perl.cli.output import say, set_up_output


@click.command("report", short_help="Make one page of runs: curves, scores, completions, what differs.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write [default: report.html].")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON; a page only with --output.")
def command(runs: tuple[str, ...], *, output: Path | None, as_json: bool) -> None:
    """Make a page of each RUN's folder, or of the output folder of a script; several are drawn over each other.

    The page is one file that needs no network. A run that still trains is shown as far as it is; the same command makes
    the page anew.
    """
    set_up_output(quiet=True)
    from perl.reports.page import report

    if as_json and output is None:
        from perl.reports.page_data import page_data
        from perl.reports.run_log import read_runs

        say(json.dumps(page_data(read_runs(runs)), indent=2))
        return
    made = report(list(runs), output or Path("report.html"))
    say(json.dumps(made.data, indent=2) if as_json else made)
