"""``perl doctor``: what keeps a run from starting here or makes it slow; ``perl explain``: what a code means."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from perl.doctor.codes import Finding

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


@click.command("doctor", short_help="Look at this machine, and at a recipe: what is missing, what is slow.")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(recipe: str | None, overrides: tuple[str, ...], *, as_json: bool) -> int:
    """Look at versions, devices, vLLM, the Hub, folders, cores and threads; with RECIPE also at what it needs.

    A line for each finding, with what to do about it. Exits with 1 if there is a problem.
    """
    set_up_output(quiet=True)
    from perl.doctor.examine import examine

    findings: list[Finding] = []
    for finding in examine(recipe, overrides, Path("runs")):
        findings.append(finding)
        if not as_json:
            say(str(finding), colour=_COLOURS[finding.level])
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        say("`perl explain CODE` says more of a line")
    return EXIT_FAILED if any(finding.level == "problem" for finding in findings) else EXIT_DONE


@click.command("explain", short_help="Explain the code of a line, as PRL108.")
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Print what CODE means, why it matters, an example and what to do; without CODE all of them, a line each."""
    from perl.doctor.codes import codes, explained, find_code

    if code is None:
        say("\n".join(f"{row.name}  {row.title}" for row in codes().values()))
        return
    row = find_code(code)
    say(f"{row.name}: {row.title}\n\n{explained(row)}".rstrip())
