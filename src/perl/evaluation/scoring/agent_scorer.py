"""What makes a conversation right: the reward of its environment, or the answer that it ends with.

rows, conversations as text -> Verdicts
"""

from collections.abc import Sequence

from perl.evaluation.scoring.scorers import SCORERS, Scorer
from perl.evaluation.scoring.task import MATH, WITH_TOOLS, Question
from perl.rewards.verifier import Judging
from perl.rollouts.agents.asked import Asking, last_words
from perl.types import Verdict


def agent_scorer(asking: Asking) -> Scorer:
    """The scorer of a recipe's conversations.

    Args:
        asking: With environments that reward, or without: then the last words are compared with the gold answer.
    """
    success, name = asking.agent.section.success, f"{WITH_TOOLS}{asking.label}"

    def by_environment(asked: Sequence[Question], texts: Sequence[str], _: Judging) -> list[Verdict]:
        found = [asking.made_again(question.row, text) for question, text in zip(asked, texts, strict=True)]
        return [
            Verdict("error" if reward is None else "right" if reward >= success else "wrong", last.strip() or None)
            for reward, last in found
        ]

    def by_answer(asked: Sequence[Question], texts: Sequence[str], limits: Judging) -> list[Verdict]:
        return SCORERS[MATH].verdicts(asked, [last_words(text) for text in texts], limits)

    return Scorer(name, by_environment if asking.rewards_itself else by_answer)
