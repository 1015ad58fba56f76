"""Where two records are not equal, and how that is reported of a results file or of samples.

expected, found -> leaves that differ; TaskResult, message -> Mistake
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perl.errors import Mistake
from perl.evaluation.results import RESULTS, SAMPLES, TaskResult, Who

AGAIN = "perl eval writes it anew"
_TOLERANCE = 1e-9
_ABSENT = object()


def unequal(expected: object, found: object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Leaves that are not equal: where, what is expected, what is there."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            yield from unequal(expected.get(key, _ABSENT), found.get(key, _ABSENT), (*place, str(key)))
    elif not _same(expected, found):
        yield place, expected, found


def _same(one: object, other: object) -> bool:
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)]
    if not all(numbers):
        return type(one) is type(other) and one == other
    if math.isnan(float(one)) or math.isnan(float(other)):  # type: ignore[arg-type]
        return math.isnan(float(one)) and math.isnan(float(other))  # type: ignore[arg-type]
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)  # type: ignore[arg-type]


def mistake_of(task: TaskResult, message: str, hint: str = AGAIN) -> Mistake:
    """What is wrong with a task's results."""
    return Mistake(message, f"{RESULTS}: {task.name}", hint)


def mistake_of_samples(task: TaskResult, who: Who, places: Sequence[tuple[str, int]], message: str) -> Mistake:
    """What is wrong with some samples of a policy on a task."""
    problem, index = places[0]
    return Mistake(f"{message}; the first is number {index} of problem {problem!r}", f"{SAMPLES}: {task.name}, {who}")


def path_of(place: Sequence[str]) -> str:
    """A leaf's place, with dots."""
    return ".".join(place)[:100]


def shown(value: object) -> str:
    """A value as a line may hold it."""
    if value is _ABSENT:
        return "absent"
    return f"{value:.10g}" if isinstance(value, float) else repr(value)[:80]


def marks(row: Sequence[bool] | None) -> str:
    """Rights and wrongs as ones and zeros."""
    return "none" if row is None else "".join("1" if right else "0" for right in row)[:64]
