r"""Rewards for the length of a completion, in tokens.

token ids, verdicts (of those that need them), arguments of the recipe -> one number a completion

Whether a completion is right is judged as in the accuracy reward. Arguments that a recipe may set are
keyword-only, and are checked before the batch is looked at, so that a call with an empty batch checks them.
"""

import itertools
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from perl.rewards.accuracy import LogExtra, LogMetric, judged
from perl.rewards.answers import Completions
from perl.rewards.verifier import TIMEOUT_SECONDS, WORKERS

_CACHE_SHARE = 5
"""DAPO's longest completion, 20480, over its soft punish cache, 4096."""


def length_penalty_reward(
    completions: Completions,
    solution: Sequence[str | None],
    prompts: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    workers: int = WORKERS,
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    """From 0.5 for the shortest completion of a prompt down to -0.5 for the longest; a wrong one gets at most 0.

    lambda = 0.5 - (length - shortest) / (longest - shortest) for a right completion, min(0, lambda) for a wrong one, 0
    for all of a prompt's if they are equally long. It is to be added to the accuracy with a small weight: alone it says
    little about right and wrong. The paper adds it after a phase of training without it.

    Args:
        completions: Text, or lists of chat messages.
        solution: Gold answers, one a completion.
        prompts: Neighbouring rows with the same prompt are a group. Over several processes a group is what one process
            holds of it.
        completion_ids: Token ids, one list a completion; an end token counts.
        log_metric: TRL's logger; gets the fraction of each verdict, as ``reward/length_penalty/timeout_frac``.
        log_extra: TRL's logger of columns; gets each verdict.
        timeout_seconds: Processor time that the comparison of one pair may take.
        workers: Processes that compare what needs algebra.

    Returns:
        Numbers in [-0.5, 0.5]; None for a completion that cannot be judged, whose length does not count as the shortest
        or the longest either.

    Source:
        Kimi k1.5, arXiv:2501.12599, section 2.3.3. open-r1's ``len_reward`` takes the shortest and the longest of the
        whole batch, in characters, so that an easy prompt's completions are rewarded for another prompt's being hard,
        and rewards what cannot be judged as if it were right. This one goes by prompt, as the paper does.
    """
    verdicts = judged("length_penalty", completions, solution, log_metric, log_extra, timeout_seconds, workers)
    rows = zip(prompts, verdicts, map(len, completion_ids), strict=True)
    rewards: list[float | None] = []
    for _prompt, neighbours in itertools.groupby(rows, key=itemgetter(0)):
        group = [(verdict, length) for _same, verdict, length in neighbours]
        lengths = [length for verdict, length in group if verdict is not None]
        for verdict, length in group:
            if verdict is None:
                rewards.append(None)
                continue
            shortest, longest = min(lengths), max(lengths)
            penalty = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
            rewards.append(penalty if verdict else min(0.0, penalty))
    return rewards


def cosine_length_reward(  # noqa: PLR0913 (TRL's signature, and the numbers of the paper)
    completions: Completions,
    solution: Sequence[str | None],
    completion_ids: Sequence[Sequence[int]],
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    *,
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    workers: int = WORKERS,
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    """The accuracy, scaled by length along half a cosine: the shorter of two right ones, the longer of two wrong ones.

    end + (start - end) * (1 + cos(pi * length / max_len)) / 2, where a right completion goes from ``max_value_correct``
    down to ``min_value_correct``, a wrong one from ``min_value_wrong`` up to ``max_value_wrong``. It replaces the
    accuracy reward.

    Args:
        completions: Text, or lists of chat messages.
        solution: Gold answers, one a completion.
        completion_ids: Token ids, one list a completion; an end token counts.
        log_metric: TRL's logger; gets the fraction of each verdict, as ``reward/cosine_length/timeout_frac``.
        log_extra: TRL's logger of columns; gets each verdict.
        max_len: Tokens at which the end is reached; longer completions stay there, as cosine would come back.
        min_value_wrong: For a wrong completion of no tokens.
        max_value_wrong: For a wrong completion of ``max_len`` tokens.
        min_value_correct: For a right completion of ``max_len`` tokens.
        max_value_correct: For a right completion of no tokens.
        timeout_seconds: Processor time that the comparison of one pair may take; one that takes longer counts as wrong.
        workers: Processes that compare what needs algebra.

    Returns:
        Numbers between these values; None for a completion that cannot be judged.

    Raises:
        ValueError: ``max_len`` is not a whole number from 1 on, or a smallest value is above the largest or NaN.

    Source:
        Yeo et al. 2025, arXiv:2502.03373, appendix C.1, with the numbers of TRL's ``get_cosine_scaled_reward``; that
        one judges with math-verify in the same process, without a time limit outside the main thread. The paper gives
        another constant to completions that reach ``max_len``, which TRL leaves out.
    """
    _check_count("max_len", max_len, 1)
    _check_order("min_value_wrong", min_value_wrong, "max_value_wrong", max_value_wrong)
    _check_order("min_value_correct", min_value_correct, "max_value_correct", max_value_correct)
    verdicts = judged("cosine_length", completions, solution, log_metric, log_extra, timeout_seconds, workers)
    rewards: list[float | None] = []
    for verdict, ids in zip(verdicts, completion_ids, strict=True):
        if verdict is None:
            rewards.append(None)
            continue
        start, end = (max_value_correct, min_value_correct) if verdict else (min_value_wrong, max_value_wrong)
        progress = min(len(ids) / max_len, 1.0)
        rewards.append(end + 0.5 * (start - end) * (1.0 + math.cos(progress * math.pi)))
    return rewards


def soft_overlong_reward(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_completion_len: int,
    soft_punish_cache: int | None = None,
    **_: Any,  # noqa: ANN401
) -> list[float]:
    """0 up to ``max_completion_len - soft_punish_cache`` tokens, then down in a line to -1 at ``max_completion_len``.

    Args:
        completion_ids: Token ids, one list a completion; an end token counts.
        max_completion_len: Tokens from which on the punishment is -1. Where generation ends there, this is what a
            truncated completion gets.
        soft_punish_cache: Tokens before it over which the punishment grows; with 0 only what is longer than
            ``max_completion_len`` is punished. None: a fifth of that, the paper's share.

    Raises:
        ValueError: They are no whole numbers from 1 and 0 on, or the second is larger than the first.

    Source:
        DAPO, arXiv:2503.14476, equation 13, as in TRL. The paper's numbers are 20480 and 4096.
    """
    _check_count("max_completion_len", max_completion_len, 1)
    if soft_punish_cache is None:
        soft_punish_cache = max_completion_len // _CACHE_SHARE
    _check_count("soft_punish_cache", soft_punish_cache, 0)
    # TRL would then punish a completion of no tokens.
    _check_order("soft_punish_cache", soft_punish_cache, "max_completion_len", max_completion_len)
    if not completion_ids:
        return []
    # Imported late: a look at a recipe's rewards, as every command takes it, must not load a library.
    from trl.rewards import get_soft_overlong_punishment

    return get_soft_overlong_punishment(max_completion_len, soft_punish_cache)(completion_ids)


def _check_count(name: str, value: Any, least: int) -> None:  # noqa: ANN401 (a recipe may hold anything)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _check_order(smaller_name: str, smaller: Any, larger_name: str, larger: Any) -> None:  # noqa: ANN401
    numbers = isinstance(smaller, int | float) and isinstance(larger, int | float)
    if not (numbers and -math.inf < smaller <= larger < math.inf):
        raise ValueError(f"{smaller_name} must be a number of at most {larger_name}, not {smaller!r} beside {larger!r}")
