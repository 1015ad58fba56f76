"""Prompts: which conversations can be asked, their words, and their tokens as training, evaluation and plans see them.

text or chat messages -> the same, checked; rows, tokenizer -> Prompts
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from perl.errors import DataError, did_you_mean, first_line
from perl.recipe.sections import THINKING_SWITCHES
from perl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST = ("system", "developer")
_ASKED = ("user", "tool")
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|content)"\s*:')


def checked_prompt(prompt: Any, row: str, where: str) -> Any:  # noqa: ANN401 (as a data set holds it)
    """A prompt as it can be asked: a number as text, and messages with text as their content.

    Args:
        prompt: Text, or chat messages, whose content may be parts as ``[{"type": "text", "text": "1+1="}]``.
        row: What the user calls it.
        where: What the user named its data in.

    Raises:
        DataError: It is something else, or no conversation that an assistant's message can follow.
    """
    if isinstance(prompt, str) and _MESSAGES.match(prompt):  # as a CSV file holds them
        with suppress(json.JSONDecodeError):
            given = json.loads(prompt)
            prompt = given if all({"role", "content"} <= {*message} for message in given) else prompt
    if prompt is None or isinstance(prompt, str):
        return prompt
    if isinstance(prompt, int | float):
        return str(prompt)
    try:
        return _conversation(prompt)
    except ValueError as error:
        what, hint = error.args
        raise DataError(f"{row}: {what}", where, hint) from None


def asked_prompt(prompt: Any, row: str, where: str) -> Any:  # noqa: ANN401 (as a data set holds it)
    """As :func:`checked_prompt`, of a prompt that must ask something."""
    found = checked_prompt(prompt, row, where)
    if not prompt_text(found).strip():
        raise DataError(f"{row} asks nothing: {prompt!r:.60}", where, "a text, or messages that end with a question")
    return found


def _conversation(messages: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Chat messages without keys that hold nothing; the error says what is wrong, and what to do."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"a prompt is {messages!r:.60}", "text, or a list of messages with role and content")
    found = [_message(message, number) for number, message in enumerate(messages, 1)]
    roles = [message["role"] for message in found]
    for number, (before, role) in enumerate(zip([None, *roles], roles, strict=False), 1):
        if role in _FIRST and number > 1:
            raise ValueError(f"message {number} is a {role} message", "one, at the beginning")
        if role == before and role != "tool":
            raise ValueError(f"messages {number - 1} and {number} are both of the {role}", "join them")
    if roles and roles[-1] == "assistant":
        what = "the messages end with the assistant's answer or its beginning, which would be closed and answered anew"
        raise ValueError(what, "a prompt ends with the question: leave that message out")
    if roles and (roles[-1] not in _ASKED or not found[-1]["content"].strip()):
        raise ValueError(f"the messages end with the {roles[-1]}'s, and ask nothing", "a prompt ends with the question")
    return found


def _message(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}  # Arrow gives all of them all keys
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"message {number} has the role {role!r}", did_you_mean(str(role), _ROLES))
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(
            isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise ValueError(f"message {number} has a part that is not text: {content!r:.60}", "only text is asked")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise ValueError(f"message {number} has {content!r:.60} as its content", "text, or a list of parts of text")
    return message if content is None else {**message, "content": content}


def prompt_text(prompt: Any) -> str:  # noqa: ANN401 (text or messages, as the data set holds them)
    """The words of a prompt, whichever form it has; what two equal prompts have in common."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content") or "") for message in prompt if isinstance(message, Mapping))
    return ""


def conversation(asked: Sequence[str], answers: Sequence[str], *, chat: bool) -> str | list[dict[str, str]]:
    """Questions, each but the last with its answer: as turns of a chat, or as a text with empty lines between."""
    shown = list(zip(asked, answers, strict=False))
    if not chat:
        return "\n\n".join([*(f"{text} {answer}" for text, answer in shown), asked[-1]])
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for pair in shown for role, text in zip(roles, pair, strict=True)]
    return [*messages, {"role": "user", "content": asked[-1]}]


def render_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts with their token ids.

    Args:
        rows: With ``prompt`` (text or chat messages) and perhaps ``solution``.
        tokenizer: The base's; its chat template renders messages up to where the completion begins.
        template_arguments: Further arguments of the chat template, as ``chat_template_kwargs`` holds them.

    Raises:
        DataError: A prompt cannot be asked, or the chat template refuses it.
    """
    rendered = []
    for number, row in enumerate(rows, 1):
        prompt = checked_prompt(row["prompt"], f"prompt {number}", "data")
        if isinstance(prompt, str):
            rendered.append(Prompt(prompt, tuple(tokenizer(text=prompt)["input_ids"]), row.get("solution")))
            continue
        try:
            encoded = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(template_arguments or {})
            )
        except (TemplateError, TypeError, ValueError) as error:
            hint = "messages as the model's template wants them, or data.chat: false where it has none"
            raise DataError(f"prompt {number} cannot be rendered: {first_line(error)}", "data", hint) from error
        rendered.append(Prompt(tuple(prompt), tuple(encoded["input_ids"]), row.get("solution")))
    return rendered


def thinking_arguments(
    prompt: Any,  # noqa: ANN401 (as a data set holds it)
    tokenizer: "PreTrainedTokenizerBase",
    thinking: bool | None,
    template_arguments: Mapping[str, Any] | None = None,
    *,
    where: str,
    hint: str,
) -> dict[str, Any]:
    """Arguments of the chat template, with the switch of its thinking mode if one is asked for.

    A template has a mode where on and off render the prompt differently: one may have the word for another purpose, or
    ignore the switch beside a system prompt.

    Args:
        prompt: One of those that are asked: chat messages, or text, which has no mode.
        tokenizer: The base's.
        thinking: On or off; None: the template's default.
        template_arguments: Given already.
        where: What the user asked for the mode in.
        hint: What else to do.

    Raises:
        DataError: There is no thinking mode, or the template refuses the prompt.
    """
    given = dict(template_arguments or {})
    if thinking is None:
        return given
    chat = tokenizer.chat_template is not None and not isinstance(prompt, str)
    for name in THINKING_SWITCHES if chat else ():
        on, off = (render_prompts([{"prompt": prompt}], tokenizer, {**given, name: mode}) for mode in (True, False))
        if on != off:
            return {**given, name: thinking}
    what = "the base has a chat template without a thinking mode" if chat else "the prompts are plain text"
    what = what if tokenizer.chat_template is not None else "the base has no chat template"
    raise DataError(f"{what} ({' or '.join(THINKING_SWITCHES)})", where, hint)
