"""In what the protocols of several evaluations differ, task by task.

Results of several -> what does not agree; the settings of each

Scores under different protocols are compared only on demand, and then each row says its own settings.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perl.evaluation.protocol import ASKED
from perl.evaluation.results import Results

SHORT_SHA = 12
"""Digits of a hash that tell policies apart."""
_LONGEST_SETTING = 40
_OF_THE_TASK = "the prompt or the version of the task"


def conflicts_of(
    results: Sequence[Results], names: Sequence[str], tasks: Mapping[str, str]
) -> dict[tuple[int, str], str]:
    """Number of a result and task -> how it was evaluated otherwise than by the first result that has the task.

    Args:
        results: That are compared.
        names: What they are called.
        tasks: Name -> title of those that are looked at.
    """
    found: dict[tuple[int, str], str] = {}
    for task, title in tasks.items():
        first, *others = _asked(results, task)
        for i in others:
            if results[i].task(task).protocol_hash != results[first].task(task).protocol_hash:
                keys, (one, two) = _telling(results, [first, i], task)
                how = (
                    ", ".join(f"{key} {_shown(key, one[key])} and {_shown(key, two[key])}" for key in keys)
                    or _OF_THE_TASK
                )
                found[i, task] = f"{title} was evaluated otherwise in {names[first]} and in {names[i]}: {how}"
    return found


def ways_of(results: Sequence[Results], tasks: Collection[str]) -> list[str]:
    """Of each result the settings in which it differs from another one, ``temperature 0.6, k 4``.

    Args:
        results: That are compared.
        tasks: Whose protocols differ.

    Returns:
        A text for each; an empty one where it was asked none of these tasks.
    """
    found: list[dict[str, list[str]]] = [{} for _ in results]
    for task in sorted(tasks):
        asked = _asked(results, task)
        keys, settings = _telling(results, asked, task)
        if not keys:
            keys, settings = ["protocol"], [{"protocol": results[i].task(task).protocol_hash} for i in asked]
        for i, own in zip(asked, settings, strict=True):
            for key in keys:
                values, value = found[i].setdefault(key, []), _shown(key, own[key]).strip("'")
                values += [] if value in values else [value]
    return [", ".join(f"{key} {'/'.join(values)}" for key, values in one.items()) for one in found]


def _asked(results: Sequence[Results], task: str) -> list[int]:
    return [i for i, result in enumerate(results) if any(one.name == task for one in result.tasks)]


def _telling(results: Sequence[Results], numbers: Sequence[int], task: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The settings in which some differ, and what each has: as they were for the task, else as they were asked for."""
    settings = [_settings(results[i], task) for i in numbers]
    if not _differing(settings):
        settings = [{**results[i].protocol.drawn(), "k": results[i].protocol.k} for i in numbers]
    return _differing(settings), settings


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names under which not all have the same."""
    first, *others = settings
    return [name for name in first if any(other[name] != first[name] for other in others)]


def _settings(results: Results, task: str) -> dict[str, Any]:
    """Settings as they were for a task, and its data."""
    found = results.task(task)
    used = {"max_new_tokens": found.max_new_tokens, "k": found.score.k, "data sha256": found.data.get("sha256")}
    asked = {name: results.subject.get(name) for name in ASKED}
    return {**results.protocol.drawn(), **used, "examples": found.few_shot, "scorer": found.scorer, **asked}


def _shown(key: str, value: object) -> str:
    if key == "scorer":
        return str(value)  # whole: digits of its code may be all that differs
    if value is None:
        return "none"
    if isinstance(value, str):
        is_hash = len(value) == 64 and " " not in value
        return value[:SHORT_SHA] if is_hash else repr(textwrap.shorten(value, _LONGEST_SETTING, placeholder="..."))
    return f"{value:g}" if isinstance(value, float) else str(value)
