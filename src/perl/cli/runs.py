"""``perl report``, ``compare``, ``watch``, ``study`` and ``spectrum``: what came of trainings, looked at."""

import json
from pathlib import Path
from typing import cast

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, EXIT_FAILED, RunFolderError


@click.command("report", short_help="Make one page of runs: curves, scores, completions, what differs.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write [default: report.html].")
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON; a page only with --output.")
def report(runs: tuple[str, ...], *, output: Path | None, as_json: bool) -> None:
    """Make a page of each RUN's folder, or of the output folder of a script; several are drawn over each other.

    The page is one file that needs no network. A run that still trains is shown as far as it is; the same command makes
    the page anew.
    """
    set_up_output(quiet=True)
    from perl.reports.page import report as make_page

    if as_json and output is None:
        from perl.reports.page_data import page_data
        from perl.reports.run_log import read_runs

        say(json.dumps(page_data(read_runs(runs)), indent=2))
        return
    made = make_page(list(runs), output or Path("report.html"))
    say(json.dumps(made.data, indent=2) if as_json else made)


@click.command("compare", short_help="Compare runs in one table: score, what differs, how sure a difference is.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--to", metavar="RUN", help="Compare the others with this one [default: the best].")
@click.option(
    "--score",
    metavar="KEY",
    help="TASK, TASK/avg@K, TASK/pass@K, or a name in metrics.jsonl [default: the score at the end, else reward].",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path, dir_okay=False), help="Write a CSV file too.")
def compare(runs: tuple[str, ...], *, to: str | None, score: str | None, as_json: bool, csv_file: Path | None) -> None:
    """Put each RUN beside the others: run folders, output folders of scripts, patterns, or folders of runs.

    Runs that differ in nothing but their seeds are one row, with a row for each seed below it. `perl report` makes a
    page of them, `perl eval compare` compares evaluations on several tasks.
    """
    set_up_output(quiet=True)
    from perl.reports.comparison.table import compare as compared
    from perl.run.files import write_text

    if csv_file is not None and not csv_file.parent.is_dir():
        raise RunFolderError("no such folder", str(csv_file.parent), "make it, or name another file with --csv")
    found = compared(runs, to=to, score=score)
    if csv_file is not None:
        write_text(csv_file, found.to_csv())
    say(found.to_json() if as_json else found)
    if csv_file is not None:
        say(f"csv      {csv_file}", err=as_json)


@click.command("watch", short_help="Watch a run in the terminal: step, time left, values, the newest completion.")
@click.argument("run", type=click.Path(path_type=Path))
def watch(run: Path) -> int:
    """Show RUN's folder, drawn anew as steps come, until the run ends; Ctrl-C leaves it, and the run goes on.

    Where the output is no terminal, a line is printed for each new step. Exits as the run does: with 0 if it is done,
    1 if it failed, 130 if it was interrupted; with 0 if you leave it before.
    """
    set_up_output(quiet=True)
    from rich.console import Console

    from perl.reports.watch import watch as follow

    return follow(run, Console(highlight=False), say)


_STUDY = """\b
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
    "study", epilog=_STUDY, short_help="Compare methods, rates, rewards...: choose on some seeds, score on others."
)
@click.argument("study", metavar="STUDY.yaml", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder [default: runs/studies/NAME].")
@click.option("--dry-run", is_flag=True, help="Print cells, memory and time; load no weights.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def study(study: Path, output: Path | None, *, dry_run: bool, quiet: bool) -> int:
    """Carry out STUDY.yaml, or go on with it where it was stopped; every cell is an ordinary run."""
    set_up_output(quiet=quiet)
    if dry_run:
        from perl.training.studies.plan import load_study

        planned = load_study(study)  # before what costs seconds to import
        from perl.training.studies.run_study import cost_lines

        say("\n".join(cost_lines(planned)))
        return EXIT_DONE
    from perl.training.studies.run_study import study as carry_out

    result = carry_out(study, output)
    if not quiet:
        say("\n".join(result.lines()))
    return EXIT_FAILED if result.unfinished else EXIT_DONE


_SPECTRUM = """\b
Examples:
  perl spectrum runs/quickstart
  perl spectrum user/name --modules 'layers\\.(0|13|27)\\.' -o spectra/name
  perl spectrum runs/lora --by layer
"""


@click.command(
    "spectrum", epilog=_SPECTRUM, short_help="What a training changed, along the base's singular directions."
)
@click.argument("adapter", metavar="ADAPTER|RUN")
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
def spectrum_of(
    *,
    adapter: str,
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

    found = spectrum(adapter, base=base, modules=modules, principal=principal)
    say(json.dumps(found.to_dict(), indent=2) if as_json else found.text(cast(By, by)))
    if output is not None:
        for file in found.save(output):
            say(f"written  {file}", err=as_json)
