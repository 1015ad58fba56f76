r"""The outcome rewards: is the final answer right, or right in part?

completions, gold answers -> 1, 0 or None a completion, or the share of characters that stand in their places

Answers are found in ``answers.py`` and compared in ``verifier/``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from perl.errors import did_you_mean
from perl.rewards.answers import REASONING_END, Completions, completion_text, extract_answer, gold_answer
from perl.rewards.verifier import TIMEOUT_SECONDS, WORKERS, check_all
from perl.types import VerdictStatus

LogMetric = Callable[[str, float], None]
LogExtra = Callable[[str, list[Any]], None]

# Verdicts whose share of the completions is logged; the mean of the reward is that of "right".
_LOGGED: tuple[VerdictStatus, ...] = ("wrong", "no_answer", "unparsable_gold", "timeout", "unjudged", "error")
# Nothing that the completion is to blame for: no reward, instead of 0.
_NO_REWARD: tuple[VerdictStatus, ...] = ("unparsable_gold", "unjudged", "error")
_ALIGN = ("left", "right")


def accuracy_reward(
    completions: Completions,
    solution: Sequence[str | None],
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    workers: int = WORKERS,
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    r"""1 for a completion whose final answer is the gold answer, else 0.

    Args:
        completions: Text, or lists of chat messages.
        solution: Gold answers, one a completion.
        log_metric: TRL's logger; gets the fraction of each verdict, as ``reward/accuracy/timeout_frac``.
        log_extra: TRL's logger of columns; gets each completion's verdict and the answer that was found in it.
        timeout_seconds: Processor time that the comparison of one pair may take.
        workers: Processes that compare what needs algebra.

    Returns:
        1.0; 0.0 for another answer, for none, and for one whose comparison takes too long; None, masked out of
        its group, where the gold answer cannot be read, or the comparison failed or got too little processor time.

    Raises:
        RewardError: The worker processes cannot be started.
    """
    return judged("accuracy", completions, solution, log_metric, log_extra, timeout_seconds, workers)


def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[str | None],
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    *,
    reasoning_end: str = REASONING_END,
    timeout_seconds: float = TIMEOUT_SECONDS,
    workers: int = WORKERS,
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    r"""As :func:`accuracy_reward`, but only what follows the reasoning counts, and without its end there is nothing.

    Args:
        completions: Text, or lists of chat messages.
        solution: Gold answers, one a completion.
        log_metric: As for accuracy; ``reward/reasoning_accuracy/unfinished_frac`` is the fraction without an end.
        log_extra: As for accuracy.
        reasoning_end: What ends the reasoning.
        timeout_seconds: Processor time that the comparison of one pair may take.
        workers: Processes that compare what needs algebra.

    Returns:
        As accuracy; 0.0 for a completion whose reasoning does not end.

    Raises:
        RewardError: The worker processes cannot be started.

    Source: TRL's ``reasoning_accuracy_reward``, with this package's verdicts.
    """
    parts = [completion_text(completion).rpartition(reasoning_end) for completion in completions]
    if log_metric is not None and parts:
        log_metric("reward/reasoning_accuracy/unfinished_frac", sum(not end for _b, end, _r in parts) / len(parts))
    rests = [rest if end else "" for _before, end, rest in parts]
    return judged("reasoning_accuracy", rests, solution, log_metric, log_extra, timeout_seconds, workers)


def judged(
    name: str,
    completions: Completions,
    solution: Sequence[str | None],
    log_metric: LogMetric | None,
    log_extra: LogExtra | None,
    timeout_seconds: float,
    workers: int,
) -> list[float | None]:
    """What the verdicts on completions are worth, after they were logged under a reward's name.

    Returns:
        1.0, 0.0, or None for a completion that cannot be judged.
    """
    texts = [completion_text(completion) for completion in completions]
    verdicts = check_all(solution, texts, timeout_seconds=timeout_seconds, workers=workers)
    if log_extra is not None:
        log_extra(f"{name}_verdict", [verdict.status for verdict in verdicts])
        log_extra(f"{name}_answer", [verdict.extracted or "" for verdict in verdicts])
    if log_metric is not None and verdicts:
        counts = Counter(verdict.status for verdict in verdicts)
        for status in _LOGGED:
            log_metric(f"reward/{name}/{status}_frac", counts[status] / len(verdicts))
    return [None if v.status in _NO_REWARD else float(v.right) for v in verdicts]


def partial_answer_reward(
    completions: Completions,
    solution: Sequence[str | None],
    *,
    align: str = "left",
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    r"""The share of the places at which answer and gold answer have the same character.

    Spaces do not count. With n characters of the gold answer, m of the answer and e of them equal at their places, it
    is ``e / max(n, m)``: 1 for the gold answer as it is written, 0 for no answer, and nothing is won by a longer one.
    ``0.50`` is not the ``0.5`` of an accuracy here: this reward is for answers that are written in one way, as digits
    or letters are.

    Args:
        completions: Text, or lists of chat messages.
        solution: Gold answers, one a completion.
        align: Which end the places are counted from: ``left``, or ``right`` where units are to meet units.

    Returns:
        0 to 1; None where there is no gold answer.

    Raises:
        ValueError: ``align`` is neither.
    """
    if align not in _ALIGN:
        raise ValueError(f"no align {align!r}: {did_you_mean(str(align), _ALIGN)}")
    shares: list[float | None] = []
    for text, solved in zip(map(completion_text, completions), solution, strict=True):
        answer = "".join((extract_answer(text) or "").split())
        gold, step = "".join(gold_answer(solved or "").split()), 1 if align == "left" else -1
        equal = sum(a == b for a, b in zip(answer[::step], gold[::step], strict=False))
        shares.append(None if solved is None else equal / max(len(answer), len(gold), 1))
    return shares
