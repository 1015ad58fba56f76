"""A reward as a scorer: a completion is right if its reward is as high as a threshold.

``my_rewards.py:function``, ``package.module:function`` or a recipe's own name, perhaps ``>=0.5`` -> Scorer

The function is found, called and guarded as a recipe's is: a completion that it fails on has the status ``error``.
"""

import asyncio
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from perl.data import ORIGINAL, TAKEN_NAMES
from perl.errors import Mistake, PerlError, did_you_mean, raise_all
from perl.evaluation.scorers import SCORERS, Scorer
from perl.evaluation.task import Question
from perl.recipe.sections import RewardSetting, RolloutSection
from perl.rewards.answers import conclusion, extract_answer
from perl.rewards.named import NAMED_REWARDS
from perl.rewards.resolve import GOLD, Reward, resolve_rewards, reward_mistakes
from perl.rewards.verifier import Judging
from perl.types import Verdict

_THRESHOLD = re.compile(r"(.+?)\s*>=\s*(-?[0-9.]+(?:e-?[0-9]+)?)\s*", re.IGNORECASE)
_USUAL = 1.0
# What a reward may ask for beside the columns; an evaluation keeps texts, not tokens.
_GIVEN = {"prompts", "completions", "solution"}
_NOT_KEPT = "completion_ids"
# Failures that are said, each in a line of its own.
_MOST_LINES = 3


def find_scorer(spec: str, rewards: Mapping[str, RewardSetting] | None = None, where: str = "--scorer") -> Scorer:
    """The scorer of a name.

    Args:
        spec: A name of :data:`perl.evaluation.scorers.SCORERS`, or a reward with or without ``>=NUMBER``.
        rewards: Of a recipe, by the names that it gives them.
        where: What the user named it in.

    Raises:
        PerlError: There is no such scorer or reward, or its module fails.
    """
    match = _THRESHOLD.fullmatch(spec)
    name, threshold = (match[1], float(match[2])) if match else (spec.strip(), None)
    if name in SCORERS and threshold is None:
        return SCORERS[name]
    if name in SCORERS:
        raise PerlError(f"{name} takes no threshold", where, f"{name} alone, or a reward with one")
    settings = dict(rewards or {})
    if name not in settings and name not in NAMED_REWARDS and ":" not in name:
        hint = did_you_mean(name, [*SCORERS, *settings])
        custom = "a reward is my_rewards.py:function or package.module:function"
        raise PerlError(f"no scorer {name!r}", where, f"{hint} {custom}" if hint.endswith("?") else f"{hint}; {custom}")
    named = name if name in settings else _importable(name, where)
    setting = settings.get(named, RewardSetting())
    found = reward_mistakes({"rewards": {named: setting}})
    raise_all(PerlError, [Mistake(mistake.message, where, mistake.hint) for _, mistake in found])
    [reward] = resolve_rewards({named: setting}, RolloutSection())
    if reward.failures is not None:
        reward.failures.lines = _MOST_LINES
    return _of_reward(reward, named if threshold is None else f"{named}>={threshold:g}", threshold)


def _importable(name: str, where: str) -> str:
    """``folder/my_rewards.py:function`` as ``my_rewards:function``, its folder being looked in last."""
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        return name
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise PerlError(f"no such file: {file}", where, "my_rewards.py:function")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules.get(path.stem)
    found = _file_of(path.stem) if module is None else getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise PerlError(f"{path.stem} is the name of another module, {found or 'built in'}", where, "rename the file")
    return f"{path.stem}:{function}"


def _file_of(module: str) -> str | None:
    """Where a module would be imported from."""
    from importlib.util import find_spec

    spec = find_spec(module)
    return None if spec is None else spec.origin


def _of_reward(reward: Reward, name: str, threshold: float | None) -> Scorer:
    least = _USUAL if threshold is None else threshold

    def verdicts(asked: Sequence[Question], texts: Sequence[str], _: Judging) -> list[Verdict]:
        values = _called(reward, _arguments(reward, asked, texts)) if texts else []
        return [
            Verdict("error" if value is None else "right" if value >= least else "wrong", _answer(text))
            for value, text in zip(values, texts, strict=True)
        ]

    def lacking(question: Question) -> Mistake | None:
        known = {*_GIVEN, *question.row, *(["answer"] if reward.failures is not None else [])}
        missing = [column for column in reward.needs if column not in known]
        if not missing:
            return None
        hint = "an evaluation keeps texts" if missing[0] == _NOT_KEPT else f"there are {', '.join(sorted(known))}"
        return Mistake(f"the scorer {name} needs the column {missing[0]!r}", hint=hint)

    return Scorer(name, verdicts, custom=True, lacking=lacking)


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
    if reward.takes_all:
        return given
    return {name: values for name, values in given.items() if name in {*reward.needs, *reward.by_name}}


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


def _answer(text: str) -> str | None:
    """What the completions' votes are counted by: the answer that is announced, else the conclusion."""
    return extract_answer(text) or conclusion(text).strip() or None
