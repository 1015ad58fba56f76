"""What of a recipe's teacher can be refused before the base's weights are loaded.

TeacherSection, problems, tokenizer -> nothing, or an error
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.data import render_prompts
from perl.recipe.sections import TeacherSection
from perl.trainer.teacher_prompts import check_answers, check_differs, teacher_prompt
from perl.trainer.teaching import check_context, context_of


def check_teacher_prompts(
    section: TeacherSection,
    sets: Iterable[Dataset],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    longest_completion: int,
    template_arguments: Mapping[str, Any] | None,
    *,
    same_policy: bool,
    alone: bool,
) -> None:
    """Makes each prompt as the teacher will see it, and refuses a teacher that is the policy.

    Args:
        section: Of the recipe.
        sets: The problems that the policy is asked, in training or between its steps.
        tokenizer: The base's.
        config: The base's.
        longest_completion: In tokens.
        template_arguments: Of the chat template.
        same_policy: As of :func:`perl.trainer.teacher_prompts.check_differs`.
        alone: Likewise.

    Raises:
        DataError: A prompt cannot be made.
        ModelError: One leaves no room for the completion.
        RecipeError: There is nothing to learn from it.
    """
    if not section.acts:
        return
    sets = list(sets)
    check_differs(itertools.chain(*sets), section, same_policy=same_policy, alone=alone)
    if not section.changes_prompts:
        return
    for rows in sets:
        check_answers(rows.column_names, section)
        prompts = [{"prompt": teacher_prompt(row, section)} for row in rows]
        longest = max(len(prompt.token_ids) for prompt in render_prompts(prompts, tokenizer, template_arguments))
        check_context(longest, longest_completion, context_of(config))
