"""``perl export``, ``perl export-verl`` and ``perl import-verl``: what is trained in another form, or elsewhere."""

import shlex

import click

from perl.cli.output import say, set_up_output


@click.command("export", short_help="Write a trained adapter as a plain LoRA or merged into its base.")
@click.argument("source", metavar="DIR")
@click.option("--as", "form", type=click.Choice(["lora", "merged"]), required=True, help="What to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of a merged model's weights; the sum is float64 and rounded once.",
)
@click.option("--base", help="The base [default: the one that the run or the adapter names].")
@click.option("-o", "--output", type=click.Path(), help="Folder to write [default: DIR-lora or DIR-merged].")
def command(*, source: str, form: str, dtype: str, base: str | None, output: str | None) -> None:
    """Write the adapter in DIR, a run folder, an adapter's folder, a Hub id or zoo:NAME, in another form.

    `lora` is exact or refused, with the error that could be reached; what was written is loaded again and compared.
    """
    set_up_output(quiet=False)
    from perl.policy.export import export

    done = export(source, "lora" if form == "lora" else "merged", output, dtype, base)
    rank = f"rank up to {done.largest_rank}, " if done.largest_rank is not None else ""
    say(f"{done.form:8} {done.path}  ({rank}log-probabilities differ by at most {done.difference:.1e} nats)")


_EXPORT_VERL = """\b
Examples:
  perl export-verl to-verl/0.5b -o jobs/gsm8k
  perl export-verl my_recipe.yaml engine.gpus=8 engine.rollout=sglang -o jobs/mine
  perl export-verl my_recipe.yaml --dry-run
"""


@click.command("export-verl", epilog=_EXPORT_VERL, short_help="Write a recipe as a job for verl.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Folder to write.")
@click.option("--dry-run", is_flag=True, help="Print what would go, and what is refused; write nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def export_verl(*, recipe: str, overrides: tuple[str, ...], output: str | None, dry_run: bool, quiet: bool) -> None:
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


_IMPORT_VERL = """\b
Examples:
  perl import-verl jobs/math
  perl import-verl jobs/math --step 200 -o runs/math-200
"""


@click.command("import-verl", epilog=_IMPORT_VERL, short_help="Make a run of what verl trained of a job.")
@click.argument("job", metavar="JOB")
@click.option("-o", "--output", metavar="RUN", type=click.Path(), help="Run folder to write [default: JOB/run].")
@click.option("--step", type=click.IntRange(min=1), help="Which checkpoint [default: the newest complete one].")
def import_verl(*, job: str, output: str | None, step: int | None) -> None:
    """Read a checkpoint that verl wrote in JOB, a folder that `perl export-verl` made, and write a run folder.

    The adapter is proven on its base before it is written; from then on the run is one like any other. What does not
    fit the job is refused: another base or recipe, files that are absent, cut or damaged, an adapter that is not
    trained.
    """
    set_up_output(quiet=False)
    from perl.hub.cards import write_card
    from perl.verl.import_job import import_job

    done = import_job(job, output, step)
    write_card(done.run)
    difference = done.run.facts["reload_difference"]
    say(f"adapter  {done.run.adapter}  (step {done.step}, log-probs differ by at most {difference:.1e} nats)")
    say(f"log      {done.logged} steps" if done.logged else "log      none: perl push wants the steps of a run")
    say(f"card     {done.run.card}")
