"""A task's questions as the model sees them, in the base's chat template or another, and how long an answer may be.

TaskData, tokenizer, Protocol -> PreparedTask
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from perl.data import render_prompts, thinking_arguments
from perl.errors import PerlError, first_line
from perl.evaluation.scoring.protocol import DEFAULT_MAX_NEW_TOKENS, Protocol, task_facts
from perl.evaluation.scoring.reward_scorer import find_scorer
from perl.evaluation.scoring.scorers import Scorer
from perl.evaluation.scoring.task import MATH, Example, Question, TaskData, shown_fact, shown_hash
from perl.evaluation.tasks.draw import RenderedProblem, TaskRequest
from perl.recipe.eval_section import SCORER_SECONDS

_TEMPLATE = "--chat-template"


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
    asking: Mapping[str, str] | None = None,
    scorer_timeout: float = SCORER_SECONDS,
) -> PreparedTask:
    """Renders a task's questions with the base's chat template, or as plain text where it has none.

    Args:
        data: The task and its problems.
        tokenizer: The base's.
        protocol: Says the system prompt and how long a completion may be.
        end_token_ids: Tokens that end one.
        context: Tokens that the base can read; None: any number.
        template_arguments: Of the chat template; those of a recipe whose held-out problems are asked come first.
        asking: What was asked for in place of the base's own template, of
            :func:`perl.evaluation.scoring.protocol.asked_facts`.
        scorer_timeout: Seconds that a user's reward may take for a completion; 0: there is no limit.

    Raises:
        PerlError: A prompt leaves no room for an answer, or a question lacks what the scorer needs.
    """
    task, every = data.task, (*data.questions, *data.further)
    scorer = scorer_of(data, timeout_seconds=scorer_timeout)
    rows = [_row(question, data.examples, protocol.system_prompt, tokenizer) for question in every]
    _check_system(data, protocol.system_prompt)
    arguments = {**(task.template_arguments or {}), **(template_arguments or {})}
    prompts = [prompt.token_ids for prompt in render_prompts(rows, tokenizer, arguments)]
    asked = tuple(rendered(question, prompt) for question, prompt in zip(every, prompts, strict=True))
    count = len(data.questions)
    wanted = protocol.max_new_tokens or task.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if context is not None:
        full = [f"{one.problem} has {len(one.prompt_ids)}" for one in asked[:count] if len(one.prompt_ids) >= context]
        if full:
            what = f"{len(full)} of {count} prompts of {task.name} do not fit into the base's {context} tokens"
            raise PerlError(f"{what}; {full[0]}", "--tasks", "take a base with a longer context")
        # Of those that are not asked too, so that no limit changes it.
        wanted = min(wanted, context - max(len(prompt) for prompt in prompts if len(prompt) < context))
    request = TaskRequest(
        task.name, asked[:count], wanted, end_token_ids, tuple(task.stop), scorer, further=asked[count:]
    )
    return PreparedTask(data, request, protocol_hash(protocol, data, wanted, scorer.label, asking))


def scorer_of(data: TaskData, spec: str | None = None, timeout_seconds: float = SCORER_SECONDS) -> Scorer:
    """What judges a task's completions.

    Args:
        data: Its questions.
        spec: Instead of the task's own; None: that.
        timeout_seconds: As of :func:`perl.evaluation.scoring.reward_scorer.find_scorer`.

    Raises:
        PerlError: There is no such scorer, or a question lacks what it needs.
    """
    where = "--scorer" if spec else f"task {data.task.name}"
    scorer = find_scorer(spec or data.task.scorer, where, timeout_seconds)
    for question in (*data.questions, *data.further):
        if lacking := scorer.lacking(question):
            raise PerlError(lacking.message, f"task {data.task.name}", lacking.hint)
    return scorer


def rendered(question: Question, prompt_ids: tuple[int, ...]) -> RenderedProblem:
    """A question with its prompt in tokens."""
    return RenderedProblem(question.id, prompt_ids, question.gold, question)


def prompts_hash(request: TaskRequest) -> str:
    """SHA-256 of what every problem of a task is called and of its prompt, those beyond a limit included."""
    every = (*request.asked, *request.further)
    return hashlib.sha256(json.dumps([(asked.problem, asked.prompt_ids) for asked in every]).encode()).hexdigest()


def protocol_hash(
    protocol: Protocol,
    data: TaskData,
    max_new_tokens: int,
    scorer: str | None = None,
    asking: Mapping[str, str] | None = None,
) -> str:
    """What two results of a task share if they may be compared; of the length, what it really was.

    Args:
        protocol: How completions are drawn.
        data: The task, as much of it as is asked.
        max_new_tokens: As it was asked.
        scorer: What judges, as results name it; None: the task's own, which is no reward.
        asking: As of :func:`prepare_task`.
    """
    task, judge = data.task, data.task.scorer if scorer is None else scorer
    judged_by = None if judge == MATH else judge
    shown = shown_fact(len(data.examples), shown_hash(data.examples))
    about = (task.name, task.version, task.prompt, data.sha256)
    return protocol.hash(task_facts(*about, max_new_tokens, judged_by, shown, asking))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Twelve hexadecimal digits of the chat template; None: there is none, prompts are plain text."""
    template = tokenizer.chat_template
    return hashlib.sha256(str(template).encode()).hexdigest()[:12] if template is not None else None


def _check_system(data: TaskData, system: str | None) -> None:
    """Refuses a system prompt that problems with one of their own, or in plain text, would not show.

    Raises:
        PerlError: There is such a problem.
    """
    for question in (*data.questions, *data.further) if system is not None else ():
        own = question.prompt if isinstance(question.prompt, tuple) else ()
        said = [message.get("content") for message in own if message.get("role") == "system"]
        if isinstance(question.prompt, str) or (said and said != [system]):
            what = f"the problems of {data.task.name} are asked in their own words, without this system prompt"
            raise PerlError(what, "--system-prompt", "leave it out")


def _row(
    question: Question, examples: Sequence[Example], system: str | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A question as lighteval's PromptManager would put it, after the examples."""
    gold = question.gold
    if isinstance(question.prompt, str):
        return {"prompt": question.prompt, "solution": gold}
    if tokenizer.chat_template is None:
        text = as_text(examples, question)
        return {"prompt": text if system is None else f"{system}\n\n{text}", "solution": gold}
    messages = shown_before(examples, question)
    own = question.prompt or ()
    own_system = [dict(message) for message in own if message.get("role") == "system"]
    if not own_system and system is not None:
        own_system = [{"role": "system", "content": system}]
    return {"prompt": [*own_system, *messages], "solution": gold}


def shown_before(examples: Sequence[Example], question: Question) -> list[dict[str, Any]]:
    """The examples as turns of a chat, and the question as its last user message."""
    turns = [turn for one in examples for turn in (*_asked(one.question), _said("assistant", one.answer))]
    return [*turns, *_asked(question)]


def as_text(examples: Sequence[Example], question: Question) -> str:
    """The examples and the question as plain text, a blank line between two of them."""
    pairs = [(one.question.text, one.answer) for one in examples]
    parts = [f"{asked} {answer}" if asked.endswith(":") else f"{asked}\n{answer}" for asked, answer in pairs]
    return "\n\n".join([*parts, question.text])


def _asked(question: Question) -> Iterator[dict[str, Any]]:
    """What the user says; a system message of the data's own stands at the beginning of the chat alone."""
    if not isinstance(question.prompt, tuple):
        yield _said("user", question.text)
        return
    yield from (dict(message) for message in question.prompt if message.get("role") != "system")


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def set_template(
    tokenizer: PreTrainedTokenizerBase,
    file: str | Path | None = None,
    *,
    thinking: bool | None = None,
    system: str | None = None,
) -> dict[str, Any]:
    """Gives a tokenizer the chat template of a file, if one is named, and finds the switch of the thinking mode.

    Args:
        tokenizer: The base's, whose template is replaced.
        file: With a Jinja template; None: the base's own stays.
        thinking: Whether the template is told to think; None: it is told nothing.
        system: The system prompt before every question, beside which a template may ignore that.

    Returns:
        Arguments of the template.

    Raises:
        PerlError: The file cannot be read, the template renders nothing, or it has no thinking mode.
    """
    if file is not None:
        try:
            tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            hint = "a file with a Jinja template, as chat_template.jinja of a model's repository"
            raise PerlError(f"{Path(file).expanduser()} cannot be read: {reason}", _TEMPLATE, hint) from None
    question = [{"role": "user", "content": "1+1="}]  # so that a template that fails does so in one line
    if tokenizer.chat_template is not None:
        try:
            shown = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            what = f"{file or 'the chat template of the base'} cannot be rendered: {first_line(error)}"
            raise PerlError(what, _TEMPLATE, "a template for chat messages") from None
        if "1+1=" not in str(shown):
            raise PerlError(f"{file or 'the chat template'} does not show the question to the model", _TEMPLATE)
    hint = "leave it out, or name a --chat-template"
    question = question if system is None else [_said("system", system), *question]
    return thinking_arguments(question, tokenizer, thinking, where="--thinking", hint=hint)
