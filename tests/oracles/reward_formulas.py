r"""Shaping rewards as their sources define them, in exact fractions where no cosine is involved.

lengths in tokens, verdicts, token ids or text -> reward
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

OPEN_R1_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def kimi_length_penalties(lengths: Sequence[int], right: Sequence[bool | None]) -> list[Fraction | None]:
    """Kimi k1.5, arXiv:2501.12599, section 2.3.3: of one prompt's completions; None stands for "not judged"."""
    judged = [length for length, fine in zip(lengths, right, strict=True) if fine is not None]
    rewards: list[Fraction | None] = []
    for length, fine in zip(lengths, right, strict=True):
        if fine is None:
            rewards.append(None)
        elif min(judged) == max(judged):
            rewards.append(Fraction(0))
        else:
            share = Fraction(1, 2) - Fraction(length - min(judged), max(judged) - min(judged))
            rewards.append(share if fine else min(Fraction(0), share))
    return rewards


def cosine_reward(length: int, longest: int, start: float, end: float) -> float:
    """Yeo et al., arXiv:2502.03373, appendix C.1, with (1 + cos x) / 2 written as cos(x / 2)^2."""
    share = math.cos(math.pi * min(length, longest) / (2 * longest)) ** 2
    return share * start + (1 - share) * end


def dapo_overlong(length: int, longest: int, cache: int) -> Fraction:
    """DAPO, arXiv:2503.14476, equation 13."""
    if length <= longest - cache:
        return Fraction(0)
    if length <= longest:
        return Fraction((longest - cache) - length, cache)
    return Fraction(-1)


def repeated_share(ids: Sequence[int], size: int) -> Fraction:
    """Of a completion's n-grams those that occurred before; 0 where there is no n-gram."""
    counts = Counter(tuple(ids[start : start + size]) for start in range(len(ids) - size + 1))
    return Fraction(sum(counts.values()) - len(counts), counts.total()) if counts else Fraction(0)


def tag_share(text: str) -> Fraction:
    """open-r1's tag count: each tag that cuts the text in two is a quarter."""
    return Fraction(sum(len(text.split(tag)) == 2 for tag in OPEN_R1_TAGS), len(OPEN_R1_TAGS))


def follows_style(text: str, style: str) -> bool:
    r"""Whether a text has the format; of boxes it may hold ``\boxed{4}`` only."""
    tags = text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text
    rest = text if style == "boxed" else text.split("</think>")[-1]
    box = re.fullmatch(r"[^\\]*\\boxed\{4\}[ .$\n]*", rest) is not None
    return {"boxed": box, "think": tags, "think_boxed": tags and box}[style]
