"""Conversations that an engine writes, of rows of data: how a policy is scored in its environment.

rows, seeds, engine -> Conversation, with what its environment says it was worth

A conversation is kept as its messages, and its environment is not: the verdict is given once, when it has ended.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from perl.data.prompts import render_prompts
from perl.errors import DataError, RecipeError
from perl.recipe.agent_section import AgentSection
from perl.rollouts.agents.calls import Caller
from perl.rollouts.agents.conversations import Conversation, Limits, Turn, Words, converse, take_turn, words_of
from perl.rollouts.agents.environments import VOID, Agent, find_agent
from perl.rollouts.engine import Engine, EngineSampling, Request

# Between the seeds of a conversation's turns: a prime, above the number of conversations of any evaluation.
_NEXT_TURN = 1_000_000_007
_SEEDS = 2**63
# Conversations that are held at once while a policy is scored, all of which a kill loses; processes likewise.
_MOST_AT_ONCE, _MOST_ISOLATED = 256, 64


@dataclass(frozen=True)
class Asking:
    """How rows become conversations.

    Attributes:
        agent: Tools and environments.
        words: Of the base.
        context: Tokens that the base can read; None: any number.
    """

    agent: Agent
    words: Words
    context: int | None = None

    def limits(self, tokens: int) -> Limits:
        """Of a conversation of so many tokens."""
        section = self.agent.section
        return Limits(section.max_turns, tokens, section.max_result_length, self.context)

    def begun(self, row: Mapping[str, Any]) -> tuple[Conversation, object | None]:
        """A conversation before its first turn, and its environment."""
        environment, said = self.agent.begun(row)
        messages = list(row["prompt"])
        if said is not None:
            if not isinstance(said, str) or not isinstance(messages[-1]["content"], str):
                raise DataError("reset of an environment returned content parts", "agent.environment", "text, or None")
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + said}
        [prompt] = self.rendered([{**row, "prompt": messages}])
        return Conversation(prompt.token_ids, self.agent.tools_by_name(environment)), environment

    def rendered(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Prompts with the tools of their rows, in tokens."""
        return [
            render_prompts([row], self.words.tokenizer, {**self.words.arguments, "tools": self.agent.shown_to(row)})[0]
            for row in rows
        ]

    def hold(
        self,
        rows: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        engine: Engine,
        sampling: EngineSampling,
        anyone: Callable[[bool], bool] = bool,
        *,
        in_shards: bool = False,
    ) -> Iterator[tuple[int, Conversation]]:
        """A conversation of each row, with the place of the row, as soon as it has ended.

        Args:
            rows: Of the data.
            seeds: Of each conversation.
            engine: Has the policy.
            sampling: How tokens are drawn; its length is that of a whole conversation.
            anyone: As of :func:`perl.rollouts.agents.conversations.converse`.
            in_shards: Whether a forward pass needs every process, so that one without a turn to write takes part.
        """
        most, begin = _MOST_ISOLATED if self.agent.section.isolate else _MOST_AT_ONCE, 0
        while anyone(begin < len(rows)):
            some = slice(begin, begin + most)
            held = self._held(rows[some], seeds[some], engine, sampling, anyone, in_shards=in_shards)
            yield from enumerate(held, begin)
            begin += most

    def _held(
        self,
        rows: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        engine: Engine,
        sampling: EngineSampling,
        anyone: Callable[[bool], bool],
        *,
        in_shards: bool,
    ) -> list[Conversation]:
        begun = [self.begun(row) for row in rows]
        found = [one for one, _ in begun]
        seed_of = {id(one): seed for one, seed in zip(found, seeds, strict=True)}
        limits = self.limits(sampling.max_completion_length)

        def write(going: Sequence[Conversation]) -> list[Turn]:
            requests = [
                Request(
                    (*one.prompt_ids, *one.ids),
                    1,
                    (seed_of[id(one)] + one.turns * _NEXT_TURN) % _SEEDS,
                    min(limits.tokens - len(one.ids), self.agent.section.max_turn_length or limits.tokens),
                )
                for one in going
            ]
            asked = [one for one in requests if one.longest]
            if in_shards and not asked:
                engine.start([Request((sampling.end_token_ids[0],), 1, 0, 1)], sampling).result()
                return [Turn((), ()) for _ in going]
            turns = iter(engine.start(asked, sampling).result())
            written = [next(turns)[0] if one.longest else None for one in requests]
            return [Turn((), ()) if one is None else Turn(one.token_ids, one.log_probs) for one in written]

        for one, turn in zip(found, write(found), strict=True):
            take_turn(one, turn, self.words, limits)
        converse(found, write, self.words, Caller(self.agent.section.call_timeout), limits, anyone)
        for one, environment in begun:
            reward = getattr(environment, "get_reward", lambda: None)()
            one.reward = None if getattr(environment, VOID, "") else reward
            one.tools = {}  # which hold their environment, and that its process
        return found

    @property
    def label(self) -> str:
        """What a score depends on beside the prompts, for results to be told apart by."""
        section = self.agent.section
        tools = ", ".join(f"{name}@{code}" for name, code in self.agent.digests.items())
        limits = f"{section.max_turns} turns, {section.max_turn_length or 'any'} and {section.max_result_length} tokens"
        success = f", reward >= {section.success:g}" if self.rewards_itself else ""
        return f"{tools} in {limits}{success}"

    @property
    def rewards_itself(self) -> bool:
        """Whether environments say what a conversation is worth."""
        return any(hasattr(kind, "get_reward") for kind in self.agent.environments.values())


def asking_of(
    section: AgentSection,
    own_names: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    context: int | None,
) -> Asking:
    """How a recipe's rows become conversations.

    Args:
        section: Has tools.
        own_names: As of :class:`perl.rollouts.agents.environments.Agent`.
        tokenizer: The base's; its templates may be replaced.
        arguments: Further ones of the chat template.
        context: Tokens that the base can read; None: any number.

    Raises:
        RecipeError: A tool cannot be found or shown.
    """
    return Asking(find_agent(section, own_names), words_of(tokenizer, arguments), context)


def as_text(one: Conversation) -> str:
    """A conversation's messages as they are kept."""
    return json.dumps(one.messages, ensure_ascii=False)


def added_tokens(asking: Asking, rows: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that environments add to the questions of some rows, at most.

    Raises:
        RecipeError: None of the rows has an environment that can be reset.
    """
    shown = [len(prompt.token_ids) for prompt in asking.rendered(rows)]
    begun = [asking.begun(row) for row in rows]
    why = [getattr(environment, VOID, "") for _, environment in begun]
    if rows and all(why):
        raise RecipeError(f"in the first {len(rows)} rows: {why[0]}", "agent.environment", "correct it")
    lengths = [len(one.prompt_ids) for one, _ in begun]
    return max((after - before for before, after in zip(shown, lengths, strict=True)), default=0)
