"""``perl train``: parse, train, print where everything is."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, PerlError, raise_all

if TYPE_CHECKING:
    from perl.run.folder import Run


@click.command("train", short_help="Train a recipe, or go on with it where it was stopped.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--output", type=click.Path(), help="Run folder [default: runs/NAME].")
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe and the plan; load no weights.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(recipe: str, overrides: tuple[str, ...], output: str | None, *, dry_run: bool, quiet: bool) -> None:
    """Train RECIPE, a YAML file or the name of a packaged one (see `perl recipes`).

    The same command goes on with a run that was interrupted or killed.
    """
    set_up_output(quiet=quiet)
    from perl.algorithms.registry import loss_mistakes
    from perl.methods.on_quantised import quantization_mistakes
    from perl.methods.settings import method_mistakes
    from perl.recipe import load_recipe
    from perl.rewards import reward_mistakes

    # Says what is wrong before anything slow is imported.
    load_recipe(recipe, overrides, checks=(loss_mistakes, method_mistakes, quantization_mistakes, reward_mistakes))
    from perl.recipe.recipe import is_first_process
    from perl.training.stages import prepare, read_recipe, train

    resolved = read_recipe(recipe, overrides, output)
    if dry_run:
        plan = prepare(resolved)
        say(resolved.to_yaml())
        say("\n".join(f"# {line}" for line in plan.lines()))
        return
    run = train(resolved)
    if not is_first_process():
        _leave()
    if not quiet:
        say("\n".join(_summary(run)))


def _leave() -> None:
    """Ends a process that has nothing left to write, without tearing down what it has loaded.

    A thread of torch's process group that still runs then would abort it, and with it the first process, which writes
    the adapter and its score while this one ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_DONE)


def _summary(run: "Run") -> list[str]:
    """Scores of base and adapter, and where the files are."""
    from perl.evaluation.recounting.folder import recount_folder
    from perl.evaluation.table import plain
    from perl.run.facts import read_best

    lines = []
    if run.facts.get("eval"):
        counted = recount_folder(run.path / "eval")
        raise_all(PerlError, counted.mistakes_at(str(run.path / "eval")))
        lines.append(plain(counted.results))
    steps, seconds = run.facts.get("steps", 0), run.facts.get("seconds", 0.0)
    lines.append(f"{steps} steps, {seconds:.0f} s, reward {_reward(run)}")
    lines.append(f"adapter  {run.adapter}")
    lines.append(f"card     {run.card}")
    best = run.path / "best"
    with contextlib.suppress(OSError, ValueError):  # none is kept
        found = read_best(best)
        lines.append(f"best     {best / 'adapter'}: {found['metric']} {found['value']:.3f} at step {found['step']}")
    curves = run.plots / "curves.png"
    lines.append(f"curves   {curves}" if curves.is_file() else "curves   not drawn: pip install 'perl-rl[plots]'")
    lines += _publishing(run)
    return lines


def _publishing(run: "Run") -> list[str]:
    """Where the adapter is, or how it gets there."""
    from perl.hub.push.outbox import read_pushes

    pushes = read_pushes(run)
    lines = [f"pushed   {push.url}" for push in pushes if push.status == "done"]
    if any(push.status == "queued" for push in pushes) or (not pushes and run.facts.get("repo_id")):
        lines.append(f"push     perl push {run.path}")
    return lines


def _reward(run: "Run") -> str:
    reward = run.facts.get("reward", {})
    first, last = reward.get("first"), reward.get("last")
    return f"{first:.3f} -> {last:.3f}" if first is not None and last is not None else "not scored"
