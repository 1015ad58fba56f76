"""The prompts of a teacher: those of the policy, with a hint or another system message.

prompt, gold answer, TeacherSection -> prompt

Pure functions of prompts as the data has them; rendering and tokens are the trainer's own, as for any prompt.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from perl.errors import DataError, RecipeError
from perl.recipe.sections import TeacherSection

ANSWERS = ("solution", "answer")
"""Columns that hold the gold answer: a recipe's, and what scripts usually call it."""
SAME = "is the policy itself, asked what the policy is asked: there is nothing to learn from it"
HINT = "another adapter, a hint, or a system prompt of its own"
_NAMES = re.compile(r"\{(prompt|answer)\}")


def teacher_prompt(row: Mapping[str, Any], section: TeacherSection) -> Any:  # noqa: ANN401 (text or messages)
    """The prompt of a row as the teacher sees it.

    Args:
        row: With ``prompt``, text or chat messages, and where the teacher is told the answer, a column of ``ANSWERS``.
        section: Of the teacher.

    Returns:
        Of the prompt's own form; in messages the hint is with the last one of the user.

    Raises:
        DataError: There is no answer, no message of a user, or a system message for a prompt that is text.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if section.system_prompt is not None:
            raise DataError("a system prompt needs chat messages", "teacher.system_prompt", "use teacher.hint")
        return prompt if section.hint is None else _hinted(prompt, section.hint, row, section, "\n")
    messages = [dict(message) for message in prompt]
    if section.system_prompt is not None:
        own = [message for message in messages if message["role"] != "system"]
        told = _filled(section.system_prompt, row, section)
        messages = [{"role": "system", "content": told}, *own]
    if section.hint is not None:
        users = [message for message in messages if message["role"] == "user" and isinstance(message["content"], str)]
        if not users:
            raise DataError("a prompt has no text of a user to put a hint before", "teacher.hint", "use system_prompt")
        users[-1]["content"] = _hinted(users[-1]["content"], section.hint, row, section, "\n\n")
    return messages


def check_differs(rows: Iterable[Mapping[str, Any]], section: TeacherSection, *, same: bool) -> None:
    """Refuses a teacher that is the policy, asked what the policy is asked, where nothing else teaches.

    Args:
        rows: With prompts, as :func:`teacher_prompt` takes them.
        section: Of the teacher.
        same: Whether the policy begins as what the teacher is, a new adapter beside the base or the same one, and
            nothing else gives the first step a gradient.

    Raises:
        RecipeError: It is.
    """
    if same and all(teacher_prompt(row, section) == row["prompt"] for row in rows):
        raise RecipeError(SAME, "teacher", HINT)


def check_answers(columns: Iterable[str], section: TeacherSection) -> None:
    """Refuses a hint or a system prompt with an answer that the data does not have.

    Raises:
        DataError: Names the columns.
    """
    names = list(columns)
    for key in ("hint", "system_prompt"):
        if "{answer}" in (getattr(section, key) or "") and not set(ANSWERS) & set(names):
            what = f"contains {{answer}}, and the data has no gold answer, only {', '.join(names)}"
            raise DataError(what, f"teacher.{key}", "set data.train.columns.answer, or leave {answer} out")


def _hinted(question: str, hint: str, row: Mapping[str, Any], section: TeacherSection, between: str) -> str:
    """The hint before the question, or in its place where it contains it."""
    text = _filled(hint, row, section, prompt=question)
    return text if "{prompt}" in hint else f"{text}{between}{question}"


def _filled(text: str, row: Mapping[str, Any], section: TeacherSection, **found: str) -> str:
    """A text with what its names stand for."""
    if "{answer}" in text:
        check_answers(row, section)
        found["answer"] = str(next(row[name] for name in ANSWERS if name in row))
    return _NAMES.sub(lambda name: found[name[1]], text)
