"""Problems rendered as the model sees them.

row of a problem set, tokenizer -> Prompt

Renders exactly as TRL's trainer does, so that evaluation and training ask the same question.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from perl.types import Prompt


def render_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts with their token ids.

    Args:
        rows: With ``prompt`` (text or chat messages) and perhaps ``solution``.
        tokenizer: The base's; its chat template renders messages up to where the completion begins.
        template_arguments: Further arguments of the chat template, as ``chat_template_kwargs`` holds them.
    """
    return [_render(row, tokenizer, template_arguments or {}) for row in rows]


def _render(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, template_arguments: Mapping[str, Any]
) -> Prompt:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return Prompt(prompt, tuple(tokenizer(text=prompt)["input_ids"]), row.get("solution"))
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template_arguments
    )
    return Prompt(tuple(prompt), tuple(encoded["input_ids"]), row.get("solution"))
