"""What of a recipe's teacher can be refused before the base's weights are loaded.

TeacherSection, problems, tokenizer -> nothing, or an error
"""

import itertools
from collections.abc import Mapping

from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.data import render_prompts
from perl.recipe.sections import TeacherSection
from perl.trainer.config import PeftRLConfig
from perl.trainer.teacher_prompts import check_answers, check_differs, teacher_prompt
from perl.trainer.teaching import check_context, context_of


def check_teacher_prompts(
    section: TeacherSection,
    sets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    arguments: PeftRLConfig,
    *,
    same: bool,
) -> None:
    """Makes each prompt as the teacher will see it, and refuses a teacher that is the policy.

    Args:
        section: Of the recipe.
        sets: The problems that the policy is asked, in training or between its steps.
        tokenizer: The base's.
        config: The base's.
        arguments: Of the trainer.
        same: As of :func:`perl.trainer.teacher_prompts.check_differs`.

    Raises:
        DataError: A prompt cannot be made.
        ModelError: One leaves no room for the completion.
        RecipeError: There is nothing to learn from it.
    """
    if not section.acts:
        return
    check_differs(itertools.chain(*sets.values()), section, same=same)
    if not section.changes_prompts:
        return
    for rows in sets.values():
        check_answers(rows.column_names, section)
        prompts = [{"prompt": teacher_prompt(row, section)} for row in rows]
        rendered = render_prompts(prompts, tokenizer, arguments.chat_template_kwargs)
        longest = max(len(prompt.token_ids) for prompt in rendered)
        check_context(longest, int(arguments.max_completion_length or 0), context_of(config))
