"""Conversations, turn by turn: the policy writes, its calls are answered, it goes on after the tokens as they were.

prompts in tokens, tools, what writes -> token ids with a mask of those that the policy wrote, messages

No turn is ever rendered again: a conversation is its prompt, what was sampled, and the tokens that the chat template
puts around answers, in the order in which they came.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response
from trl.chat_template_utils import is_chat_template_prefix_preserving as keeps_earlier_turns

from perl.errors import RecipeError
from perl.rollouts.agents.calls import Answer, Caller, Outcome, called_name
from perl.rollouts.agents.plain_calls import show_tools
from perl.rollouts.agents.tools import Tool

# Characters of a result that are looked at for each token that it may have; the rest of ten megabytes is not.
_CHARACTERS = 16

Message = dict[str, Any]


class Turn(NamedTuple):
    """What the policy wrote in one turn.

    Attributes:
        ids: Its tokens.
        log_probs: That they were sampled with; None: nobody knows them.
        steps: Of each, from how many optimizer steps the policy came that sampled it; None: it is the one of now.
    """

    ids: Sequence[int]
    log_probs: Sequence[float | None] | None = None
    steps: Sequence[int] | None = None

    def cut(self, count: int) -> "Turn":
        """Its first tokens."""
        log_probs, steps = (part if part is None else part[:count] for part in (self.log_probs, self.steps))
        return Turn(self.ids[:count], log_probs, steps)  # type: ignore[arg-type]  # each of its own kind


Write = Callable[[Sequence["Conversation"]], Sequence[Turn]]
"""The next turn of each conversation."""


@dataclass(frozen=True)
class Limits:
    """How long a conversation may be.

    Attributes:
        turns: Of the policy.
        tokens: After the prompt, answers of tools included.
        result_tokens: Of what one call answers; None: what is left.
        context: With the prompt; None: any number.
    """

    turns: int
    tokens: int
    result_tokens: int | None = None
    context: int | None = None


@dataclass
class Conversation:
    """One conversation.

    Attributes:
        prompt_ids: What it began with.
        tools: By name.
        ids: All tokens after the prompt.
        written: For each of them whether the policy wrote it.
        log_probs: Of each, 0 where the policy did not write; None: nobody knows them.
        steps: Of each, as of :class:`Turn`; None: now.
        messages: What was said after the prompt.
        turns: Of the policy.
        calls: Asked for in its last turn, and not answered yet.
        outcomes: Of the calls that were answered.
        had_no_room: Whether it ended because what its calls answered did not fit.
        reward: What its environment said of it once it had ended; None: nothing, or it failed.
    """

    prompt_ids: Sequence[int]
    tools: Mapping[str, Tool]
    ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    log_probs: list[float | None] | None = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    had_no_room: bool = False
    reward: float | None = None

    def add(self, turn: Turn, *, written: bool) -> None:
        """More tokens at its end."""
        ids, log_probs, steps = turn
        self.ids += ids
        self.steps += [None] * len(ids) if steps is None else steps
        self.written += [written] * len(ids)
        if self.log_probs is not None and (log_probs is not None or not written):
            self.log_probs += [0.0] * len(ids) if log_probs is None else log_probs
        elif written and ids:
            self.log_probs = None


@dataclass(frozen=True)
class Words:
    """How turns become messages, and answers become tokens.

    Attributes:
        tokenizer: The base's; shows tools.
        template: In the place of its own chat template, where that changes earlier turns; None: its own.
        arguments: Further ones of the template.
        plain: Whether calls are plain text.
        between: What makes the tokens between two turns of the messages of tools; None: the template does.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    between: Callable[[list[Message]], list[int]] | None = None

    def read(self, ids: Sequence[int], before: Sequence[int], tools: Mapping[str, Tool]) -> Message:
        """What the policy said in a turn, with what it calls."""
        if not ids:  # there was no room for any
            return {"role": "assistant", "content": ""}
        try:
            message: Message = parse_response(
                self.tokenizer, list(ids), prefix=list(before), tools=list(tools.values())
            )
        except Exception:  # noqa: BLE001 (the parser of a template, on whatever a model writes)
            return {"role": "assistant", "content": self.tokenizer.decode(list(ids), skip_special_tokens=True)}
        return message

    def after(self, answers: Sequence[Message], last: int | None) -> list[int]:
        """The tokens between a turn and the next one: answers of tools, as the template shows them.

        Args:
            answers: Messages of tools.
            last: The turn's last token; where that is no end, the end comes first.

        Raises:
            RecipeError: The template does not show answers after what was before them.
        """
        if self.between is not None:
            return self.between(list(answers))
        called = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        asked: list[Message] = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
        ]
        before, whole = self._ids(asked, goes_on=False), self._ids([*asked, *answers], goes_on=True)
        end = self.tokenizer.eos_token_id
        if end in before:  # what a template puts after the end of a turn stands before the answers
            before = before[: len(before) - before[::-1].index(end)]
        if whole[: len(before)] != before:
            what = "the chat template does not show what tools answer after the turns before it"
            raise RecipeError(what, "agent", "a base whose template shows tools, as Qwen's")
        closed = end not in before or last == end
        return ([] if closed else [end]) + whole[len(before) :]

    def result(self, text: str, most: int | None) -> str:
        """What a call answered as it is shown: no token of the template, and no more tokens than it may have."""
        text = text.encode("utf-8", "replace").decode()  # a half of a surrogate pair has no tokens
        marks = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        for mark in marks:  # written as text they would be the template's own
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        if most is None or len(text) <= most:
            return text
        ids = self.tokenizer(text[: most * _CHARACTERS], add_special_tokens=False)["input_ids"]
        if len(ids) <= most and len(text) <= most * _CHARACTERS:
            return text
        return f"{self.tokenizer.decode(ids[:most])}... (cut off: {len(text):,} characters)"

    def _ids(self, messages: Sequence[Message], *, goes_on: bool) -> list[int]:
        found: list[int] = self.tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=goes_on,
            chat_template=self.template,
            tokenize=True,
            return_dict=False,
            **self.arguments,
        )
        return found


def words_of(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], where: str = "agent") -> Words:
    """How a base's conversations are read and shown, as TRL's trainer does with the same tokenizer.

    Args:
        tokenizer: Its templates may be replaced: see :func:`perl.rollouts.agents.plain_calls.show_tools`.
        arguments: Further ones of the chat template.
        where: What the user asked for tools in.

    Raises:
        RecipeError: The base cannot be shown tools, or nobody knows how it writes calls.
    """
    plain = show_tools(tokenizer, where)
    template = None
    try:
        if getattr(tokenizer, "response_template", None) is None:
            add_response_schema(tokenizer)
        if not keeps_earlier_turns(tokenizer):
            template = get_training_chat_template(tokenizer)
    except ValueError as error:
        what = f"nobody knows how the base writes calls: {' '.join(str(error).split())}"
        hint = "set tokenizer.response_template, or take a base that TRL knows: Qwen, Llama 3, Gemma 4, LFM2, GPT-OSS"
        raise RecipeError(what, where, hint) from error
    return Words(tokenizer, template, arguments, plain)


def take_turn(one: Conversation, turn: Turn, words: Words, limits: Limits, message: Message | None = None) -> None:
    """A turn of the policy was sampled; what no longer fits is cut off.

    Args:
        one: Goes on with it.
        turn: What was sampled.
        words: Of the base.
        limits: Of a conversation.
        message: The turn as it was read already; None: it was not.
    """
    turn = turn.cut(limits.tokens - len(one.ids))
    if message is None:
        message = words.read(turn.ids, [*one.prompt_ids, *one.ids], one.tools)
    one.add(turn, written=True)
    one.turns += 1
    if turn.ids:
        one.messages.append(message)
    asked = message.get("tool_calls") or []
    one.calls = list(asked) if one.turns < limits.turns else []


def converse(
    conversations: Sequence[Conversation],
    write: Write,
    words: Words,
    caller: Caller,
    limits: Limits,
    anyone: Callable[[bool], bool] = bool,
) -> list[Answer]:
    """Goes on with conversations whose first turn is there until none of them calls anything.

    Args:
        conversations: Are changed.
        write: Samples the next turn of each of those that it is given, perhaps of none.
        words: Of the base.
        caller: Calls the tools.
        limits: Of a conversation.
        anyone: Whether any process of several has something left, from whether this one has.

    Returns:
        The answers of all calls.
    """
    every: list[Answer] = []
    caller.overran.clear()
    while anyone(any(one.calls for one in conversations)):
        asking = [one for one in conversations if one.calls]
        answers = caller.answers([(one.tools, call) for one in asking for call in one.calls])
        every += answers
        left = iter(answers)
        going = [one for one in asking if _answered(one, [next(left) for _ in one.calls], words, limits)]
        for one, turn in zip(going, write(going), strict=True):
            take_turn(one, turn, words, limits)
    return every


def _answered(one: Conversation, answers: Sequence[Answer], words: Words, limits: Limits) -> bool:
    """Puts the answers of a turn's calls behind it; False: there is no room for them, so the conversation has ended."""
    messages: list[Message] = []
    for call, answer in zip(one.calls, answers, strict=True):
        one.outcomes[answer.outcome] += 1
        name = words.result(called_name(call), None)
        messages.append({"role": "tool", "name": name, "content": words.result(answer.content, limits.result_tokens)})
    one.calls = []
    further = words.after(messages, one.ids[-1] if one.ids else None)
    length = len(one.ids) + len(further)
    if length > limits.tokens or (limits.context is not None and len(one.prompt_ids) + length >= limits.context):
        one.had_no_room = True
        return False
    one.messages += messages
    one.add(Turn(further), written=False)
    one.had_no_room = length == limits.tokens
    return not one.had_no_room
