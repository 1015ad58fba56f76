"""Teaching: what a teacher adds to an optimizer step, the reverse KL divergence of each token of the policy's own.

rollouts -> the teacher's prompts; micro-batch -> the teacher's hidden states -> divergence beside the log-probs -> loss

The teacher runs without gradient just before the policy runs the same completions, so that its hidden states are there
for one micro-batch at a time, (S, D) of its S scored tokens and no logits. A checkpoint holds nothing but who it is.
"""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedConfig

from perl.errors import DataError, ModelError, RecipeError
from perl.packing.divergence import head_divergence
from perl.packing.forward import Passes, choose_passes, last_hidden_states
from perl.packing.head import HeadStates, add_scored_forward, logit_settings
from perl.packing.micro_batches import TAUGHT_IDS, TAUGHT_MASK, MicroBatch, renumbered, token_batches
from perl.packing.rope import rope_width
from perl.packing.rows import ScoredTokens
from perl.policy.model import base_of
from perl.recipe.sections import TeacherSection
from perl.run.joint_work import joined
from perl.trainer.live import LiveTrainer
from perl.trainer.step.log_prob_passes import LogProbPasses

DIVERGENCE, AGREEMENT = "teacher/kl", "teacher/agreement"
"""Mean KL(policy || teacher) of a token in nats; share of the tokens that both find the likeliest."""
ANSWERS = ("solution", "answer")
"""Columns that hold the gold answer: a recipe's, and what scripts usually call it."""
_SAME = "is the policy itself, asked what the policy is asked: there is nothing to learn from it"
_HINT = "another adapter, a hint, or a system prompt of its own"
_NAMES = re.compile(r"\{(prompt|answer)\}")
_NOTHING = 1e-6  # nats a token: float32 adds up to 1e-7 where two forward passes of one policy are compared
_LONGEST_TEXTS = 64  # prompts whose tokens are counted to know the longest: its text is one of the longest


@dataclass(frozen=True)
class TeacherModel:
    """A teacher and what it is asked with.

    Attributes:
        model: From :func:`perl.policy.teacher.make_teacher`.
        section: How it teaches.
        identity: What a resumed training compares.
        settings: Who it is, for people.
    """

    model: torch.nn.Module
    section: TeacherSection
    identity: str
    settings: Mapping[str, str]


class Teaching:
    """Runs the teacher beside the policy. Owns the sums of what is logged of it.

    Attributes:
        teacher: Whom it runs.
    """

    def __init__(
        self,
        live: LiveTrainer,
        teacher: TeacherModel,
        passes: LogProbPasses,
        tokenize: Callable[[list[Any]], list[list[int]]],
        *,
        by_rollout_func: bool = False,
        alone: bool = False,
    ) -> None:
        """Teaches the teacher to give its hidden states.

        Args:
            live: The training, whose policy is complete.
            teacher: Whom to run.
            passes: How rows go through the policy.
            tokenize: The tokens of prompts, as the policy's are made.
            by_rollout_func: Whether that makes the policy's prompts in the place of ``tokenize``.
            alone: Whether nothing else gives the first step a gradient.
        """
        self._live, self.teacher, self._passes, self._tokenize = live, teacher, passes, tokenize
        self._by_rollout_func, self._alone = by_rollout_func, alone
        base, args = base_of(teacher.model), live.args
        self._width_of = rope_width(base)
        self._context = context_of(base.config)
        logits = logit_settings(base.config, temperature=args.temperature, float32=args.cast_lm_head_to_fp32)
        add_scored_forward(base, logits)
        self.start()

    @cached_property
    def _how(self) -> Passes:
        """How rows go through the teacher: packed only where the policy's are, found out by comparing as there."""
        policys = self._passes.passes
        return choose_passes(self.teacher.model, padding_free=policys.packed, share=policys.shared)

    def add_prompts(self, inputs: Sequence[dict[str, Any]], output: dict[str, Any]) -> None:
        """Gives rollouts the teacher's prompts, where they are not the policy's.

        Args:
            inputs: The examples, one for each completion.
            output: Their rollouts; gets token ids and mask of (N, .), padded on the left.

        Raises:
            DataError: A prompt cannot be made; on all processes, as the next ones.
            ModelError: Such a prompt and the longest completion are more than the model's context.
            RecipeError: The policy was asked something else than what the data has.
        """
        if not self.teacher.section.changes_prompts:
            return
        processes = joined()
        with processes.failing_together():
            rows = self._tokenize([teacher_prompt(row, self.teacher.section) for row in inputs])
            longest = max(map(len, rows))
            check_context(longest, int(self._live.args.max_completion_length), self._context)
            if self._by_rollout_func:
                own = self._tokenize([row["prompt"] for row in inputs])
                for ids, ids_P, mask_P in zip(own, output["prompt_ids"], output["prompt_mask"], strict=True):
                    if ids != ids_P[mask_P.bool()].tolist():
                        what = "puts a hint into the data's prompts, and rollout_func has asked the policy another one"
                        raise RecipeError(what, "teacher", "teacher.adapter, or return the trainer's own prompt_ids")
        processes.meet()
        device = output["prompt_ids"].device
        ids_NP = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_NP = torch.zeros_like(ids_NP)
        for index, ids in enumerate(rows):
            ids_NP[index, longest - len(ids) :] = torch.tensor(ids)
            mask_NP[index, longest - len(ids) :] = 1
        output |= {TAUGHT_IDS: ids_NP.to(device), TAUGHT_MASK: mask_NP.to(device)}

    def beside(self, batch: MicroBatch) -> Callable[[ScoredTokens, HeadStates], tuple[torch.Tensor, ...]]:
        """Runs the teacher on a micro-batch; what then makes divergences of the policy's states of the same rows.

        Args:
            batch: Of the policy.
        """
        (teacher_SD, place_NT), top_k = self.hidden_states(batch), self.teacher.section.top_k

        def divergence(scored: ScoredTokens, states: HeadStates) -> tuple[torch.Tensor, ...]:
            place_S = place_NT[scored.rows.to(place_NT.device), scored.columns.to(place_NT.device)]
            return head_divergence(states, teacher_SD[place_S].to(states.hidden_SD.device), top_k=top_k)

        return divergence

    @torch.no_grad()
    def hidden_states(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's last hidden states that predict the scored tokens of a micro-batch, and none besides.

        Returns:
            (S, D) states in the order in which the teacher ran them; (N, T) int64, which of them is a token's, 0 where
            a token is not scored.
        """
        # As the teacher sees them. Rotary factors that depend on the length are those of a row by itself.
        rows = [
            row
            if row.taught is None
            else replace(row, prompt=row.taught, width=self._width_of(row.taught.numel() + row.completion.numel()))
            for row in batch.rows
        ]
        place_NT = torch.zeros_like(batch.mask_NT, dtype=torch.long)
        with self._live.accelerator.autocast():
            packed = self._how.packs(rows)
            share, budget = packed and self._how.shared, self._passes.tokens_without_gradient
            result_SD, count = None, 0
            for groups in token_batches(rows, budget=budget, packed=packed, share=share):
                indices, own = renumbered(groups)
                part_SD, scored = last_hidden_states(self.teacher.model, [rows[i] for i in indices], own, packed=packed)
                if result_SD is None:
                    result_SD = part_SD.new_empty(sum(int(row.scored.sum()) for row in rows), part_SD.size(1))
                rows_S = torch.tensor(indices, device=scored.rows.device)[scored.rows]
                here_S = torch.arange(count, count + len(part_SD), device=place_NT.device)
                place_NT[rows_S.to(place_NT.device), scored.columns.to(place_NT.device)] = here_S
                result_SD[count : count + len(part_SD)] = part_SD
                count += len(part_SD)
        if result_SD is None:
            raise ValueError("a micro-batch without rows")
        return result_SD, place_NT.to(result_SD.device)

    def term(self, made: Sequence[torch.Tensor], batch: MicroBatch) -> torch.Tensor:
        """The part of a step's loss that the teacher is, of a micro-batch; adds to what is logged.

        Args:
            made: (N, T) divergences with gradient and (N, T) agreements, of :meth:`beside`.
            batch: Of which.
        """
        kl_NT, agrees_NT = made
        mask_NT = batch.mask_NT.to(kl_NT.device)
        with torch.no_grad():
            sums = [(kl_NT * mask_NT).sum(), (agrees_NT * mask_NT).sum(), mask_NT.sum()]
            self._sums += torch.stack([value.float() for value in sums]).to(self._sums.device)
        return self.teacher.section.weight * (kl_NT * batch.weights_NT).sum()

    def start(self) -> None:
        """Empty sums, for an accumulation window."""
        self._sums = torch.zeros(3, device=self._live.accelerator.device)  # of divergences, agreements, tokens

    def values(self, *, trained: bool) -> Iterator[tuple[str, float]]:
        """What is logged of a window, over the tokens of all processes; every process must ask.

        Args:
            trained: Whether the window is of a step, not of an evaluation.

        Raises:
            RecipeError: In the first step of a training that it alone teaches, it agrees with the policy in all.
        """
        divergences, agreements, tokens = self._live.accelerator.reduce(self._sums, reduction="sum").tolist()
        first = trained and self._live.state.global_step == 0
        if tokens and self._alone and first and divergences / tokens < _NOTHING:
            raise RecipeError(f"{_SAME} (KL {divergences / tokens:.1g} nats a token)", "teacher", _HINT)
        if tokens:
            yield DIVERGENCE, divergences / tokens
            yield AGREEMENT, agreements / tokens


def check_prompts(
    data: Any,  # noqa: ANN401 (of any kind that a trainer takes)
    section: TeacherSection,
    tokenize: Callable[[list[Any]], list[list[int]]],
    completion: int,
    context: int | None,
    *,
    same: bool,
) -> None:
    """Makes the prompts of a script's data set as the teacher will see them; those of a stream cannot be known.

    Args:
        data: The data set.
        section: Of the teacher.
        tokenize: The tokens of prompts, as the policy's are made.
        completion: Tokens of the longest one.
        context: Tokens that the model was made for; None: not known, and ``tokenize`` is not called.
        same: As of :func:`check_differs`.

    Raises:
        DataError: A prompt cannot be made.
        ModelError: One leaves no room for the completion.
        RecipeError: There is nothing to learn from it.
    """
    columns = getattr(data, "column_names", None) or ANSWERS
    check_answers(columns, section)
    if not isinstance(data, Dataset) or not len(data):
        return
    needed = data.select_columns([name for name in ("prompt", *ANSWERS) if name in columns])
    check_differs(needed, section, same=same)
    if section.changes_prompts:
        prompts = (teacher_prompt(row, section) for row in needed)
        longest = heapq.nlargest(_LONGEST_TEXTS, prompts, key=lambda prompt: len(str(prompt)))
        if context is not None:
            check_context(max(map(len, tokenize(longest))), completion, context)


def context_of(config: PreTrainedConfig) -> int | None:
    """Tokens that a model was made for; None: not known."""
    found: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found


def check_context(prompt: int, completion: int, context: int | None) -> None:
    """Refuses a teacher's prompt that leaves no room for the completion.

    Args:
        prompt: Tokens of the longest one.
        completion: Tokens of the longest one.
        context: Tokens that the model was made for; None: not known.

    Raises:
        ModelError: Says how many tokens are left.
    """
    if context is not None and prompt + completion > context:
        what = f"the teacher's longest prompt has {prompt} tokens, with {completion} of completion that is more than "
        hint = f"at most {context - completion} tokens" if context > completion else "fewer tokens of completion"
        raise ModelError(f"{what}the model's {context}", "teacher.hint", hint)


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
        raise RecipeError(_SAME, "teacher", _HINT)


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
