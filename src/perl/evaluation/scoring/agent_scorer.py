"""What makes a conversation right: the reward of its environment when it had ended, or the answer that it ends with.

questions, conversations as text -> Verdicts
"""

import json
from collections.abc import Sequence

from perl.errors import RewardError
from perl.evaluation.scoring.scorers import SCORERS, Scorer
from perl.evaluation.scoring.task import MATH, WITH_TOOLS, Question
from perl.rewards.answers import completion_text
from perl.rewards.verifier import Judging
from perl.rollouts.agents.asked import Asking
from perl.rollouts.agents.conversations import Conversation
from perl.types import Verdict


def agent_scorer(asking: Asking) -> Scorer:
    """The scorer of a recipe's conversations.

    Args:
        asking: With environments that reward, whose verdicts :func:`verdict_of` gives; or without: then the last words
            are compared with the gold answer.
    """

    def gone(asked: Sequence[Question], texts: Sequence[str], _: Judging) -> list[Verdict]:
        what = f"{len(texts)} conversations on {len(asked)} questions cannot be judged again without their environments"
        raise RewardError(what, "agent.environment", "draw them anew, in another folder")

    def by_answer(asked: Sequence[Question], texts: Sequence[str], limits: Judging) -> list[Verdict]:
        return SCORERS[MATH].verdicts(asked, [completion_text(json.loads(text)) for text in texts], limits)

    return Scorer(f"{WITH_TOOLS}{asking.label}", gone if asking.rewards_itself else by_answer)


def verdict_of(asking: Asking, one: Conversation) -> Verdict:
    """What an environment makes of a conversation that has just ended."""
    said = completion_text(one.messages).strip() or None
    if one.reward is None:
        return Verdict("error", said)
    return Verdict("right" if one.reward >= asking.agent.section.success else "wrong", said)
