"""``perl algorithms``: the algorithms that have a name, what each sets, and where it is from."""

import json
from typing import Any

import click

from perl.algorithms.algorithm import NEUTRAL, Algorithm
from perl.algorithms.named import ALGORITHMS, find_algorithm, shown_settings
from perl.cli.output import say
from perl.run.tables import plain_table


@click.command("algorithms", short_help="List the algorithms: what each name sets, equation, source.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(*, name: str | None, as_json: bool) -> None:
    """List the names that `algorithm:` takes, or say everything about one NAME.

    A name sets fields of `train`: those of its row, and all others that make an algorithm to their plain values.
    """
    rows = [_row(row) for row in ([find_algorithm(name)] if name is not None else ALGORITHMS.values())]
    if as_json:
        say(json.dumps(rows, indent=2))
    elif name is not None:
        say("\n".join(_page(rows[0])))
    else:
        say("\n".join(_table(rows)))


def _row(row: Algorithm) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "settings": dict(row.settings),
        "sets": row.sets,
        "equation": row.equation,
        "advantage": row.advantage,
        "constants": row.constants,
        "differs": row.differs,
        "source": row.source,
        "paper": row.paper.title if row.paper else None,
    }


def _table(rows: list[dict[str, Any]]) -> list[str]:
    cells = [("algorithm", "title", "sets", "source")]
    cells += [(row["name"], row["title"], shown_settings(row["settings"]), row["source"]) for row in rows]
    return [
        *plain_table(cells, [False] * 4),
        "",
        f"each also sets, unless its row says otherwise: {shown_settings(NEUTRAL)}",
        "`perl algorithms NAME` says more; `perl train RECIPE algorithm=NAME` takes it",
    ]


def _page(row: dict[str, Any]) -> list[str]:
    """One algorithm, in full."""
    neutral = {name: value for name, value in row["sets"].items() if name not in row["settings"]}
    source = f"{row['paper']} ({row['source']})" if row["paper"] else row["source"]
    facts = [
        ("source", source),
        ("maximises", row["equation"]),
        ("advantage", row["advantage"]),
        ("sets", shown_settings(row["settings"])),
        ("and", shown_settings(neutral)),
        ("constants", row["constants"] or "-"),
        ("differs", row["differs"] or "-"),
    ]
    return [f"{row['name']}: {row['title']}", *plain_table(facts, (False, False))]
