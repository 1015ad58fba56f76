r"""``perl reward``: what the verifier says of one answer, and whether a data set's own gold answers count as right.

gold answer, completion -> verdict; recipe -> its gold answers as completions -> verdicts

Needs no model and imports no torch, unless a policy is asked how hard the problems are.
"""

import inspect
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perl.cli.output import say, set_up_output
from perl.errors import EXIT_DONE, EXIT_FAILED, DataError, InterruptedRunError, PerlError
from perl.run.tables import plain_table

if TYPE_CHECKING:
    from datasets import Dataset

    from perl.data import ProblemSet
    from perl.recipe import Recipe
    from perl.recipe.sections import DataSection
    from perl.rewards import Reward
    from perl.rewards.verifier import Judging

_LISTED_ROWS = 20
_SHOWN_CHARACTERS = 80
# Rows that are compared at a time, between two drawings of the live line.
_AT_A_TIME = 200


@dataclass(frozen=True)
class FailingRow:
    """A row of a data set whose gold answer the verifier does not judge right.

    Attributes:
        row: Counted from 1, in the data set as it was read.
        status: Of the verdict on it; ``unparsable_gold`` also where it is right letter for letter.
    """

    row: int
    gold: str
    status: str


@dataclass(frozen=True)
class CheckedSet:
    """What came of the gold answers of one set; ``unreadable`` ones can be matched letter for letter only."""

    role: str
    name: str
    problems: int
    checked: int
    right: int
    unreadable: int
    failing: list[FailingRow] = field(default_factory=list)


@dataclass(frozen=True)
class RewardOfGold:
    """The mean that another reward gives the gold answers, or why there is none."""

    name: str
    mean: float | None = None
    skipped: str = ""


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
        ("extracted", "none" if verdict.extracted is None else _one_line(verdict.extracted)),
        ("gold", _one_line(gold_answer(gold))),
        ("seconds", f"{verdict.seconds:.3f}"),
    ]
    say("\n".join(plain_table(facts, (False, False))))


@dataclass(frozen=True)
class Difficulty:
    """What a policy makes of the training problems.

    Attributes:
        policy: The adapter, or the base.
        problems: That it was asked.
        rollouts: Completions of each.
        mean: Pass rate.
        never: Share of the problems of which no completion is right.
        always: Share of which all are.
        written: The file with a pass rate for each.
    """

    policy: str
    problems: int
    rollouts: int
    mean: float
    never: float
    always: float
    written: str | None = None


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

    Each must be right; a row whose gold answer is not gets no reward, whatever a model writes. Exit code 1 if there is
    such a row. With --rollouts a policy is asked as training would, and --write keeps the share of right completions
    of each problem: by it prompts.curriculum: -pass_rate trains from easy to hard.
    """
    set_up_output(quiet=as_json)
    _check_asked(rollouts, adapter, write)
    from perl.algorithms.registry import loss_mistakes
    from perl.methods.settings import method_mistakes
    from perl.recipe import load_recipe
    from perl.rewards import resolve_rewards, reward_mistakes
    from perl.rewards.verifier import Judging

    resolved = load_recipe(recipe, overrides, checks=(loss_mistakes, method_mistakes, reward_mistakes))
    rewards = resolve_rewards(resolved.rewards, resolved.rollout)
    judging = next((reward.judging for reward in rewards if reward.judging is not None), None) or Judging()
    try:
        problems, train_rows = _read_problems(resolved.data, judging.solution)
    except PerlError as error:
        raise resolved.located(error) from error
    rewards = resolve_rewards(resolved.rewards, resolved.rollout, problems.own_names)
    sets, others = [], []
    if "solution" in problems.train.column_names:
        sets.append(_checked("train", resolved.data.train.name, problems.train, train_rows, limit, judging))
        chosen = problems.train.select(_evenly(len(problems.train), limit))
        names = problems.own_names
        others = [_reward_of_gold(reward, chosen, names) for reward in rewards if reward.name != "accuracy"]
    if problems.heldout is not None and "solution" in problems.heldout.column_names:
        rows, name = range(len(problems.heldout)), problems.heldout_name or ""
        sets.append(_checked("eval", name, problems.heldout, rows, limit, judging))
    asked = None
    if rollouts is not None:
        asked = _measured(resolved, _evenly(len(problems.train), limit), train_rows, rollouts, adapter, write)
    if as_json:
        found = {"sets": [asdict(x) for x in sets], "rewards": [asdict(x) for x in others]}
        say(json.dumps({**found, **({} if asked is None else {"difficulty": asdict(asked)})}, indent=2))
    else:
        say("\n".join([*_lines(sets, others), *([] if asked is None else _difficulty_lines(asked))]))
    return EXIT_FAILED if any(checked.failing for checked in sets) else EXIT_DONE


def _check_asked(rollouts: int | None, adapter: str | None, write: str | None) -> None:
    """Refuses options that do nothing, and a file that cannot or should not be written, before anything is read."""
    for option, value in (("--adapter", adapter), ("--write", write)):
        if value is not None and rollouts is None:
            raise PerlError("is about a policy that is asked", option, "with --rollouts 8")
    if write is None:
        return
    if Path(write).suffix != ".jsonl":
        raise PerlError(f"{write} would be JSON lines", "--write", f"{Path(write).stem or 'data'}.jsonl")
    if Path(write).exists():
        raise PerlError(f"{write} is there already", "--write", "another name, or remove it")
    if not Path(write).expanduser().absolute().parent.is_dir():
        raise PerlError(f"no such folder: {Path(write).parent}", "--write")


def _measured(
    recipe: "Recipe", chosen: Sequence[int], rows: Sequence[int], rollouts: int, adapter: str | None, write: str | None
) -> Difficulty:
    """Asks the policy, and writes what came of it.

    Args:
        recipe: Of the data.
        chosen: Which training problems are asked.
        rows: Of each training problem, in the data set.
        rollouts: Completions of each.
        adapter: Of the policy; None: the recipe's, or the base.
        write: The file, whose completions are kept beside it; None: nothing is kept.
    """
    from perl.data import read_source
    from perl.run.files import write_text
    from perl.training.difficulty import COLUMN, pass_rates

    file = None if write is None else Path(write).expanduser()
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) if file is None else file.with_name(f"{file.stem}_completions")
        try:
            rates = pass_rates(recipe, rollouts, kept, adapter, chosen)
        except KeyboardInterrupt:
            raise InterruptedRunError("stopped", str(kept), "the same command goes on" if file else "") from None
        except PerlError as error:
            raise recipe.located(error) from error
    if file is not None:
        source, _ = read_source(recipe.data.train, "train", "data.train")
        lines = [{**source[rows[i]], COLUMN: rate} for i, rate in zip(chosen, rates, strict=True)]
        write_text(file, "".join(f"{json.dumps(line, ensure_ascii=False, default=str)}\n" for line in lines))
    share, policy = 1 / len(rates), adapter or recipe.peft.adapter or recipe.model.name
    never, always = (share * sum(rate == end for rate in rates) for end in (0.0, 1.0))
    return Difficulty(policy, len(rates), rollouts, share * math.fsum(rates), never, always, write)


def _difficulty_lines(asked: Difficulty) -> list[str]:
    policy, shares = _one_line(asked.policy), f"{asked.never:.2f} never, {asked.always:.2f} always right"
    lines = [
        f"policy {policy}: {asked.problems:,} training problems x {asked.rollouts:,} completions, pass rate "
        f"{asked.mean:.3f}; of the problems {shares}"
    ]
    if asked.written is not None:
        how = f"data.train={_one_line(asked.written, 200)} prompts.curriculum=-pass_rate"
        lines.append(f"wrote  {_one_line(asked.written, 200)}: easy first with {how}")
    return lines


def _read_problems(section: "DataSection", gold: str) -> "tuple[ProblemSet, Sequence[int]]":
    """The problems with their gold answers as ``solution``, and which row of the data set each training problem is.

    Overlapping ones may have been dropped.

    Args:
        section: The recipe's ``data``.
        gold: The column of the gold answers.
    """
    from perl.data import load_problem_set, prompt_text

    sources = (section.train, section.eval or section.train)
    if gold == "solution" and all(source.columns.answer is None for source in sources):
        hint = "columns: {answer: NAME}, the column that holds the gold answer"
        raise DataError("there are no gold answers to check", "data.train", hint)
    # Without a model it is not known whether it has a chat template; a system prompt needs one.
    chat = bool(section.system_prompt)
    problems = load_problem_set(section, chat=chat)
    heldout = None if problems.heldout is None else _with_solution(problems.heldout, gold)
    problems = replace(problems, train=_with_solution(problems.train, gold), heldout=heldout)
    if not section.drop_overlap:
        return problems, range(len(problems.train))
    kept = {prompt_text(prompt) for prompt in problems.train["prompt"]}
    everything = load_problem_set(section.model_copy(update={"eval": None}), chat=chat).train["prompt"]
    return problems, [row for row, prompt in enumerate(everything) if prompt_text(prompt) in kept]


def _with_solution(rows: "Dataset", gold: str) -> "Dataset":
    """The rows with another column's answers as ``solution``."""
    if gold == "solution" or gold not in rows.column_names:
        return rows
    others = [name for name in rows.column_names if name != "solution"]
    return rows.select_columns(others).add_column("solution", rows[gold][:])


def _checked(
    role: str, name: str, problems: "Dataset", rows: Sequence[int], limit: int | None, judging: "Judging"
) -> CheckedSet:
    """The verdicts on a set's gold answers.

    Args:
        role: train or eval.
        name: The set's.
        problems: With ``solution``.
        rows: Of each problem, in the data set.
        limit: How many to check; None: all.
        judging: The limits of a comparison.
    """
    from perl.rewards.verifier import unreadable
    from perl.run.progress import live_line

    golds: list[str] = problems["solution"][:]
    chosen = list(_evenly(len(golds), limit))
    failing: list[FailingRow] = []
    letters = right = 0
    with live_line(len(chosen), f"checking {role}") as line:
        for start in range(0, len(chosen), _AT_A_TIME):
            part = chosen[start : start + _AT_A_TIME]
            bad = set(unreadable([golds[i] for i in part], judging.workers))
            statuses = _statuses([golds[i] for i in part], judging)
            right += statuses.count("right")
            letters += len(bad)
            for k, status in enumerate(statuses):
                if status != "right" or k in bad:
                    found = "unparsable_gold" if k in bad else status
                    failing.append(FailingRow(rows[part[k]] + 1, golds[part[k]], found))
            line.update(len(part))
    return CheckedSet(role, name, len(golds), len(chosen), right, letters, failing)


def _statuses(golds: Sequence[str], judging: "Judging") -> list[str]:
    """The first status that is not right of each gold answer: boxed, and as it stands if that is a worked solution."""
    from perl.rewards.verifier import check_all

    pairs: list[tuple[int, str]] = []
    for k, gold in enumerate(golds):
        pairs.append((k, _boxed(gold)))
        if "####" in gold or "\\boxed" in gold:
            pairs.append((k, gold))
    verdicts = check_all(
        [golds[k] for k, _ in pairs],
        [completion for _, completion in pairs],
        timeout_seconds=judging.timeout_seconds,
        workers=judging.workers,
    )
    statuses = ["right"] * len(golds)
    for (k, _), verdict in zip(pairs, verdicts, strict=True):
        if statuses[k] == "right":
            statuses[k] = verdict.status
    return statuses


def _boxed(gold: str) -> str:
    from perl.rewards.answers import gold_answer

    return f"\\boxed{{{gold_answer(gold)}}}"


def _reward_of_gold(reward: "Reward", problems: "Dataset", own_names: Mapping[str, str]) -> RewardOfGold:
    """The mean of what a reward gives the boxed gold answers; it is skipped where it needs more than the data holds."""
    from perl.rewards.named import MADE_REWARDS
    from perl.rewards.resolve import by_own_names
    from perl.rewards.workers.pool import WorkerStartError

    columns = problems.to_dict()
    prompts = columns.pop("prompt")
    messages = not isinstance(prompts[0], str)
    boxed = [_boxed(gold) for gold in columns["solution"]]
    completions = [[{"role": "assistant", "content": text}] for text in boxed] if messages else boxed
    given = {**columns, "prompts": prompts, "completions": completions}
    own = {} if reward.failures is None else by_own_names(given, own_names)
    missing = [name for name in reward.needs if name not in {**given, **own}]
    if reward.name in MADE_REWARDS:
        return RewardOfGold(reward.name, skipped="it loads a model")
    if missing:
        return RewardOfGold(reward.name, skipped=f"it needs {', '.join(missing)}, which the data does not have")
    if not reward.takes_all:
        return RewardOfGold(reward.name, skipped="it must accept **kwargs: every column is handed to every reward")
    try:
        values = _called(reward.function, given)
    except WorkerStartError as error:
        return RewardOfGold(reward.name, skipped=str(error))
    except (ValueError, TypeError) as error:  # a column of the data that holds something else
        return RewardOfGold(reward.name, skipped=f"it failed: {error}")
    if reward.failures is not None and reward.failures.count:
        failed = f"it failed for {reward.failures.count} of {len(boxed)}: {reward.failures.newest}"
        return RewardOfGold(reward.name, skipped=failed)
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    if not numbers:
        return RewardOfGold(reward.name, skipped="it gives None to all of them")
    return RewardOfGold(reward.name, mean=math.fsum(numbers) / len(numbers))


def _called(function: Callable[..., Any], given: dict[str, Any]) -> list[float | None]:
    values = function(**given)
    if inspect.isawaitable(values):
        import asyncio

        values = asyncio.run(_awaited(values))
    return list(values)


async def _awaited(values: Any) -> Any:  # noqa: ANN401 (what a reward returns)
    return await values


def _evenly(count: int, limit: int | None) -> Sequence[int]:
    """At most ``limit`` positions of ``count``, evenly spaced, the first among them."""
    return range(count) if limit is None or limit >= count else [i * count // limit for i in range(limit)]


def _lines(sets: Sequence[CheckedSet], others: Sequence[RewardOfGold]) -> list[str]:
    lines = []
    for checked in sets:
        among = "" if checked.checked == checked.problems else f"{checked.checked:,} of "
        letters = f", {checked.unreadable:,} only letter for letter" if checked.unreadable else ""
        lines.append(
            f"{checked.role:5}  {_one_line(checked.name)}: {among}{checked.problems:,} gold answers, "
            f"{checked.right:,} right{letters}"
        )
        for row in checked.failing[:_LISTED_ROWS]:
            lines.append(f"  row {row.row}: {row.status.replace('_', ' ')}: {_one_line(row.gold)}")
        if len(checked.failing) > _LISTED_ROWS:
            lines.append(f"  and {len(checked.failing) - _LISTED_ROWS:,} more")
    for other in others:
        text = f"mean {other.mean:.3f}" if other.mean is not None else f"skipped, {_one_line(other.skipped, 200)}"
        lines.append(f"reward {other.name} of the training set's boxed gold answers: {text}")
    failing = sum(len(checked.failing) for checked in sets)
    if failing == 1:
        lines.append("1 row gives right completions no reward: drop or rewrite it")
    elif failing:
        lines.append(f"{failing:,} rows give right completions no reward: drop or rewrite them")
    return lines


def _one_line(text: str, longest: int = _SHOWN_CHARACTERS) -> str:
    """The beginning of a text, without what a terminal would act on."""
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return line if len(line) <= longest else f"{line[:longest]}..."
