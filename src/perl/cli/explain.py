"""``perl explain``: what the code of a line means, why it matters, and what to do."""

import click

from perl.cli.output import say


@click.command("explain", short_help="Explain the code of a line, as PRL108.")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Print what CODE means, why it matters, an example and what to do; without CODE all of them, a line each."""
    from perl.doctor.codes import codes, explained, find_code

    if code is None:
        say("\n".join(f"{row.name}  {row.title}" for row in codes().values()))
        return
    row = find_code(code)
    say(f"{row.name}: {row.title}\n\n{explained(row)}".rstrip())
