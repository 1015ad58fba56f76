r"""Whether a recipe's rewards give right answers their due, before a model is loaded.

Recipe, problems -> means by kind of text; verdicts on the gold answers, each as the completion ``\boxed{gold answer}``

Custom rewards are called in a worker process, so that one that hangs is stopped and none keeps what it counted here.
Imports no torch.
"""

import asyncio
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset

from perl.data import OF_TRL, ProblemSet, load_problem_set
from perl.errors import DataError, Mistake, PerlError, RecipeError, raise_all, warn
from perl.recipe import Recipe
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import RewardSetting
from perl.rewards import Reward, resolve_rewards
from perl.rewards.answers import gold_answer
from perl.rewards.custom import Failures, row_of, unsendable
from perl.rewards.named import MADE_REWARDS
from perl.rewards.resolve import GOLD, by_own_names
from perl.rewards.verifier import Judging, check_all, unreadable
from perl.run.progress import live_line
from perl.run.workers.pool import WorkerPool

ROWS = 16
"""Problems that are tried, evenly spaced."""
RIGHT = ("boxed", "sentence", "tagged")
"""Kinds of texts that hold the gold answer; a reward may ask for one form and give nothing to the others."""
# A worker's time for a text, where the recipe sets none: in training the function may take as long as it likes.
_TIMEOUT_SECONDS = 60.0
_OF_A_GPU = re.compile(r"cuda|nvidia|gpu|accelerator", re.IGNORECASE)
_LISTED_ROWS = 20
# Rows that are compared at a time, between two drawings of the live line.
_AT_A_TIME = 200
# Words that are no LaTeX, one fewer beside a comma: of 2,900 gold answers of GSM8K, MATH-500, AIME, AMC, HMMT, Minerva
# and OlympiadBench one has so many, and a unit, as in "5 square feet per second", has fewer.
_WORDS_OF_A_SENTENCE = 5
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_PAUSE = re.compile(r"[a-z][,;.] ")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{")


@dataclass(frozen=True)
class RewardTrial:
    """What became of one reward.

    Attributes:
        means: By kind of text: ``boxed``, ``sentence``, ``tagged`` (right), ``wrong``, ``empty``; ``text`` where there
            are no gold answers. Empty if it was skipped or always failed.
        skipped: Why it was not called.
        problem: What is wrong with it.
        useless: Whether no text got a number, by a failure that training would meet too: there nothing limits the time
            of a call, and a GPU may be at hand, which a worker lacks.
    """

    name: str
    means: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    problem: str = ""
    useless: bool = False

    def line(self) -> str:
        """For a person to read."""
        means = ", ".join(f"{kind} {mean:.3g}" for kind, mean in self.means.items())
        return f"reward {self.name}: {'; '.join(filter(None, (means, self.problem, self.skipped)))}"


def try_rewards(recipe: Recipe, problems: ProblemSet) -> list[RewardTrial]:
    """Calls each reward on texts for some training problems; what is wrong with their sum is that of the last trial.

    Args:
        recipe: Names the rewards.
        problems: With ``solution``, where they have gold answers.
    """
    count = len(problems.train)
    rows = problems.train.select(range(0, count, -(-count // ROWS)))
    rewards = resolve_rewards(recipe.rewards, recipe.rollout, problems.own_names)
    trials = [_tried(reward, recipe.rewards[reward.name], rows, problems.own_names) for reward in rewards]
    used = [(reward.weight, trial) for reward, trial in zip(rewards, trials, strict=True) if reward.weight]
    judged = all("wrong" in trial.means and not trial.problem for _, trial in used)
    if not judged or all(reward.failures is None for reward in rewards) or not used:  # named ones are not doubted
        return trials
    kinds = [kind for kind in ("wrong", "empty") if any(kind in trial.means for _, trial in used)]
    sums = {kind: sum(weight * trial.means.get(kind, 0.0) for weight, trial in used) for kind in (*RIGHT, *kinds)}
    best, other = max(sums[kind] for kind in RIGHT), max(kinds, key=sums.__getitem__)
    if best > sums[other]:
        return trials
    what = f"the sum of the rewards is {best:.3g} for right answers at best, and {sums[other]:.3g} for {other} ones"
    return [*trials[:-1], replace(trials[-1], problem=what)]


def check_rewards_work(recipe: Recipe, problems: ProblemSet) -> None:
    """Refuses custom rewards that give no text a number, and warns of those that cannot tell right from wrong.

    Rewards of weight 0 are not tried.

    Raises:
        RecipeError: With a line for each that always fails.
    """
    counted = {name: setting for name, setting in recipe.rewards.items() if setting.weight}
    if all(":" not in name for name in counted):
        return
    trials = try_rewards(replace(recipe, rewards=counted), problems)
    hint = "`perl reward check` tries it"
    raise_all(RecipeError, [Mistake(one.problem, f"rewards.{one.name}", hint) for one in trials if one.useless])
    for one in trials:
        if one.problem:
            warn("PRL348", "reward %s", f"{one.name} {one.problem}")


def _tried(reward: Reward, setting: RewardSetting, rows: Dataset, own_names: Mapping[str, str]) -> RewardTrial:
    columns = rows[:]
    prompts = columns.pop("prompt")
    own = {} if reward.failures is None else by_own_names(columns, own_names)
    missing = [name for name in reward.needs if name not in {**columns, **own, "prompts": (), "completions": ()}]
    refused = [name for name in missing if name not in OF_TRL]
    if refused or not reward.takes_all:
        column = f"needs {', '.join(refused)}, which the data does not have"
        return RewardTrial(reward.name, problem=column if refused else "must accept **kwargs", useless=True)
    skipped = f"it needs {', '.join(missing)}" if missing else ""  # of TRL, in training only
    if reward.name in MADE_REWARDS:
        skipped = "it loads a model"
    elif reward.failures is not None and not missing:
        skipped = unsendable({name: values[0] for name, values in columns.items()}) or ""
    if skipped:
        return RewardTrial(reward.name, skipped=f"not tried, {skipped}")
    texts = _texts(columns.get(GOLD), len(prompts))
    given = {**columns, "prompts": prompts}
    try:
        if reward.failures is None:
            called = {kind: _Called(_values(reward, _of(given, one))) for kind, one in texts.items()}
        else:
            arguments = {kind: _of(given, one) for kind, one in texts.items()}
            called = _in_a_worker(reward.name, setting, own_names, arguments)
    except (PerlError, ValueError, TypeError) as error:  # a column of the data that holds something else
        return RewardTrial(reward.name, problem=f"failed: {error}", useless=True)
    return _judged(reward, called)


def _texts(golds: Sequence[str] | None, count: int) -> dict[str, list[str]]:
    """Texts of each kind for each problem; wrong ones have the answer of another problem."""
    if golds is None:
        return {"text": ["The answer is \\boxed{42}."] * count, "empty": [""] * count}
    answers = [gold_answer(gold) for gold in golds]
    others = [
        next((other for other in (*answers[i:], *answers) if other != one), f"{one}1") for i, one in enumerate(answers)
    ]
    return {
        "boxed": [f"\\boxed{{{one}}}" for one in answers],
        "sentence": [f"Let me think step by step.\n\nThe answer is {one}" for one in answers],
        "tagged": [f"<think>\nLet me think step by step.\n</think>\n<answer>{one}</answer>" for one in answers],
        "wrong": [f"Let me think step by step.\n\nThe answer is \\boxed{{{one}}}." for one in others],
        "empty": [""] * count,
    }


def _of(given: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call with texts of one kind, as messages where the prompts are some."""
    plain = isinstance(given["prompts"][0], str)
    completions = [text if plain else [{"role": "assistant", "content": text}] for text in texts]
    return {**given, "completions": completions}


def _values(reward: Reward, arguments: Mapping[str, Any]) -> list[float | None]:
    values = reward.function(**arguments)
    if not inspect.isawaitable(values):
        return list(values)

    async def awaited() -> Any:  # noqa: ANN401 (as many as texts)
        return await values

    return list(asyncio.run(awaited()))


def _in_a_worker(
    name: str, setting: RewardSetting, own_names: Mapping[str, str], arguments: Mapping[str, Mapping[str, Any]]
) -> dict[str, "_Called"]:
    """Calls a custom reward with one text, and unless that took too long with those of each kind."""
    alone = {**setting.model_dump(), "workers": None, "timeout_seconds": None}
    limit = setting.timeout_seconds or _TIMEOUT_SECONDS
    pool = WorkerPool(
        f"{__name__}:{call_in_worker.__name__}", workers=1, timeout_seconds=limit, imports=[name.partition(":")[0]]
    )
    found: dict[str, _Called] = {}
    try:
        for kind, every in (("one text", _alone(next(iter(arguments.values())))[0]), *arguments.items()):
            [outcome] = pool.map([(name, alone, dict(own_names), every, setting.workers is not None)])
            count = len(every["completions"])
            if outcome.status == "done":
                found[kind] = _Called(*outcome.value)
            else:
                found[kind] = _Called([None] * count, count, f"{outcome.status}: {outcome.error}")
                break
    finally:
        pool.close()
    return {kind: called for kind, called in found.items() if kind != "one text"} or found


def call_in_worker(item: tuple[str, dict[str, Any], dict[str, str], dict[str, Any], bool]) -> list[Any]:
    """A custom reward's values, how many texts it failed on, and the newest failure; what the worker runs.

    Args:
        item: The reward's name and settings, names of columns, arguments, and whether it is called for one at a time.
    """
    name, setting, own_names, arguments, singly = item
    [reward] = resolve_rewards({name: RewardSetting.model_validate(setting)}, RolloutSection(), own_names)
    failures = reward.failures or Failures(name, 0)
    failures.lines = 0
    calls = _alone(arguments) if singly else [arguments]
    values = [value for call in calls for value in _values(reward, call)]
    return [values, failures.count, failures.newest.removeprefix(f"reward {failures.name}: ")]


def _alone(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a call with each text alone."""
    rows = len(arguments["completions"])
    return [row_of(arguments, row, rows) for row in range(rows)]


@dataclass(frozen=True)
class _Called:
    """What a reward gave to some texts, how many it failed on, and how."""

    values: list[float | None]
    failed: int = 0
    newest: str = ""


def _judged(reward: Reward, called: Mapping[str, _Called]) -> RewardTrial:
    numbers = {kind: [v for v in one.values if v is not None and not math.isnan(v)] for kind, one in called.items()}
    means = {kind: math.fsum(one) / len(one) for kind, one in numbers.items() if one}
    every, count = [v for one in numbers.values() for v in one], sum(len(one.values) for one in called.values())
    failed = sum(one.failed for one in called.values())
    newest = next((one.newest for one in called.values() if one.newest), "")
    alike = "wrong" in called and len({value for one in called.values() for value in one.values}) == 1
    problem = ""
    if not every:
        problem = f"failed for all texts that it was tried on: {newest}" if failed else "gives None to all texts"
    elif failed:
        problem = f"failed for {failed} of {count} texts: {newest}"
    elif reward.failures is not None and reward.weight and len(every) == count and alike:
        problem = f"gives {every[0]:g} to all {count} texts, right, wrong and empty ones"
    useless = not every and bool(failed) and not newest.startswith("timeout") and not _OF_A_GPU.search(newest)
    return RewardTrial(reward.name, means, problem=problem, useless=useless)


@dataclass(frozen=True)
class FailingRow:
    """A row of a data set whose gold answer the verifier does not judge right.

    Attributes:
        row: Counted from 1, in the data set as it was read.
        status: Of the verdict on it; ``unparsable_gold`` and ``a_sentence`` also where it is right letter for letter.
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
class GoldCheck:
    """What came of a recipe's gold answers.

    Attributes:
        chosen: Which training problems were taken.
        rows: Of each training problem, its row in the data set.
    """

    sets: list[CheckedSet]
    rewards: list[RewardTrial]
    chosen: Sequence[int]
    rows: Sequence[int]

    @property
    def failing(self) -> int:
        """Rows that give right completions no reward."""
        return sum(len(checked.failing) for checked in self.sets)

    @property
    def sound(self) -> bool:
        """Whether no row and no reward has something wrong with it."""
        return not self.failing and not any(one.problem for one in self.rewards)

    def lines(self) -> Iterator[str]:
        """For a person to read."""
        for checked in self.sets:
            among = "" if checked.checked == checked.problems else f"{checked.checked:,} of "
            letters = f", {checked.unreadable:,} only letter for letter" if checked.unreadable else ""
            counts = f"{among}{checked.problems:,} gold answers, {checked.right:,} right{letters}"
            yield f"{checked.role:5}  {beginning(checked.name)}: {counts}"
            for row in checked.failing[:_LISTED_ROWS]:
                yield f"  row {row.row}: {row.status.replace('_', ' ')}: {beginning(row.gold)}"
            if len(checked.failing) > _LISTED_ROWS:
                yield f"  and {len(checked.failing) - _LISTED_ROWS:,} more"
        yield from (beginning(one.line(), 300) for one in self.rewards)
        if self.failing:
            rows = "1 row gives" if self.failing == 1 else f"{self.failing:,} rows give"
            yield f"{rows} right completions no reward: drop or rewrite {'it' if self.failing == 1 else 'them'}"


def beginning(text: str, longest: int = 80) -> str:
    """Of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}..."


def check_gold_answers(recipe: Recipe, limit: int | None) -> GoldCheck:
    """Judges each gold answer as a completion; all should be right.

    Args:
        recipe: Names data and rewards.
        limit: Rows of each set, evenly spaced; None: all.

    Raises:
        PerlError: The data cannot be read, or has no gold answers.
    """
    rewards = resolve_rewards(recipe.rewards, recipe.rollout)
    judging = next((reward.judging for reward in rewards if reward.judging is not None), None) or Judging()
    section, gold = recipe.data, judging.solution
    with recipe.locating():
        if gold == "solution" and all(
            one.columns.answer is None for one in (section.train, section.eval or section.train)
        ):
            hint = "columns: {answer: NAME}, the column that holds the gold answer"
            raise DataError("there are no gold answers to check", "data.train", hint)
        # Without a model it is not known whether it has a chat template; a system prompt needs one.
        problems = load_problem_set(section, chat=bool(section.system_prompt))
    heldout = None if problems.heldout is None else _with_solution(problems.heldout, gold)
    problems = replace(problems, train=_with_solution(problems.train, gold), heldout=heldout)
    rows = range(len(problems.train)) if problems.rows is None else problems.rows  # overlapping ones may be dropped
    chosen = _evenly(len(problems.train), limit)
    sets: list[CheckedSet] = []
    tried: list[RewardTrial] = []
    if "solution" in problems.train.column_names:
        sets.append(_checked("train", recipe.data.train.name, problems.train, rows, limit, judging))
        tried = try_rewards(recipe, problems)
    if problems.heldout is not None and "solution" in problems.heldout.column_names:
        of_heldout, name = range(len(problems.heldout)), problems.heldout_name or ""
        sets.append(_checked("eval", name, problems.heldout, of_heldout, limit, judging))
    return GoldCheck(sets, tried, chosen, rows)


def _evenly(count: int, limit: int | None) -> Sequence[int]:
    """At most ``limit`` positions of ``count``, evenly spaced, the first among them."""
    return range(count) if limit is None or limit >= count else [i * count // limit for i in range(limit)]


def _with_solution(rows: Dataset, gold: str) -> Dataset:
    """The rows with another column's answers as ``solution``."""
    if gold == "solution" or gold not in rows.column_names:
        return rows
    others = [name for name in rows.column_names if name != "solution"]
    return rows.select_columns(others).add_column("solution", rows[gold][:])


def _checked(
    role: str, name: str, problems: Dataset, rows: Sequence[int], limit: int | None, judging: Judging
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
    golds: list[str] = problems["solution"][:]
    chosen = list(_evenly(len(golds), limit))
    failing: list[FailingRow] = []
    letters = right = 0
    with live_line(len(chosen), f"checking {role}") as line:
        for start in range(0, len(chosen), _AT_A_TIME):
            part = chosen[start : start + _AT_A_TIME]
            bad = set(unreadable([golds[i] for i in part], judging.workers))
            # The first status that is not right: boxed, and as it stands if it is a worked solution.
            pairs = [(k, f"\\boxed{{{gold_answer(golds[i])}}}") for k, i in enumerate(part)]
            pairs += [(k, golds[i]) for k, i in enumerate(part) if "####" in golds[i] or "\\boxed" in golds[i]]
            asked, completions = [golds[part[k]] for k, _ in pairs], [completion for _, completion in pairs]
            verdicts = check_all(asked, completions, timeout_seconds=judging.timeout_seconds, workers=judging.workers)
            statuses = ["right"] * len(part)
            for (k, _), verdict in zip(pairs, verdicts, strict=True):
                statuses[k] = verdict.status if statuses[k] == "right" else statuses[k]
            right += statuses.count("right")
            letters += len(bad)
            for k, status in enumerate(statuses):
                # Words that no completion will repeat, where only those are right.
                answer = _TEXT.sub(" ", gold_answer(golds[part[k]]))
                sentence = len(_WORD.findall(answer)) + bool(_PAUSE.search(answer)) >= _WORDS_OF_A_SENTENCE
                if status != "right" or k in bad or sentence:
                    found = "unparsable_gold" if k in bad else "a_sentence" if sentence else status
                    failing.append(FailingRow(rows[part[k]] + 1, golds[part[k]], found))
            line.update(len(part))
    return CheckedSet(role, name, len(golds), len(chosen), right, letters, failing)
