"""Completions from ``transformers`` in this process, of the policy that is in memory.

prompts in tokens -> Sampled

Of a model in shards all processes sample at once, batch by batch; transformers then goes on until the last one is done.

Each completion is drawn with its own seed: which others share its batch, or how many, changes nothing but the rounding
of logits. The process's random state stays as it was.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from perl.errors import ModelError
from perl.policy.model import base_of, evaluating
from perl.recipe.engines import TRANSFORMERS, Capabilities
from perl.rollouts.branching import Numbers, Warp, why_not_branching, write
from perl.rollouts.engine import EngineSampling, FinishedRollouts, OneCopy, OnGroup, Request, Sampled, Update
from perl.run.shards import is_sharded
from perl.run.threads import threads_for

POLICY = "policy"
"""Version name of every completion: there is one copy, the policy itself."""

# Set even where it changes nothing: transformers fills what is left open from the model's generation_config.json, and
# a repetition penalty or a cut-off there would sample from another policy than the one that is trained or scored.
_NEUTRAL_GREEDY = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
_NEUTRAL = {**_NEUTRAL_GREEDY, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
# What it takes for unset where one token is left; it would warn of values of the model's generation config.
_UNSET = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "num_return_sequences": 1}

# What an engine's sampling has of them too.
_DRAWN_BY = ("repetition_penalty", "min_p")
# What a generation config may have without another loop being needed: how tokens are drawn, and what says nothing of it.
_KNOWN = frozenset(
    [*_NEUTRAL, *_UNSET, "do_sample", "max_length", "max_new_tokens", "bos_token_id", "eos_token_id", "pad_token_id"]
    + ["cache_implementation", "use_cache", "disable_compile", "transformers_version", "_from_model_config"]
    + ["output_attentions", "output_hidden_states", "trust_remote_code"]
)


@dataclass(frozen=True)
class _Row:
    """One completion that is wanted: the request's position, and which of its completions."""

    position: int
    index: int
    prompt_ids: tuple[int, ...]
    seed: int


class TransformersEngine(OneCopy):
    """Samples from the model in memory, which is the policy itself, with whatever adapter is active."""

    capabilities: ClassVar[Capabilities] = TRANSFORMERS

    def __init__(
        self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
    ) -> None:
        """Takes the model, and samples from it as it is at each request.

        Args:
            model: The policy.
            tokenizer: The base's; only its padding token is used.
            batch_size: Completions written at a time; fewer, from then on, where the memory does not suffice.
        """
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size

    def load(self, update: Update) -> None:
        """Refuses: it needs no update.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"no update {update.name}: samples come from the model in memory, which is the policy itself")

    def start(
        self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None
    ) -> FinishedRollouts:
        """Samples, and returns when all is done; the model is in evaluation mode meanwhile.

        Args:
            requests: Prompts and how many completions of each; those of like length share a batch.
            sampling: How tokens are drawn. Top-k, nucleus and min-p apply in this order, as in transformers; vLLM has
                min-p first, which is the same unless a nucleus is set too.
            on_group: Called between two batches as soon as a request's completions are there. If it raises, the others
                are given up.

        Raises:
            ModelError: The memory does not suffice for one completion, or for a batch of a model in shards.
        """
        if any(request.longest is not None for request in requests):
            raise ValueError("conversations are sampled by TRL itself where transformers samples")
        left = _by_length(_rows(requests))
        found: list[dict[int, Sampled]] = [{} for _ in requests]
        with evaluating(self._model), torch.no_grad(), threads_for(self._model):
            while left:
                batch = left[: self._batch_size]
                drawn = self._try(batch, sampling)
                if drawn is None:
                    self._batch_size = len(batch) // 2
                    torch.cuda.empty_cache()
                    continue
                left = left[len(batch) :]
                for row, sampled in zip(batch, drawn, strict=True):
                    group = found[row.position]
                    group[row.index] = sampled
                    if on_group is not None and len(group) == requests[row.position].count:
                        on_group(row.position, _in_order(group))
        return FinishedRollouts([_in_order(group) for group in found])

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """What the policy writes, as ``transformers``."""
        return {"transformers": self.start([request], sampling).result()[0]}

    @cached_property
    def why_by_generate(self) -> str | None:
        """Why transformers' own loop writes, which runs a group's prompt and what has ended row by row; None: ours."""
        return why_not_branching(self._model) or more_than_sampling(base_of(self._model).generation_config)

    @property
    def asleep_bytes(self) -> int:
        """0: no device memory is kept for it."""
        return 0

    def sleep(self) -> None:
        """Does nothing: no memory is held between two calls."""

    def close(self) -> None:
        """Nothing is held; the model stays its owner's."""

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def _padding(self) -> int:
        return int(self._tokenizer.pad_token_id or 0)

    def _try(self, rows: Sequence[_Row], sampling: EngineSampling) -> list[Sampled] | None:
        """A completion for each row; None: the memory does not suffice for so many."""
        try:
            return self._draw(rows, sampling)
        except torch.OutOfMemoryError as error:
            if is_sharded(self._model):
                what = f"not enough memory for a batch of {len(rows)}, and other processes wait for this one's tensors"
                raise ModelError(what, hint="a smaller eval.batch_size, or fewer tokens a completion") from error
            if len(rows) > 1:
                return None  # what the batch held is given back with this frame
            longest = len(rows[0].prompt_ids) + sampling.max_completion_length
            message = f"not enough memory for one completion: {longest} tokens with its prompt"
            raise ModelError(message, hint="allow fewer tokens a completion, or a smaller model") from error

    def _draw(self, rows: Sequence[_Row], sampling: EngineSampling) -> list[Sampled]:
        uniforms = _uniforms(rows, sampling.max_completion_length, self._device) if sampling.temperature else None
        if self.why_by_generate is not None:
            return self._generate(rows, sampling, uniforms)
        written = write(
            self._model,
            [row.prompt_ids for row in rows],
            padding=self._padding,
            ends=sampling.end_token_ids,
            longest=sampling.max_completion_length,
            draw=_Seeded(uniforms),
            warp=_warp(sampling),
            needs_tokens=sampling.repetition_penalty != 1.0,
        )
        pairs = zip(written.token_ids, written.log_probs or (), strict=True)
        return [Sampled(tuple(ids), tuple(log_probs), POLICY) for ids, log_probs in pairs]

    def _generate(self, rows: Sequence[_Row], sampling: EngineSampling, uniforms: torch.Tensor | None) -> list[Sampled]:
        """By transformers' own loop, for models whose cache cannot be selected by rows."""
        prompts = {"input_ids": [list(row.prompt_ids) for row in rows]}
        batch = self._tokenizer.pad(prompts, padding_side="left", return_tensors="pt").to(self._device)
        mask, width = batch["attention_mask"], batch["input_ids"].size(1)
        last = _Draw(width, uniforms)
        ids: torch.Tensor = self._model.generate(
            input_ids=batch["input_ids"],
            attention_mask=mask,
            generation_config=_generation_config(sampling, self._tokenizer),
            logits_processor=LogitsProcessorList([*_warpers(sampling, width - mask.sum(dim=1)), last]),
        )
        log_probs = torch.stack(last.log_probs, dim=1).tolist()
        pairs = zip(ids[:, width:].tolist(), log_probs, strict=True)
        return [_sampled(written, scores, sampling.end_token_ids) for written, scores in pairs]


def more_than_sampling(config: GenerationConfig) -> str | None:
    """Which fields of a generation config ask for more than what a token is drawn by; None: there is none."""
    asked = {name for name, value in config.to_diff_dict().items() if name not in _KNOWN and value is not None}
    return f"its generation config has {', '.join(sorted(asked))}" if asked else None


def sampling_of(config: GenerationConfig) -> EngineSampling | None:
    """How a trainer's generation config draws tokens; None: it asks for something else.

    Args:
        config: Complete, as :func:`fill_with_neutral` leaves it.
    """
    others = {**_NEUTRAL, "num_beams": 1, "num_return_sequences": 1}
    neutral = all(getattr(config, name) in (None, value) for name, value in others.items() if name not in _DRAWN_BY)
    if more_than_sampling(config) or not (neutral and config.do_sample and config.temperature):
        return None
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return EngineSampling(
        temperature=config.temperature,
        max_completion_length=config.max_new_tokens,
        end_token_ids=tuple(end for end in ends if end is not None),
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty,
    )


def fill_with_neutral(config: GenerationConfig) -> None:
    """Sets every sampling field that is left open to the value that changes nothing."""
    for name, value in _NEUTRAL.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


class _Seeded:
    """Draws each completion's tokens by its own numbers."""

    def __init__(self, uniforms_NT: torch.Tensor | None) -> None:
        """Draws by (N, T) numbers in [0, 1); None: the likeliest tokens."""
        self._uniforms_NT = uniforms_NT

    def __call__(
        self, step: int, scores_BV: torch.Tensor, slots: Numbers, rows: Numbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens, and their log-probs."""
        log_probs_BV = scores_BV.log_softmax(dim=-1)
        slots_n = torch.from_numpy(slots).to(scores_BV.device)
        if self._uniforms_NT is None:
            tokens_n = scores_BV.argmax(dim=-1)[slots_n]
        else:  # as many columns as completions go on from one row: the sums over the vocabulary are made once for them
            order = numpy.argsort(slots, kind="stable")
            ordered = slots[order]
            columns = numpy.empty_like(slots)
            columns[order] = numpy.arange(len(slots)) - numpy.searchsorted(ordered, ordered)
            columns_n = torch.from_numpy(columns).to(scores_BV.device)
            uniforms_BM = self._uniforms_NT.new_zeros(len(scores_BV), int(columns.max()) + 1)
            uniforms_BM[slots_n, columns_n] = self._uniforms_NT[torch.from_numpy(rows).to(scores_BV.device), step]
            tokens_n = _inverse_cdf(log_probs_BV, uniforms_BM)[slots_n, columns_n]
        return tokens_n, log_probs_BV[slots_n, tokens_n]


class AsMultinomial:
    """Draws what ``generate`` draws with the process's random numbers, which it moves as far."""

    def __init__(self, count: int) -> None:
        """Draws for so many completions; the numbers of those that have ended are drawn all the same."""
        self._count = count

    def __call__(self, step: int, scores_BV: torch.Tensor, slots: Numbers, rows: Numbers) -> tuple[torch.Tensor, None]:
        """The next tokens, without log-probs."""
        probs_BV = scores_BV.softmax(dim=-1)
        # torch.multinomial: the token whose chance divided by a number of the exponential distribution is largest.
        waiting_NV = probs_BV.new_empty(self._count, probs_BV.size(-1)).exponential_(1)
        slots_n, rows_n = (torch.from_numpy(indices).to(scores_BV.device) for indices in (slots, rows))
        return (probs_BV[slots_n] / waiting_NV[rows_n]).argmax(dim=-1), None


def write_as_generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], padding: int, sampling: EngineSampling
) -> list[list[int]]:
    """The completions that ``model.generate`` samples of a batch, with the same numbers of the process.

    Args:
        model: In evaluation mode; :func:`perl.rollouts.branching.why_not_branching` says nothing against it.
        prompts: Of each completion, in tokens.
        padding: A token to fill up shorter prompts with.
        sampling: At a temperature.
    """
    written = write(
        model,
        prompts,
        padding=padding,
        ends=sampling.end_token_ids,
        longest=sampling.max_completion_length,
        draw=AsMultinomial(len(prompts)),
        warp=_warp(sampling),
        needs_tokens=sampling.repetition_penalty != 1.0,
    )
    return written.token_ids


class _Draw(LogitsProcessor):
    """Leaves one token a row, drawn from the distribution that the processors before it made.

    Attributes:
        log_probs: Of the tokens drawn, (N,) for each position.
    """

    def __init__(self, width: int, uniforms: torch.Tensor | None) -> None:
        """Draws what follows ``width`` tokens by (N, T) numbers in [0, 1); None: the likeliest tokens."""
        self._width, self._uniforms = width, uniforms
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """(N, V) 0 for the token that is drawn, minus infinity for the others."""
        log_probs = scores.log_softmax(dim=-1)
        if self._uniforms is None:
            tokens = scores.argmax(dim=-1, keepdim=True)
        else:
            tokens = _inverse_cdf(log_probs, self._uniforms[:, input_ids.size(1) - self._width, None])
        self.log_probs.append(log_probs.gather(1, tokens).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def _inverse_cdf(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(N, M) the first token at which the chance of all up to it is more than a number in [0, 1), for M numbers each."""
    cumulative = log_probs.to(uniforms.dtype).exp_().cumsum(dim=-1)
    whole = cumulative[:, -1:]
    # The product may be rounded up to the whole, beyond which there is no token.
    below = torch.minimum(uniforms * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(cumulative, below, right=True)


def _uniforms(rows: Sequence[_Row], length: int, device: torch.device) -> torch.Tensor:
    """(N, T) numbers in [0, 1); those of a row are its seed's alone."""
    numbers = numpy.stack([numpy.random.default_rng(row.seed).random(length) for row in rows])
    # In float64 the sums over a vocabulary are exact enough that their order decides nothing.
    return torch.from_numpy(numbers).to(device, torch.float32 if device.type == "mps" else torch.float64)


def _rows(requests: Sequence[Request]) -> list[_Row]:
    rows = []
    for position, request in enumerate(requests):
        first = secrets.randbits(63) if request.seed is None else request.seed
        rows += [_Row(position, i, request.prompt_ids, first + i) for i in range(request.count)]
    return rows


def _by_length(rows: Sequence[_Row]) -> list[_Row]:
    """In the order in which they are written: by the length of the prompt, all of one prompt together."""
    first: dict[tuple[int, ...], int] = {}
    for row in rows:
        first.setdefault(row.prompt_ids, len(first))
    return sorted(rows, key=lambda row: (len(row.prompt_ids), first[row.prompt_ids]))


def _in_order(group: dict[int, Sampled]) -> list[Sampled]:
    return [group[i] for i in range(len(group))]


def _warpers(sampling: EngineSampling, paddings: torch.Tensor) -> list[LogitsProcessor]:
    """What is done to the logits, in the order of transformers' own ``generate``."""
    found: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty), paddings))
    if not sampling.temperature:
        return found
    if sampling.temperature != 1.0:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def _warp(sampling: EngineSampling) -> Warp:
    """What is done to the logits of rows that come and go."""
    of_any_row = LogitsProcessorList(_warpers(replace(sampling, repetition_penalty=1.0), torch.empty(0)))
    penalty = float(sampling.repetition_penalty)

    def warp(tokens_BL: torch.Tensor, paddings_B: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        if penalty != 1.0:
            scores_BV = RepetitionPenaltyLogitsProcessor(penalty, paddings_B)(tokens_BL, scores_BV)
        warped: torch.Tensor = of_any_row(tokens_BL, scores_BV)
        return warped

    return warp


def _generation_config(sampling: EngineSampling, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(sampling.end_token_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,  # the last processor leaves one token
        **_NEUTRAL_GREEDY,
        **_UNSET,
    )


def _sampled(ids: list[int], log_probs: list[float], ends: tuple[int, ...]) -> Sampled:
    """The row up to and with its first end token."""
    length = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return Sampled(tuple(ids[:length]), tuple(log_probs[:length]), POLICY)
