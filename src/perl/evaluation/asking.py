"""How questions are put to a base: its chat template or another one, with or without its thinking mode.

tokenizer, settings -> tokenizer that renders as asked, arguments of its template

Loads no weights.
"""

import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from perl.errors import PerlError, first_line

_TEMPLATE, _THINKING = "--chat-template", "--thinking"
# What templates call the switch of their thinking mode: Qwen3 and most others; DeepSeek-V3.1 and Granite.
_SWITCHES = ("enable_thinking", "thinking")
_BLOCKS = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_LARGEST_FILE = 1_000_000


def set_template(
    tokenizer: PreTrainedTokenizerBase, file: str | Path | None = None, *, thinking: bool | None = None
) -> dict[str, Any]:
    """Gives a tokenizer the chat template of a file, if one is named, and finds the switch of the thinking mode.

    Args:
        tokenizer: The base's, whose template is replaced.
        file: With a Jinja template; None: the base's own stays.
        thinking: Whether the template is told to think; None: it is told nothing.

    Returns:
        Arguments of the template.

    Raises:
        PerlError: The file cannot be read, the template renders nothing, or it has no thinking mode.
    """
    if file is not None:
        tokenizer.chat_template = _read(Path(file).expanduser())
    arguments = {} if thinking is None else {_switch(tokenizer): thinking}
    if tokenizer.chat_template is not None:
        _try(tokenizer, arguments, "" if file is None else str(file))
    return arguments


def _read(path: Path) -> str:
    hint = "a file with a Jinja template, as chat_template.jinja of a model's repository"
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise PerlError(f"{path} has {path.stat().st_size:,} bytes, which is no template", _TEMPLATE, hint)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PerlError(f"{path} cannot be read: {reason}", _TEMPLATE, hint) from None
    if not text.strip():
        raise PerlError(f"{path} is empty", _TEMPLATE, hint)
    return text


def _switch(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name by which the template knows its thinking mode."""
    blocks = " ".join(_BLOCKS.findall(str(tokenizer.chat_template or "")))
    for name in _SWITCHES:
        if re.search(rf"\b{name}\b", blocks):
            return name
    what = "has no chat template" if tokenizer.chat_template is None else "has a chat template without a thinking mode"
    raise PerlError(f"the base {what} ({' or '.join(_SWITCHES)})", _THINKING, "leave it out, or name a --chat-template")


def _try(tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any], file: str) -> None:
    """Renders a question, so that a template that fails does so in one line."""
    question = [{"role": "user", "content": "1+1="}]
    try:
        rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **arguments)
    except (TemplateError, TypeError, ValueError) as error:
        where = f"{file} cannot be rendered" if file else "the base's chat template cannot be rendered"
        raise PerlError(f"{where}: {first_line(error)}", _TEMPLATE, "a template for chat messages") from None
    if "1+1=" not in str(rendered):
        raise PerlError(f"{file or 'the chat template'} does not show the question to the model", _TEMPLATE)
