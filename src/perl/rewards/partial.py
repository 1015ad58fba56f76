r"""A reward for answers that are right in part: the first steps towards what a model cannot do yet.

completion -> answer -> share of the gold answer's characters that stand in their places
"""

from collections.abc import Sequence
from typing import Any

from perl.errors import did_you_mean
from perl.rewards.answers import Completions, completion_text, extract_answer, gold_answer

_ALIGN = ("left", "right")


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
    texts = [extract_answer(completion_text(completion)) or "" for completion in completions]
    return [
        None if gold is None else _share(text, gold_answer(gold), align)
        for text, gold in zip(texts, solution, strict=True)
    ]


def _share(answer: str, gold: str, align: str) -> float:
    """Equal characters over the longer one's length."""
    answer, gold = "".join(answer.split()), "".join(gold.split())
    step = 1 if align == "left" else -1
    equal = sum(a == b for a, b in zip(answer[::step], gold[::step], strict=False))
    return equal / max(len(answer), len(gold), 1)
