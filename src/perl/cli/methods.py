"""``perl methods``: the PEFT methods, their settings and defaults."""

import json

import click

from perl.methods.registry import METHODS


@click.command("methods", short_help="List the PEFT methods with their settings.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(*, as_json: bool) -> None:
    """List the PEFT methods that `peft.method` takes, the settings each reads and their defaults."""
    if as_json:
        rows = [
            {"name": m.name, "summary": m.summary, "defaults": dict(m.defaults), "source": m.source}
            for m in METHODS.values()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for method in METHODS.values():
        defaults = ", ".join(f"{name} {value}" for name, value in method.defaults.items())
        click.echo(f"{method.name:8}{method.summary}\n{'':8}defaults: {defaults}\n{'':8}{method.source}\n")
