"""Calls in plain text, for chat templates that cannot show tools: ``<call>multiply(a=3, b=4)</call>``.

chat template, end token -> the same template that shows tools, calls and results, and how its calls are read

What is changed is the tokenizer's own ``chat_template`` and ``response_template``: a tokenizer that is saved has them,
so that TRL, transformers and servers show and read the calls as training did.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from perl.errors import RecipeError

_MARK = "{#- perl: calls in plain text -#}"
# Messages are written anew as text that any template has, before the template itself reads them: tools before the first
# question, calls behind what the assistant says, results of one turn as one message of the user.
_HEAD = (
    _MARK
    + """\
{%- set plain = namespace(messages=[], text='', asked=not tools) -%}
{%- for message in messages -%}
{%- set plain.text = message['content'] or '' -%}
{%- if message['role'] == 'user' and not plain.asked -%}
{%- set plain.asked = true -%}
{%- set plain.text = '\\n\\n' + plain.text -%}
{%- for tool in tools | reverse -%}
{%- set about = tool['function'] -%}
{%- set plain.text = '\\n' + about['name'] + '(' + (about['parameters']['properties'] | join(', ')) + '): ' +
about['description'] + plain.text -%}
{%- endfor -%}
{%- set first = tools[0]['function'] -%}
{%- set plain.text = 'Functions, called as <call>' + first['name'] + '(' +
(first['parameters']['properties'] | join('=..., ')) + ('=...' if first['parameters']['properties'] else '') +
')</call>:' + plain.text -%}
{%- elif message['role'] == 'tool' -%}
{%- set plain.text = '<result>' + plain.text + '</result>' -%}
{%- elif message['tool_calls'] -%}
{%- for call in message['tool_calls'] -%}
{%- set about = call['function'] -%}
{%- set written = namespace(arguments=[]) -%}
{%- for key, value in about['arguments'].items() -%}
{%- set written.arguments = written.arguments + [key + '=' + (value | tojson)] -%}
{%- endfor -%}
{%- set plain.text = plain.text + '<call>' + about['name'] + '(' + (written.arguments | join(', ')) + ')</call>' -%}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'tool' and plain.messages and plain.messages[-1]['results'] -%}
{%- set plain.messages = plain.messages[:-1] +
[{'role': 'user', 'content': plain.messages[-1]['content'] + plain.text, 'results': true}] -%}
{%- else -%}
{%- set plain.messages = plain.messages + [{'role': 'user' if message['role'] == 'tool' else message['role'],
'content': plain.text, 'results': message['role'] == 'tool'}] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = plain.messages -%}
{%- set tools = none %}"""
)
# An argument's value: JSON, or text between single quotes; brackets up to three deep.
_ATOM = r"[^\[\]{}'\"]|'[^']*'|\"(?:[^\"\\]|\\.)*\""
_NESTED = _ATOM
for _ in range(3):
    _NESTED = rf"{_ATOM}|[\[{{](?:{_NESTED})*[\]}}]"
_VALUE = rf"'[^']*'|\"(?:[^\"\\]|\\.)*\"|[\[{{](?:{_NESTED})*[\]}}]|[^,)\s]+"


def _response(begin: str, end: str) -> Mapping[str, Any]:
    """How transformers reads a turn, as ``tokenizer.response_template``, from what begins it to what ends it."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": begin,
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call>\s*(?P<name>\w+)\((?=[\s\S]*?\)\s*</call>)",
                "close_pattern": r"\)\s*</call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": rf"(?P<key>\w+)\s*=\s*(?P<value>{_VALUE})",
                    "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
                },
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": rf"(?:{re.escape(end)})\s*|$", "content": "text"},
        },
    }


def show_tools(tokenizer: PreTrainedTokenizerBase, where: str = "agent") -> bool:
    """Has a tokenizer show tools, calls and results; one whose chat template does so already is left as it is.

    Args:
        tokenizer: The base's; its templates may be replaced.
        where: What the user asked for tools in.

    Returns:
        Whether calls are plain text.

    Raises:
        RecipeError: There is no chat template, or neither way fits it.
    """
    if tokenizer.chat_template is None:
        raise RecipeError("the base has no chat template, so it cannot be shown tools", where, "an instruct model")
    if is_plain(tokenizer):
        return True
    if supports_tool_calling(tokenizer):
        return False
    own = str(tokenizer.chat_template)
    with contextlib.suppress(ValueError):  # one that changes earlier turns has a twin in TRL that does not
        tokenizer.chat_template = get_training_chat_template(tokenizer) or own
    tokenizer.chat_template = _HEAD + str(tokenizer.chat_template)
    if not (supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)):
        tokenizer.chat_template = own
        what = "the base's chat template shows no tools, and drops or changes earlier turns that hold calls as text"
        raise RecipeError(what, where, "a base whose template has tools, as Qwen's, Llama 3's, Gemma 4's or LFM2's")
    asked = [{"role": "user", "content": "1+1="}]
    shown, begun = (
        str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=turn)) for turn in (False, True)
    )
    tokenizer.response_template = dict(_response(begun.removeprefix(shown), str(tokenizer.eos_token)))
    return True


def is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its calls are plain text."""
    return str(tokenizer.chat_template or "").startswith(_MARK)
