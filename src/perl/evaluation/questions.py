"""A task's questions as the model sees them, and how long an answer may be.

TaskData, tokenizer, Protocol -> PreparedTask
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from perl.data import render_prompts
from perl.errors import PerlError
from perl.evaluation.draw import RenderedProblem, TaskRequest
from perl.evaluation.protocol import DEFAULT_MAX_NEW_TOKENS, Protocol
from perl.evaluation.task import TaskData


@dataclass(frozen=True)
class PreparedTask:
    """A task that is ready to be asked.

    Attributes:
        data: Its problems.
        request: The same in tokens.
        protocol_hash: Two results with the same may be compared.
    """

    data: TaskData
    request: TaskRequest
    protocol_hash: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return max(len(asked.prompt_ids) for asked in self.request.asked) + self.request.max_new_tokens


def prepare_task(
    data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    end_token_ids: tuple[int, ...],
    context: int | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> PreparedTask:
    """Renders a task's questions with the base's chat template, or as plain text where it has none.

    Args:
        data: The task and its problems.
        tokenizer: The base's.
        protocol: Says the system prompt and how long a completion may be.
        end_token_ids: Tokens that end one.
        context: Tokens that the base can read; None: any number.
        template_arguments: Of the chat template.

    Raises:
        PerlError: A prompt leaves no room for an answer.
    """
    task = data.task
    rows = [_row(question.text, question.gold, protocol.system_prompt, tokenizer) for question in data.questions]
    prompts = render_prompts(rows, tokenizer, template_arguments)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    wanted = protocol.max_new_tokens or task.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if context is not None:
        full = sum(length >= context for length in lengths)
        if full:
            longest, name = max(zip(lengths, (question.id for question in data.questions), strict=True))
            raise PerlError(
                f"{full} of {len(lengths)} prompts of {task.name} do not fit into the base's {context} tokens; "
                f"{name} has {longest}",
                "--tasks",
                "take a base with a longer context",
            )
        wanted = min(wanted, context - max(lengths))
    asked = tuple(
        RenderedProblem(question.id, prompt.token_ids, question.gold)
        for question, prompt in zip(data.questions, prompts, strict=True)
    )
    request = TaskRequest(task.name, asked, wanted, end_token_ids, tuple(task.stop))
    return PreparedTask(data, request, protocol_hash(protocol, data, wanted))


def protocol_hash(protocol: Protocol, data: TaskData, max_new_tokens: int) -> str:
    """What two results of a task share if they may be compared; of the length, what it really was."""
    task = data.task
    facts = {"task": task.name, "task_version": task.version, "prompt": task.prompt, "data": data.sha256}
    return protocol.hash({**facts, "max_new_tokens": max_new_tokens})


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Twelve hexadecimal digits of the chat template; None: there is none, prompts are plain text."""
    template = tokenizer.chat_template
    return hashlib.sha256(str(template).encode()).hexdigest()[:12] if template is not None else None


def _row(text: str, gold: str, system: str | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A question as lighteval's PromptManager would put it."""
    if tokenizer.chat_template is None:
        return {"prompt": text if system is None else f"{system}\n\n{text}", "solution": gold}
    messages: Sequence[dict[str, str]] = [{"role": "user", "content": text}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return {"prompt": list(messages), "solution": gold}
