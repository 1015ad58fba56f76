"""How prompts become tokens, and tokens text.

a tokenizer, TRL's tokenization -> Prompts
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
