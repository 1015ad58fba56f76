"""``perl spectrum``: what a training changed of each weight matrix, along the base's singular directions."""

import json
from typing import cast

import click

from perl.cli.output import say, set_up_output

EPILOG = """\b
Examples:
  perl spectrum runs/quickstart
  perl spectrum user/name --modules 'layers\\.(0|13|27)\\.' -o spectra/name
  perl spectrum runs/lora --against runs/pissa --by layer
"""


@click.command("spectrum", epilog=EPILOG, short_help="What a training changed, along the base's singular directions.")
@click.argument("adapter", metavar="ADAPTER|RUN")
@click.option(
    "--against", metavar="ADAPTER", help="Another one on the same base: angles between the two, their cosine."
)
@click.option("--base", help="Hub id or folder [default: the one that the adapter names].")
@click.option("--modules", metavar="REGEX", help="Only modules whose names hold this.")
@click.option(
    "--principal",
    type=float,
    default=0.1,
    show_default=True,
    help="Share of the singular directions, from the largest on, that count as principal.",
)
@click.option(
    "--by", type=click.Choice(["kind", "layer", "module"]), default="kind", show_default=True, help="A row for each."
)
@click.option("-o", "--output", type=click.Path(), help="Folder for spectrum.json and spectrum.png.")
@click.option("--json", "as_json", is_flag=True, help="Print all numbers, of every module, as JSON.")
def command(
    *,
    adapter: str,
    against: str | None,
    base: str | None,
    modules: str | None,
    principal: float,
    by: str,
    output: str | None,
    as_json: bool,
) -> None:
    """Measure what training changed: an adapter's folder, a run, a Hub id[@revision] or zoo:NAME.

    size: ||dW|| / ||W||. unchanged: weights that are the same bfloat16 number after the update. energy: share of
    ||dW||^2 in the principal singular directions of W, of outputs and of inputs; chance: that of an update without a
    direction; base: that of W. angle: the largest by which training turned W's principal directions. shift: of the
    singular values.
    """
    set_up_output(quiet=as_json)
    from perl.reports.spectrum import By, spectrum

    found = spectrum(adapter, against, base=base, modules=modules, principal=principal)
    say(json.dumps(found.to_dict(), indent=2) if as_json else found.text(cast(By, by)))
    if output is not None:
        for file in found.save(output):
            say(f"written  {file}", err=as_json)
