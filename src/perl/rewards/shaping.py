r"""Rewards for how a completion is written: its format, its tags, its repetitions.

completions or their token ids, arguments of the recipe -> one number a completion

Gold answers play no part. Arguments that a recipe may set are keyword-only, and are checked before the batch is looked
at, so that a call with an empty batch checks them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from perl.errors import did_you_mean
from perl.rewards.answers import Completions, completion_text, conclusion, last_boxed

# The tags of open-r1, with the line breaks that belong to each tag.
_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def format_reward(completions: Completions, *, style: str = "boxed", **_: Any) -> list[float]:  # noqa: ANN401
    r"""1 for a completion in the requested style, else 0.

    The styles:

    * ``boxed``: it ends in exactly one ``\boxed{}`` with something in it. Spaces, points, dollar signs and line breaks
      may follow.
    * ``think``: it begins with its only ``<think>`` and has a ``</think>`` after it. Nothing may stand before the tag:
      where a chat template writes ``<think>`` itself, the completion lacks it and gets 0.
    * ``think_boxed``: as ``think``, and what follows the last ``</think>`` is ``boxed``. A box in the reasoning does
      not count, as it does not for the accuracy.

    Args:
        completions: Text, or lists of chat messages.
        style: One of the above.

    Raises:
        ValueError: ``style`` is unknown.

    Source:
        ``think``: TRL's ``think_format_reward``, after the format reward of DeepSeek-R1 (arXiv:2501.12948,
        section 2.2.2).
    """
    if not isinstance(style, str) or style not in _STYLES:
        raise ValueError(f"no format style {style!r}: {did_you_mean(str(style), _STYLES)}")
    is_well_formed = _STYLES[style]
    return [float(is_well_formed(completion_text(completion))) for completion in completions]


def tag_count_reward(
    completions: Completions,
    *,
    tags: Sequence[str] = _TAGS,
    **_: Any,  # noqa: ANN401
) -> list[float]:
    r"""An equal share for each tag that occurs exactly once: a first step towards a format that a model does not know.

    The usual tags, line breaks included: ``<think>\n``, ``\n</think>\n``, ``\n<answer>\n``, ``\n</answer>``, a quarter
    each. Their order does not matter.

    Args:
        completions: Text, or lists of chat messages.
        tags: Texts to count; one alone is all or nothing.

    Returns:
        The share of the tags that occur once, from 0 to 1.

    Raises:
        ValueError: ``tags`` is not a list of different texts, at least one, none empty.

    Source:
        ``tag_count_reward`` of open-r1 (github.com/huggingface/open-r1, src/open_r1/rewards.py), which counts as
        ``str.count`` does: without overlap.
    """
    listed = isinstance(tags, list | tuple) and len(tags) > 0
    if not listed or not all(isinstance(tag, str) and tag for tag in tags) or len(set(tags)) < len(tags):
        raise ValueError(f"tags must be a list of different texts, none empty, not {tags!r}")
    return [sum(text.count(tag) == 1 for tag in tags) / len(tags) for text in map(completion_text, completions)]


def repetition_penalty_reward(
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    **_: Any,  # noqa: ANN401
) -> list[float]:
    """``max_penalty`` times the fraction of a completion's n-grams that repeat an earlier one.

    (1 - unique n-grams / n-grams) * max_penalty, over tokens. A completion with no n-gram gets 0.

    Args:
        completion_ids: Token ids, one list a completion.
        ngram_size: Tokens in an n-gram, at least 1.
        max_penalty: What a completion of nothing but repetitions approaches; 0 or negative.

    Raises:
        ValueError: ``ngram_size`` is not a whole number from 1 on, or ``max_penalty`` is positive or not a number.

    Source:
        Yeo et al. 2025, arXiv:2502.03373, appendix C.2, as in TRL. The paper gives its penalty to the tokens of each
        repeated n-gram; a reward of TRL's kind is one number a completion, hence the fraction. open-r1 counts words.
    """
    # TRL divides by zero for n-grams of no tokens, and takes a penalty of NaN.
    if not isinstance(ngram_size, int) or isinstance(ngram_size, bool) or ngram_size < 1:
        raise ValueError(f"ngram_size must be a whole number of at least 1, not {ngram_size!r}")
    if not (isinstance(max_penalty, int | float) and -math.inf < max_penalty <= 0):
        raise ValueError(f"max_penalty must be a number of at most 0, not {max_penalty!r}")
    if not completion_ids:
        return []
    # Imported late: a look at the names of rewards, as every command takes it, must not load a library.
    from trl.rewards import get_repetition_penalty_reward

    return get_repetition_penalty_reward(ngram_size, max_penalty)(completion_ids)


def _ends_in_its_only_box(text: str) -> bool:
    boxed = last_boxed(text)
    if not boxed or not boxed.strip() or text.count("\\boxed{") != 1:
        return False
    return text.rstrip(" .$\n").endswith(f"\\boxed{{{boxed}}}")


def _begins_with_reasoning(text: str) -> bool:
    # TRL's pattern is anchored at the beginning and has no repetition inside another: linear in the length of the text.
    from trl.rewards import think_format_reward

    return bool(think_format_reward([[{"content": text}]])[0])


_STYLES: dict[str, Callable[[str], bool]] = {
    "boxed": _ends_in_its_only_box,
    "think": _begins_with_reasoning,
    "think_boxed": lambda text: _begins_with_reasoning(text) and _ends_in_its_only_box(conclusion(text)),
}
