"""``perl watch``: a run in a terminal while it trains."""

from pathlib import Path

import click

from perl.cli.output import say, set_up_output


@click.command("watch", short_help="Watch a run in the terminal: step, time left, values, the newest completion.")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> int:
    """Show RUN's folder, drawn anew as steps come, until the run ends; Ctrl-C leaves it, and the run goes on.

    Where the output is no terminal, a line is printed for each new step. Exits as the run does: with 0 if it is done,
    1 if it failed, 130 if it was interrupted; with 0 if you leave it before.
    """
    set_up_output(quiet=True)
    from rich.console import Console

    from perl.reports.watch import watch

    return watch(run, Console(highlight=False), say)
