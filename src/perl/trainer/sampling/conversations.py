"""A trainer's conversations with tools and environments: TRL's contract, held by our loop.

first turns as TRL samples them -> all turns, with a mask of the tokens that the policy wrote; rollouts -> checked

Every conversation ends: a call has its limit, what fails is told to the policy and counted, and a conversation whose
environment failed has no reward. What is trained is compared, token by token, with what was sampled.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from perl.errors import BrokenPromiseError, RewardError, warn
from perl.policy.model import base_of
from perl.rollouts.agents.calls import OUTCOMES, Answer, Caller
from perl.rollouts.agents.conversations import Conversation, Limits, Turn, Words, converse, take_turn
from perl.rollouts.agents.environments import VOID
from perl.trainer.arguments.config import own_setting
from perl.trainer.live import mode_of, most
from perl.trainer.overrides import is_replaced, may_hold_images
from perl.trainer.sampling.generation import Opening

HeldConversations = tuple[
    list[list[int]], list[list[dict[str, Any]]], list[list[int]], list[list[float]] | None, int, int, list[list[Any]]
]
"""What TRL's ``_tool_call_loop`` returns: masks, messages, token ids, log-probabilities, calls, failures, images."""


class Conversations:
    """Holds the conversations of a trainer."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        """Takes the trainer, which is constructed."""
        self._trainer = trainer
        self._caller = Caller(own_setting(trainer.args, "agent_call_timeout"))
        self._told: set[tuple[str, str]] = set()
        self._sampled: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def begin(self) -> None:
        """New rollouts are sampled."""
        self._sampled.clear()

    def note(self, prompt_ids: Sequence[Sequence[int]], made: tuple[Sequence[Sequence[int]], Any]) -> None:
        """A turn was sampled of each of these, by whatever samples."""
        for asked, sampled in zip(prompt_ids, made[0], strict=True):
            self._sampled.setdefault(tuple(asked), []).append(tuple(sampled))

    def hold(
        self,
        by_trl: Callable[..., HeldConversations],
        prompt_ids: Sequence[Sequence[int]],
        first: Sequence[Sequence[int]],
        messages: Any,  # noqa: ANN401 (TRL's)
        log_probs: Sequence[Sequence[float | None]] | None,
        *others: Any,  # noqa: ANN401
    ) -> HeldConversations:
        """Goes on with conversations whose first turn was sampled, until none of them calls anything.

        Args:
            by_trl: TRL's own loop, for those that may hold images.
            prompt_ids: Of each.
            first: Its first turn.
            messages: The same as TRL reads it.
            log_probs: Of the first turn's tokens; None: nobody knows them.
            others: TRL's further arguments.
        """
        if may_hold_images(self._trainer):
            return by_trl([Opening(ids) for ids in prompt_ids], first, messages, log_probs, *others)
        trainer, limits = self._trainer, self._limits()
        words = Words(trainer._tokenizer, trainer.chat_template, trainer.chat_template_kwargs)
        if is_replaced(trainer, "_get_tool_suffix_ids"):
            words = replace(words, between=trainer._get_tool_suffix_ids)
        self._caller.loop = getattr(trainer, "async_loop", None)
        dicts = zip(trainer._sync_tool_dicts, trainer._async_tool_dicts, strict=True)
        found = [
            Conversation(ids, {**sync, **waits}, log_probs=None if log_probs is None else [])
            for ids, (sync, waits) in zip(prompt_ids, dicts, strict=True)
        ]
        for place, (one, turn) in enumerate(zip(found, self._turns(first, log_probs), strict=True)):
            take_turn(one, turn, words, limits, messages[place][0])
            if self._is_void(place):
                one.calls = []
        answers = converse(found, partial(self._write, found), words, self._caller, limits, self._anyone)
        self._tell(found, answers)
        if trainer.rollout_source.is_served:
            now = trainer.state.global_step
            trainer.rollout_source.token_steps.take([[now if s is None else s for s in one.steps] for one in found])
        failed = sum(answer.outcome != "answered" for answer in answers)
        known: Any = None if any(one.log_probs is None for one in found) else [one.log_probs for one in found]
        masks = [[int(written) for written in one.written] for one in found]
        nothing: list[list[Any]] = [[] for _ in found]
        return masks, [one.messages for one in found], [one.ids for one in found], known, len(answers), failed, nothing

    def check(self, rollouts: dict[str, Any]) -> None:
        """Refuses rollouts whose tokens are not those that were sampled.

        Args:
            rollouts: TRL's padded tensors, of this process.

        Raises:
            BrokenPromiseError: A row holds tokens as the policy's own that no turn has sampled after what is before it.
        """
        trainer = self._trainer
        if not self._sampled or trainer.rollout_func is not None or is_replaced(trainer, "_generate"):
            return  # a script's own, which may sample with another prompt than it trains on
        masks_NT = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        lengths = rollouts["completion_mask"].sum(dim=1).tolist()
        for row, (prompt_T, mask_T) in enumerate(zip(rollouts["prompt_ids"], rollouts["prompt_mask"], strict=True)):
            asked = prompt_T[mask_T.bool()].tolist()
            ids = rollouts["completion_ids"][row, : int(lengths[row])].tolist()
            for begin, end in _runs(masks_NT[row, : len(ids)].tolist()):
                before, turn = (*asked, *ids[:begin]), tuple(ids[begin:end])
                if not any(one[: len(turn)] == turn for one in self._sampled.get(before, [])):
                    what = f"tokens {begin} to {end - 1} of completion {row} were not sampled after what stands before"
                    hint = "a turn was rendered again, or a prompt changed; keep the token ids, and mask what is added"
                    raise BrokenPromiseError(f"what is trained is not what was sampled: {what}", "rollouts", hint)

    def without_void(self, rewards_NK: torch.Tensor) -> torch.Tensor:
        """Rewards of all processes, NaN for conversations whose environment failed; counts these. Every process asks.

        Raises:
            RewardError: It failed in all conversations.
        """
        trainer = self._trainer
        if trainer.environments is None:
            return rewards_NK
        why = [getattr(one, VOID, "") for one in trainer.environments]
        for line in dict.fromkeys(filter(None, why)):
            self._say("tools/void", line.partition(":")[0], f"a conversation has no reward: {line}")
        own_N = torch.tensor([bool(line) for line in why], device=rewards_NK.device)
        void_N: torch.Tensor = trainer.accelerator.gather(own_N)
        if bool(void_N.all()):
            line = next(filter(None, why), "see the log of another process")
            raise RewardError(f"in all {len(void_N)} conversations of a step: {line}", "environment", "correct it")
        trainer._metrics[mode_of(trainer.model)]["tools/void"].append(void_N.float().mean().item())
        if bool(rewards_NK.isnan().all()):
            names = ", ".join(trainer.reward_func_names)
            self._say("rows/unscored", names, f"no conversation of a step has a reward: {names} gave None for all")
        return rewards_NK.masked_fill(void_N[:, None], torch.nan)

    def _limits(self) -> Limits:
        trainer = self._trainer
        config = base_of(trainer.policy).config.get_text_config()
        return Limits(
            turns=trainer.max_tool_calling_iterations + 1,
            tokens=trainer.max_completion_length,
            result_tokens=own_setting(trainer.args, "agent_max_result_length"),
            context=getattr(config, "max_position_embeddings", None),
        )

    def _is_void(self, place: int) -> bool:
        environments = self._trainer.environments
        return environments is not None and bool(getattr(environments[place], VOID, ""))

    def _anyone(self, here: bool) -> bool:
        return bool(most(self._trainer.accelerator, int(here)))

    def _write(self, every: Sequence[Conversation], going: Sequence[Conversation]) -> list[Turn]:
        """The next turns; a process that has none to write takes part where all must."""
        trainer = self._trainer
        asked = [Opening([*one.prompt_ids, *one.ids], len(one.prompt_ids)) for one in going]
        if not asked and trainer.whole_tensors and not trainer.rollout_source.is_served:
            return []
        spare = not asked and not trainer.whole_tensors  # a forward pass of shards needs every process
        if spare:
            asked = [Opening(every[0].prompt_ids)]
        ids, log_probs = trainer._generate_single_turn(asked, None, {}, trainer.num_generations)
        return [] if spare else self._turns(ids, log_probs)

    def _turns(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float | None]] | None) -> list[Turn]:
        """Turns that were sampled just now, each with the steps of the policies that wrote it."""
        source = self._trainer.rollout_source
        latest = source.token_steps.latest if source.is_served else []
        steps = latest if len(latest) == len(ids) else [None] * len(ids)  # else a script has sampled them itself
        known = [None] * len(ids) if log_probs is None else log_probs
        return [Turn(*turn) for turn in zip(ids, known, steps, strict=True)]

    def _tell(self, found: Sequence[Conversation], answers: Sequence[Answer]) -> None:
        """Logs turns and what became of calls, and says each kind of fault once."""
        trainer = self._trainer
        metrics = trainer._metrics[mode_of(trainer.model)]
        outcomes = sum((one.outcomes for one in found), Counter())
        ended = [sum(one.turns for one in found), sum(one.had_no_room for one in found), len(found)]
        counts = [*ended, *(outcomes[name] for name in OUTCOMES)]
        counts_C = torch.tensor(counts, device=trainer.accelerator.device)
        turns, full, rows, *calls = trainer.accelerator.reduce(counts_C, reduction="sum").tolist()
        metrics["tools/turns"].append(turns / max(rows, 1))
        metrics["tools/no_room"].append(full / max(rows, 1))
        for name, count in zip(OUTCOMES[1:], calls[1:], strict=True):
            metrics[f"tools/{name}_frequency"].append(count / max(sum(calls), 1))
        for answer in answers:
            if answer.outcome not in ("answered", "unknown", "arguments"):  # which the policy learns to avoid
                column = f"tools/{answer.outcome}_frequency"
                self._say(column, answer.fault.partition(":")[0], f"a call failed: {answer.fault}")

    def _say(self, column: str, about: str, line: str) -> None:
        if (column, about) not in self._told:
            self._told.add((column, about))
            warn("PRL366", "tools: %s (each kind is said once, and counted as %s)", line, column)


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of ones begin and end."""
    edges = [place for place in range(len(mask) + 1) if (mask[place - 1] if place else 0) != (*mask, 0)[place]]
    return list(zip(edges[::2], edges[1::2], strict=True))
