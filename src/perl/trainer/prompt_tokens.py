"""How prompts become tokens, and how many tokens a turn of a conversation may still have.

a tokenizer, TRL's tokenization -> Prompts; prompt, whatever was added to it -> tokens left of its completion

A completion's length is that of the whole conversation after the prompt: what the policy wrote and what tools answered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex


@dataclass(frozen=True)
class Prompts:
    """How prompts become tokens, and tokens text.

    Attributes:
        processing_class: The tokenizer or processor.
        tokenize: The tokens of prompts, as TRL makes them.
        longest: Tokens of the longest prompt that may come, from the longest seen and how many to look at.
    """

    processing_class: Any
    tokenize: Callable[[list[Any]], list[list[int]]]
    longest: Callable[[int, int], int]


class Opening(list[int]):
    """Token ids of a prompt, which remember how many they were when a conversation is added to them.

    Attributes:
        prompt_tokens: How many of them are the prompt.
    """

    def __init__(self, ids: Sequence[int], prompt_tokens: int | None = None) -> None:
        """Begins a conversation."""
        super().__init__(ids)
        self.prompt_tokens = len(self) if prompt_tokens is None else prompt_tokens

    def __add__(self, further: list[int]) -> "Opening":  # type: ignore[override]  # of the same kind
        """The conversation with more at its end."""
        return Opening([*self, *further], self.prompt_tokens)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[list[int], int]]:
        """Copies remember it too."""
        return Opening, (list(self), self.prompt_tokens)


def tokens_left(ids: Sequence[int], max_completion_length: int) -> int | None:
    """Tokens that may follow; None: it is a prompt alone, and a completion may have all of its length."""
    if not isinstance(ids, Opening) or len(ids) == ids.prompt_tokens:
        return None
    return max(0, max_completion_length - (len(ids) - ids.prompt_tokens))
