r"""``perl reward``: what the verifier says of one answer, and whether a data set's own gold answers count as right.

Needs no model and imports no torch, unless a policy is asked how hard the problems are.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, EXIT_FAILED, PerlError
from perl.run.tables import plain_table


@click.group("reward", short_help="Try a reward on an answer, or on a recipe's own gold answers.")
def command() -> None:
    """Try the accuracy reward on one answer, or a recipe's rewards on the gold answers of its data."""


# An answer may be -12, which is no option.
@command.command(
    "try", short_help="Compare one completion with a gold answer.", context_settings={"ignore_unknown_options": True}
)
@click.argument("gold")
@click.argument("completion")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def try_completion(*, gold: str, completion: str, as_json: bool) -> None:
    r"""Say what the accuracy reward makes of COMPLETION where GOLD is the gold answer.

    COMPLETION is all that a model wrote, - reads it from stdin. Example: perl reward try 1/2 'so \boxed{0.5}'
    """
    from perl.rewards.answers import gold_answer
    from perl.rewards.verifier import check
    from perl.training.reward_trial import beginning

    for given in (gold, completion):
        if given.startswith("--") and given[2:3].isalpha():
            raise click.NoSuchOption(given, possibilities=["--json"])
    if completion == "-":
        completion = sys.stdin.buffer.read().decode(errors="replace")
    verdict = check(gold, completion)
    if as_json:
        facts_of = {"status": verdict.status, "extracted": verdict.extracted, "gold": gold_answer(gold)}
        say(json.dumps({**facts_of, "seconds": round(verdict.seconds, 6)}, indent=2))
        return
    facts = [
        ("status", verdict.status.replace("_", " ")),
        ("extracted", "none" if verdict.extracted is None else beginning(verdict.extracted)),
        ("gold", beginning(gold_answer(gold))),
        ("seconds", f"{verdict.seconds:.3f}"),
    ]
    say("\n".join(plain_table(facts, (False, False))))


@command.command("check", short_help="Score the gold answers of a recipe's data as completions.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--n", "limit", type=click.IntRange(min=1), help="Check this many rows of each set, evenly spaced.")
@click.option("--rollouts", type=click.IntRange(min=1), help="Then ask the policy each training problem so often.")
@click.option("--adapter", help="Of the policy that is asked [default: the recipe's peft.adapter, else the base].")
@click.option("--write", type=click.Path(), help="Write the training data as .jsonl, with the column pass_rate.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check_recipe(
    *,
    recipe: str,
    overrides: tuple[str, ...],
    limit: int | None,
    rollouts: int | None,
    adapter: str | None,
    write: str | None,
    as_json: bool,
) -> int:
    r"""Score the gold answers of RECIPE's data, each as the completion \boxed{gold answer}. No model is loaded.

    Each must be right; a row whose gold answer is not gets no reward, whatever a model writes. The rewards are tried on
    right, wrong and empty texts of 16 rows. Exit code 1 if there is such a row, or a reward that fails, gives the same
    to all texts, or no more to right ones than to wrong ones. With --rollouts a policy is asked as training would, and
    --write keeps the share of right completions of each problem: by it prompts.curriculum: -pass_rate trains from easy
    to hard.
    """
    set_up_output(quiet=as_json)
    # Options that do nothing, and a file that cannot or should not be written, are refused before anything is read.
    for option, value in (("--adapter", adapter), ("--write", write)):
        if value is not None and rollouts is None:
            raise PerlError("is about a policy that is asked", option, "with --rollouts 8")
    if write is not None and Path(write).suffix != ".jsonl":
        raise PerlError(f"{write} would be JSON lines", "--write", f"{Path(write).stem or 'data'}.jsonl")
    if write is not None and Path(write).exists():
        raise PerlError(f"{write} is there already", "--write", "another name, or remove it")
    if write is not None and not Path(write).expanduser().absolute().parent.is_dir():
        raise PerlError(f"no such folder: {Path(write).parent}", "--write")
    from perl.training.checked_recipe import checked_recipe
    from perl.training.reward_trial import check_gold_answers

    resolved = checked_recipe(recipe, overrides)
    gold, asked = check_gold_answers(resolved, limit), None
    if rollouts is not None:
        from perl.training.difficulty import measured_difficulty

        asked = measured_difficulty(resolved, gold, rollouts, adapter, write)
    if as_json:
        found = {"sets": [asdict(one) for one in gold.sets], "rewards": [asdict(one) for one in gold.rewards]}
        say(json.dumps({**found, **({} if asked is None else {"difficulty": asdict(asked)})}, indent=2))
    else:
        say("\n".join([*gold.lines(), *([] if asked is None else asked.lines())]))
    return EXIT_DONE if gold.sound else EXIT_FAILED
