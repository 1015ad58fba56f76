r"""What makes a completion right: the verifier, the letter of a choice, equal text, or a reward with a threshold.

name of a scorer -> Scorer; questions, completions -> Verdicts

All that judges completions asks a scorer: what is drawn, what was kept and what is counted again.
"""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from perl.errors import Mistake
from perl.evaluation.scoring.choices import announced_letter
from perl.evaluation.scoring.task import MATH, Question
from perl.rewards.answers import conclusion, last_boxed
from perl.rewards.custom import Failures
from perl.rewards.verifier import Judging, check_all
from perl.types import Verdict

CHOICE_PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is the letter of the right choice. Think step by step before "
    "answering.\n\n{problem}"
)

Verdicts = Callable[[Sequence[Question], Sequence[str], Judging], list[Verdict]]


@dataclass(frozen=True)
class Scorer:
    """A way to judge completions.

    Attributes:
        name: By which it is found again: of a reward ``module:function``, with its threshold.
        verdicts: Questions, a completion of each, limits of a comparison -> a verdict on each.
        shown: A gold answer -> how an example writes it.
        prompt: How problems of the user's own are asked; ``{problem}`` stands for the problem.
        lacking: A question -> what it lacks for this scorer; None: nothing.
        source: Of a user's reward: hexadecimal digits of what its code says; empty: it is none.
        failures: Of a user's reward: the completions of this evaluation that it could not score; None: it is none.
    """

    name: str
    verdicts: Verdicts
    shown: Callable[[str], str] = str
    prompt: str = "{problem}"
    lacking: Callable[[Question], Mistake | None] = lambda _: None
    source: str = ""
    failures: Failures | None = None

    @property
    def label(self) -> str:
        """As results name it: of a user's reward also by its code, ``my_rewards:score@3f2a9c1b0d4e>=0.5``."""
        if not self.source:
            return self.name
        function, least, threshold = self.name.partition(">=")
        return f"{function}@{self.source}{least}{threshold}"


def normal(scorer: str, answer: str) -> str:
    """An answer in the form in which a scorer compares; two that are equal then are one answer.

    Args:
        scorer: Its name.
        answer: As a sample has it.
    """
    return _squad(answer) if scorer == "normalised" else " ".join(answer.split())


def stated_text(completion: str) -> str | None:
    r"""What a completion answers where the text itself is compared; None: nothing.

    The content of the last ``\boxed{}`` of its conclusion, else all of the conclusion.
    """
    text = conclusion(completion)
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip() or None


def _by_verifier(asked: Sequence[Question], texts: Sequence[str], limits: Judging) -> list[Verdict]:
    golds = [question.gold for question in asked]
    return check_all(golds, texts, timeout_seconds=limits.timeout_seconds, workers=limits.workers)


def _by_letter(asked: Sequence[Question], texts: Sequence[str], _: Judging) -> list[Verdict]:
    letters = [announced_letter(text, question.choices) for question, text in zip(asked, texts, strict=True)]
    return [_compared(letter, letter == q.gold) for q, letter in zip(asked, letters, strict=True)]


def _by_text(same: Callable[[str], str]) -> Verdicts:
    """Right where both texts are equal in some form."""

    def verdicts(asked: Sequence[Question], texts: Sequence[str], _: Judging) -> list[Verdict]:
        answers = [stated_text(text) for text in texts]
        return [
            _compared(answer, answer is not None and same(answer) == same(question.gold))
            for question, answer in zip(asked, answers, strict=True)
        ]

    return verdicts


def _compared(answer: str | None, right: bool) -> Verdict:
    return Verdict("no_answer" if answer is None else "right" if right else "wrong", answer)


def _squad(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words.

    Source: ``normalize_answer`` of SQuAD 1.1's evaluation script (Rajpurkar et al. 2016, arXiv:1606.05250).
    """
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def _without_choices(question: Question) -> Mistake | None:
    if question.choices:
        return None
    return Mistake("the scorer choice needs choices, and there are none", hint="name their column: choices=NAME")


SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        one.name: one
        for one in (
            Scorer(MATH, _by_verifier, "\\boxed{{{}}}".format),
            Scorer("choice", _by_letter, "Answer: {}".format, CHOICE_PROMPT, lacking=_without_choices),
            Scorer("exact", _by_text(str.strip)),
            Scorer("normalised", _by_text(_squad)),
        )
    }
)
"""Those with a name."""
