"""A reward as a scorer: a completion is right if its reward is as high as a threshold.

``my_rewards.py:function``, ``package.module:function`` or a named reward, perhaps ``>=0.5`` -> Scorer

The function is found and called as a recipe's with ``workers`` is: in worker processes that are killed when they
overrun. A completion that it fails on has the status ``error``; as in training more than 16 of them end it all.
"""

import asyncio
import inspect
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perl.data import ORIGINAL, TAKEN_NAMES
from perl.errors import Mistake, PerlError, RewardError, did_you_mean, raise_all
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.scorers import SCORERS, Scorer
from perl.evaluation.scoring.task import Question
from perl.recipe.eval_section import SCORER_SECONDS
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import RewardSetting
from perl.rewards.answers import conclusion, extract_answer
from perl.rewards.custom import Failures, shown_prompt, unsendable
from perl.rewards.named import NAMED_REWARDS
from perl.rewards.resolve import GOLD, Reward, resolve_rewards, reward_mistakes
from perl.rewards.verifier import Judging
from perl.run.code import code_digest, module_of_file
from perl.run.workers.pool import LONGEST_LIMIT_SECONDS
from perl.types import Verdict

# What a reward may ask for beside the columns; an evaluation keeps texts, not tokens.
_GIVEN = {"prompts", "completions", "solution"}
_ONLY_JSON = "--scorer-timeout 0, in a recipe eval.scorer_timeout: 0, calls it in this process, without a limit"
_GOES_ON = "None is for what it cannot score; corrected, the same command goes on with the completions that are kept"


def find_scorer(spec: str, where: str = "--scorer", timeout_seconds: float = SCORER_SECONDS) -> Scorer:
    """The scorer of a name.

    Args:
        spec: A name of :data:`perl.evaluation.scoring.scorers.SCORERS`, or a reward with or without ``>=NUMBER``.
        where: What the user named it in.
        timeout_seconds: What a user's reward may take for a completion, wall time; 0: there is no limit, and it is
            called in this process.

    Raises:
        PerlError: There is no such scorer or reward, its module fails, or no limit is so long.
    """
    name, at_least, text = (part.strip() for part in spec.partition(">="))
    try:
        threshold = float(text) if at_least else None
    except ValueError:
        threshold = math.nan
    if threshold is not None and not math.isfinite(threshold):
        what = f"{text!r} is not a number, at which a reward counts as right"
        raise PerlError(what, where, f"as in {name or 'my_rewards.py:function'}>=0.5")
    if spec in SCORERS:
        return SCORERS[spec]
    if name not in NAMED_REWARDS and ":" not in name:
        hint = did_you_mean(spec, SCORERS)
        custom = "a reward is my_rewards.py:function or package.module:function"
        raise PerlError(f"no scorer {spec!r}", where, f"{hint} {custom}" if hint.endswith("?") else f"{hint}; {custom}")
    file, _, function = name.rpartition(":")
    named = f"{module_of_file(file, where, 'my_rewards.py:function')}:{function}" if file.endswith(".py") else name
    setting = RewardSetting()
    if timeout_seconds and named not in NAMED_REWARDS:
        setting = RewardSetting(workers=2, timeout_seconds=timeout_seconds)
    found = reward_mistakes({"rewards": {named: setting}})
    raise_all(PerlError, [Mistake(mistake.message, where, mistake.hint) for _, mistake in found])
    [reward] = resolve_rewards({named: setting}, RolloutSection())
    if reward.failures is not None:
        reward.failures.lines = 3
    return _of_reward(reward, named if threshold is None else f"{named}>={threshold:g}", threshold)


def check_scorer_timeout(seconds: float) -> None:
    """Refuses what is no limit of a call.

    Raises:
        PerlError: It is negative, no number, or longer than a day.
    """
    if not 0 <= seconds <= LONGEST_LIMIT_SECONDS:
        what = f"{seconds:g} is out of range"
        raise PerlError(what, "--scorer-timeout", f"seconds up to {LONGEST_LIMIT_SECONDS:.0f}, or 0 for no limit")


def check_judged(scorer: Scorer, samples: Iterable[Sample], task: str) -> None:
    """Refuses verdicts that say nothing of the completions.

    Args:
        scorer: Gave them.
        samples: Of a task, of all policies.
        task: Its name.

    Raises:
        RewardError: A user's reward failed on every one of them.
    """
    failures = scorer.failures
    if failures is None:
        return
    every = list(samples)
    if failures.count and every and all(sample.status == "error" for sample in every):
        raise _failed(failures, f"on all {len(every)} completions of {task}")


def _failed(failures: Failures, on: str) -> RewardError:
    newest = failures.newest.removeprefix(f"reward {failures.name}: ")
    longer = "--scorer-timeout SECONDS, in a recipe eval.scorer_timeout, is what it may take; the completions are kept"
    hint = longer if newest.startswith("timeout") else _GOES_ON
    return RewardError(f"failed {on}, at last: {newest}", f"reward {failures.name}", hint)


def _of_reward(reward: Reward, name: str, threshold: float | None) -> Scorer:
    least, failures = 1.0 if threshold is None else threshold, reward.failures

    def verdicts(asked: Sequence[Question], texts: Sequence[str], _: Judging) -> list[Verdict]:
        if failures is not None:
            failures.samples = [f"problem {one.id}, {shown_prompt(_prompt(one))!r}" for one in asked]
        values = _called(reward, _arguments(reward, asked, texts)) if texts else []
        if failures is not None and failures.too_many:
            raise _failed(failures, f"on {failures.count} completions")
        return [
            Verdict(
                "error" if value is None else "right" if value >= least else "wrong",
                extract_answer(text) or conclusion(text).strip() or None,  # what votes are counted by
            )
            for value, text in zip(values, texts, strict=True)
        ]

    def lacking(question: Question) -> Mistake | None:
        known = {*_GIVEN, *question.row, *(["answer"] if failures is not None else [])}
        missing = [column for column in reward.needs if column not in known]
        if not missing:
            named = {name: value for name, value in question.row.items() if name in {*reward.needs, *reward.by_name}}
            unsent = unsendable(named) if reward.in_workers else None
            return None if unsent is None else Mistake(f"the scorer {name}: {unsent}", hint=_ONLY_JSON)
        there = f"there are {', '.join(sorted(known))}"
        hint = "an evaluation keeps texts" if missing[0] == "completion_ids" else there
        return Mistake(f"the scorer {name} needs the column {missing[0]!r}", hint=hint)

    source = "" if failures is None else code_digest(reward.name)
    return Scorer(name, verdicts, lacking=lacking, source=source, failures=failures)


def _arguments(reward: Reward, asked: Sequence[Question], texts: Sequence[str]) -> dict[str, list[Any]]:
    """What training hands to a reward, but for tokens and the trainer's own."""
    prompts = [_prompt(question) for question in asked]
    chat = [not isinstance(prompt, str) for prompt in prompts]
    completions = [
        [{"role": "assistant", "content": text}] if talks else text for text, talks in zip(texts, chat, strict=True)
    ]
    names = dict.fromkeys(column for question in asked for column in question.row if column not in _GIVEN | {"prompt"})
    columns = {
        f"{ORIGINAL}{column}" if column in TAKEN_NAMES else column: [question.row.get(column) for question in asked]
        for column in names
    }
    golds = [question.gold for question in asked]
    given = {**columns, "prompts": prompts, "completions": completions, GOLD: golds}
    if reward.failures is not None:  # as in training: a custom reward's solution is the data's column, if there is one
        given.setdefault("answer", golds)
        if all(GOLD in question.row for question in asked) and (GOLD in reward.by_name or GOLD not in reward.needs):
            given[GOLD] = [question.row[GOLD] for question in asked]
    wanted = {*reward.needs, *reward.by_name}
    if reward.takes_all:  # dates of a data file, say, go to no worker: whoever needs them asks for them by name
        return {k: v for k, v in given.items() if k in wanted or not (reward.in_workers and unsendable({k: v}))}
    return {name: values for name, values in given.items() if name in wanted}


def _prompt(question: Question) -> Any:  # noqa: ANN401 (text or chat messages)
    if question.prompt is None:
        return [{"role": "user", "content": question.text}]
    return question.prompt if isinstance(question.prompt, str) else list(question.prompt)


def _called(reward: Reward, arguments: dict[str, list[Any]]) -> list[float | None]:
    values = reward.function(**arguments)
    if inspect.isawaitable(values):
        waited = values

        async def awaited() -> list[float | None]:
            found: list[float | None] = await waited
            return found

        with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own in this one
            return thread.submit(asyncio.run, awaited()).result()
    found: list[float | None] = values
    return found
