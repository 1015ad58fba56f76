"""The records that flow between the stages, in the order they flow.

Prompt -> Completion -> Verdict

They are frozen: a stage that knows more makes a new record. Knows nothing of torch, TRL or files.
"""

from dataclasses import dataclass
from typing import Literal

Message = dict[str, str]

VerdictStatus = Literal["right", "wrong", "no_answer", "unparsable_gold", "timeout", "unjudged", "error"]


@dataclass(frozen=True)
class Prompt:
    """A question as the model sees it, with the answer it does not see.

    Attributes:
        content: Chat messages, or plain text.
        token_ids: The rendered prompt, ends where the completion begins.
        solution: The gold answer, None where the data set has none.
    """

    content: str | tuple[Message, ...]
    token_ids: tuple[int, ...]
    solution: str | None = None


@dataclass(frozen=True)
class Completion:
    """What the policy wrote for a prompt.

    Example:
        ``Completion(token_ids=(24, 13, 1), text="95", truncated=False)``: the end token is part of the ids but not
        of the text; a truncated completion has no end token.
    """

    token_ids: tuple[int, ...]
    text: str
    truncated: bool


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of one completion.

    Attributes:
        status: ``right`` and ``wrong`` compare two answers; ``no_answer`` found none in the completion;
            ``unparsable_gold`` says that the data set, not the model, is at fault; ``timeout`` that the comparison took
            more processor time than it may; ``unjudged`` that the machine gave it too little; ``error`` that it failed.
        extracted: The answer as it stands in the completion.
        seconds: Wall time of the check.
    """

    status: VerdictStatus
    extracted: str | None = None
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the completion's answer is the gold answer."""
        return self.status == "right"
