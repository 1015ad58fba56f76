"""What of a recipe's teacher can be refused before the base's weights are loaded.

TeacherSection, problems, tokenizer -> nothing, or an error
"""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.data import render_prompts
from perl.recipe.sections import TeacherSection
from perl.trainer.teacher_prompts import check_answers, teacher_prompt
from perl.trainer.teaching import check_context


def shown_teacher(section: TeacherSection) -> str:
    """A teacher in one line."""
    who = f"the base with {section.adapter}" if section.adapter else "the base"
    sees = {"a hint": section.hint, "a system prompt of its own": section.system_prompt}
    what = " and ".join(name for name, value in sees.items() if value is not None)
    over = f"the policy's {section.top_k} likeliest tokens" if section.top_k else "the vocabulary"
    return f"{who}{f', which sees {what}' if what else ''}; KL(policy || teacher) over {over} x {section.weight:g}"


def check_teacher_prompts(
    section: TeacherSection,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    longest_completion: int,
    template_arguments: Mapping[str, Any] | None,
) -> None:
    """Makes each prompt as the teacher will see it.

    Args:
        section: Of the recipe.
        rows: The training problems.
        tokenizer: The base's.
        config: The base's.
        longest_completion: In tokens.
        template_arguments: Of the chat template.

    Raises:
        DataError: A prompt cannot be made.
        ModelError: One leaves no room for the completion.
    """
    if not section.changes_prompts:
        return
    check_answers(rows.column_names, section)
    prompts = [{"prompt": teacher_prompt(row, section)} for row in rows]
    longest = max(len(prompt.token_ids) for prompt in render_prompts(prompts, tokenizer, template_arguments))
    check_context(longest, longest_completion, getattr(config.get_text_config(), "max_position_embeddings", None))
