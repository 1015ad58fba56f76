"""``perl train``: parse, train, print where everything is."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perl.cli.output import ARGUMENTS, say, set_up_output
from perl.errors import EXIT_DONE, PerlError, raise_all
from perl.recipe.recipe import is_first_process, launched, world_size
from perl.recipe.sections import STRATEGIES
from perl.run.launched import adopt_launcher

if TYPE_CHECKING:
    from perl.recipe import Recipe
    from perl.run.folder import Run


@click.command("train", short_help="Train a recipe, or go on with it where it was stopped.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--output", type=click.Path(), help="Run folder [default: runs/NAME].")
@click.option(
    "--resume-from", metavar="STORE", help="Go on with a run that engine.storage kept: hub:USER/NAME, s3://..."
)
@click.option("--processes", metavar="N", help="Start so many processes, one a GPU (engine.processes).")
@click.option("--strategy", metavar="|".join(STRATEGIES), help="What each holds of the base (engine.strategy).")
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe and the plan; load no weights.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.pass_context
def command(
    context: click.Context,
    /,
    recipe: str,
    overrides: tuple[str, ...],
    output: str | None,
    resume_from: str | None,
    *,
    dry_run: bool,
    quiet: bool,
    **engine: str | None,
) -> int:
    """Train RECIPE, a YAML file or the name of a packaged one (see `perl recipes`).

    The same command goes on with a run that was interrupted or killed, on another machine with --resume-from.
    """
    adopt_launcher()
    set_up_output(quiet=quiet)
    from perl.training.checked_recipe import checked_recipe, with_options

    overrides = with_options(overrides, engine)
    if world_size() == 1:  # of several processes each would say the same
        checked = checked_recipe(recipe, overrides)
        several = (checked.engine.processes or 1) > 1 and not checked.engine.on_ray  # which starts them itself
        if not launched() and several and not dry_run:
            return _start(checked, context.meta[ARGUMENTS], output)
    from perl.rollouts.vllm.release import check_engine
    from perl.run.folder import check_folder
    from perl.training.forecast import forecast_of
    from perl.training.forecast_text import plan_lines, summary_lines
    from perl.training.prepare import prepare, read_recipe
    from perl.training.reward_trial import check_rewards_work
    from perl.training.stages import train

    if dry_run:
        resolved = read_recipe(recipe, overrides, output, on_verl=not launched())
        if resolved.engine.on_verl:
            from perl.training.on_verl import prepare_export

            check_folder(resolved)
            say("\n".join(prepare_export(resolved.with_train(output_dir=None)).dry_lines()))
            return EXIT_DONE
        plan = prepare(resolved, engine_here=False)
        if is_first_process():
            check_folder(resolved)
            say(resolved.to_yaml())
            say("\n".join(f"# {line}" for line in (*plan_lines(plan), *summary_lines(forecast_of(plan)))))
            with resolved.locating():
                check_rewards_work(resolved, plan.problems)
        check_engine(resolved.rollout)  # last, since a plan is made of a recipe for another machine too
        return EXIT_DONE
    run = train(recipe, overrides, output, resume_from)
    if not is_first_process():
        # Nothing is left to write. Were what it has loaded torn down, a thread of torch's process group that still runs
        # would abort it, after the run is done, and a launcher would take that for a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_DONE)
    if not quiet:
        say("\n".join(_summary(run)))
    return EXIT_DONE


def _start(checked: "Recipe", arguments: Sequence[str], output: str | None) -> int:
    """Starts the same command as several processes."""
    from perl.launch.meeting import check_machine
    from perl.launch.start import start

    with checked.locating():
        check_machine(checked.engine, checked.engine.processes or 1)
    return start(arguments, checked.engine.processes or 1, Path(output) if output else checked.output_dir)


def _summary(run: "Run") -> list[str]:
    """Scores of base and adapter, and where the files are."""
    from perl.evaluation.recounting.files import recount_folder
    from perl.evaluation.scoring.table import plain
    from perl.hub.push.outbox import read_pushes
    from perl.run.facts import read_best
    from perl.run.logs import ends_text, log_rows

    lines = []
    if run.facts.get("eval"):
        counted = recount_folder(run.path / "eval")
        raise_all(PerlError, counted.mistakes_at(str(run.path / "eval")))
        lines.append(plain(counted.results))
    steps, seconds = run.facts.get("steps", 0), run.facts.get("seconds", 0.0)
    # How the reward has changed, and how far the policy was from its teacher, those of the two that there are.
    rows = log_rows(run.metrics.read_text(encoding="utf-8")) if run.metrics.is_file() else []
    taught = [row["teacher/kl"] for row in rows if row.get("teacher/kl") is not None]
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    rewarded = not taught or any(run.facts.get("rewards", {}).values())
    ends = [f"reward {ends_text(rewards)}"] if rewarded else []
    ends += [f"KL to the teacher {ends_text(taught)}"] if taught else []
    lines.append(f"{steps} steps, {seconds:.0f} s, {', '.join(ends)}")
    lines.append(f"adapter  {run.adapter}")
    lines.append(f"card     {run.card}")
    best = run.path / "best"
    with contextlib.suppress(OSError, ValueError):  # none is kept
        found = read_best(best)
        lines.append(f"best     {best / 'adapter'}: {found['metric']} {found['value']:.3f} at step {found['step']}")
    curves = run.plots / "curves.png"
    lines.append(f"curves   {curves}" if curves.is_file() else "curves   not drawn: pip install 'perl-rl[plots]'")
    pushes = read_pushes(run)
    lines += [f"pushed   {push.url}" for push in pushes if push.status == "done"]
    if any(push.status == "queued" for push in pushes) or (not pushes and run.facts.get("repo_id")):
        lines.append(f"push     perl push {run.path}")
    return lines
