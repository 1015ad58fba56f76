"""``perl export-verl``: a recipe handed over to verl, as a folder with all that the job needs."""

import shlex

import click

from perl.cli.output import say, set_up_output

EPILOG = """\b
Examples:
  perl export-verl to-verl/0.5b -o jobs/gsm8k
  perl export-verl my_recipe.yaml engine.gpus=8 engine.rollout=sglang -o jobs/mine
  perl export-verl my_recipe.yaml --dry-run
"""


@click.command("export-verl", epilog=EPILOG, short_help="Write a recipe as a job for verl.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Folder to write.")
@click.option("--dry-run", is_flag=True, help="Print what would go, and what is refused; write nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(*, recipe: str, overrides: tuple[str, ...], output: str | None, dry_run: bool, quiet: bool) -> None:
    """Write RECIPE as a job that verl trains: its data, rewards and settings in verl's form, and how it is started.

    What verl cannot do is refused by key, with the nearest thing that works; what it does by other numbers is said.
    `perl import-verl` makes a run of what it trained.
    """
    set_up_output(quiet=quiet)
    if output is None and not dry_run:
        raise click.UsageError("-o DIR is missing: where the job is written")
    from perl.training.on_verl import export_verl, prepare_export, read_for_verl
    from perl.verl.job import submit_line

    if dry_run or output is None:
        say("\n".join(prepare_export(read_for_verl(recipe, overrides)).dry_lines()))
        return
    folder, export = export_verl(recipe, output, overrides)
    if not quiet:
        start = f"start    bash {shlex.quote(f'{folder}/run.sh')}"
        say("\n".join([*export.lines(), f"job      {folder}", start, f"ray      {submit_line(folder.resolve())}"]))
