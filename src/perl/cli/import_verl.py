"""``perl import-verl``: what verl trained of a job, as a run."""

import click

from perl.cli.output import say, set_up_output

EPILOG = """\b
Examples:
  perl import-verl jobs/math
  perl import-verl jobs/math --step 200 -o runs/math-200
"""


@click.command("import-verl", epilog=EPILOG, short_help="Make a run of what verl trained of a job.")
@click.argument("job", metavar="JOB")
@click.option("-o", "--output", metavar="RUN", type=click.Path(), help="Run folder to write [default: JOB/run].")
@click.option("--step", type=click.IntRange(min=1), help="Which checkpoint [default: the newest complete one].")
def command(*, job: str, output: str | None, step: int | None) -> None:
    """Read a checkpoint that verl wrote in JOB, a folder that `perl export-verl` made, and write a run folder.

    The adapter is proven on its base before it is written; from then on the run is one like any other. What does not
    fit the job is refused: another base or recipe, files that are absent, cut or damaged, an adapter that is not
    trained.
    """
    set_up_output(quiet=False)
    from perl.hub.run_card import write_card
    from perl.verl.import_job import import_job

    done = import_job(job, output, step)
    write_card(done.run)
    difference = done.run.facts["reload_difference"]
    say(f"adapter  {done.run.adapter}  (step {done.step}, log-probs differ by at most {difference:.1e} nats)")
    say(f"log      {done.logged} steps" if done.logged else "log      none: perl push wants the steps of a run")
    say(f"card     {done.run.card}")
