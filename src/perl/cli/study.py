"""``perl study``: a fair comparison as one command."""

from pathlib import Path

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, EXIT_FAILED

_EXAMPLE = """\b
A study:
  recipe: quickstart
  overrides: {train.max_steps: 50}
  grid:
    peft.method: [lora, dora, ia3]
    train.learning_rate: [1e-3, 3e-3, 1e-2]
  seeds: {choose: [0, 1], score: [10, 11, 12]}
  baseline: {peft.method: lora}
"""


@click.command(
    "study", epilog=_EXAMPLE, short_help="Compare methods, rates, rewards...: choose on some seeds, score on others."
)
@click.argument("study", metavar="STUDY.yaml", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder [default: runs/studies/NAME].")
@click.option("--dry-run", is_flag=True, help="Print cells, memory and time; load no weights.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(study: Path, output: Path | None, *, dry_run: bool, quiet: bool) -> int:
    """Carry out STUDY.yaml, or go on with it where it was stopped; every cell is an ordinary run."""
    set_up_output(quiet=quiet)
    if dry_run:
        from perl.training.studies.plan import load_study

        planned = load_study(study)  # before what costs seconds to import
        from perl.training.studies.cost import cost_lines

        say("\n".join(cost_lines(planned)))
        return EXIT_DONE
    from perl.training.studies.run_study import study as carry_out

    result = carry_out(study, output)
    if not quiet:
        say("\n".join(result.lines()))
    return EXIT_FAILED if result.unfinished else EXIT_DONE
