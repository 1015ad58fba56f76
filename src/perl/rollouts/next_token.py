"""How the next token is drawn from logits: by a completion's own numbers, or as ``generate`` draws it.

GenerationConfig -> EngineSampling, or why there is none; logits -> warped, as transformers' processors do -> tokens,
log-probs

Shapes: N completions, n of them that still go on, B rows of logits, V vocabulary, T tokens of a completion.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from perl.packing.rows import Numbers
from perl.policy.model import base_of
from perl.rollouts.branching import Warp, write
from perl.rollouts.engine import EngineSampling

# What a model's own generation config keeps while rollouts are sampled: what ends and fills a completion, and how keys
# and values are held. Whatever else it has, or a later transformers adds, would sample from another distribution than
# the one that is trained or scored.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation", "cache_config", "use_cache")
# What a trainer's has of how a token is drawn, and what says nothing of it.
_KNOWN = frozenset(
    [
        *(*_KEPT, "do_sample", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("disable_compile", "transformers_version", "_from_model_config"),
    ]
)


@contextlib.contextmanager
def as_the_policy(model: nn.Module) -> Iterator[None]:
    """While ``generate`` samples: nothing of the model's own generation config shapes what the policy writes.

    The head gets the last states of the prompts as a copy. As a slice, a view with gaps, torch multiplies them by a
    frozen head in a product for each row, and on a CPU copies the head as often.

    Args:
        model: With or without an adapter; transformers fills what is left open from its config, and PEFT hands that of
            the outer model on to the base.
    """
    base = base_of(model)
    own = base.generation_config
    plain = GenerationConfig(**{name: getattr(own, name, None) for name in _KEPT})
    head = base.get_output_embeddings() or nn.Identity()
    copied = head.register_forward_pre_hook(lambda _, given: tuple(tensor.contiguous() for tensor in given))
    try:
        model.generation_config = base.generation_config = plain
        yield
    finally:
        model.generation_config = base.generation_config = own
        copied.remove()


def sampling_of(config: GenerationConfig) -> EngineSampling | None:
    """How a trainer's generation config draws tokens; None: it asks for something else.

    Args:
        config: All of it, beside a model's own as :func:`as_the_policy` leaves it.
    """
    asked = {name for name, value in config.to_diff_dict().items() if value is not None}
    if asked - _KNOWN or not (config.do_sample and config.temperature):
        return None
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return EngineSampling(
        temperature=config.temperature,
        max_completion_length=config.max_new_tokens,
        end_token_ids=tuple(end for end in ends if end is not None),
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
    )


# Random numbers that are made at once, few enough to stay in a processor's cache.
_BLOCK = 1 << 17


class Seeded:
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
            tokens_n = inverse_cdf(log_probs_BV, uniforms_BM)[slots_n, columns_n]
        return tokens_n, log_probs_BV[slots_n, tokens_n]


class AsMultinomial:
    """Draws what ``generate`` draws with the process's random numbers, which it moves as far."""

    def __init__(self, count: int) -> None:
        """Draws for so many completions; the numbers of those that have ended are drawn all the same."""
        self._count = count

    def __call__(self, _: int, scores_BV: torch.Tensor, slots: Numbers, rows: Numbers) -> tuple[torch.Tensor, None]:
        """The next tokens, without log-probs."""
        # torch.multinomial: the token whose chance divided by a number of the exponential distribution is largest.
        probs_BV = scores_BV.softmax(dim=-1)
        slots_n, rows_n = (torch.from_numpy(indices).to(scores_BV.device) for indices in (slots, rows))
        if not probs_BV.is_cpu:
            waiting_NV = probs_BV.new_empty(self._count, probs_BV.size(-1)).exponential_(1)
            return (probs_BV[slots_n] / waiting_NV[rows_n]).argmax(dim=-1), None
        # On a CPU exponential_ takes the logarithms of such uniform numbers one by one, three times as slow.
        block = max(1, _BLOCK // probs_BV.size(-1))
        uniforms_bV = probs_BV.new_empty(block, probs_BV.size(-1), dtype=torch.float64)
        ends = numpy.searchsorted(rows, numpy.arange(0, self._count + block, block))
        drawn = []
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            start = number * block
            uniforms_bV[: self._count - start].uniform_()
            if begin < end:
                waiting = uniforms_bV[rows_n[begin:end] - start].neg_().log1p_().neg_().to(probs_BV.dtype)
                drawn.append((probs_BV[slots_n[begin:end]] / waiting).argmax(dim=-1))
        return torch.cat(drawn), None


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
        warp=warp_of(sampling),
        needs_tokens=sampling.repetition_penalty != 1.0,
    )
    return written.token_ids


class LastDraw(LogitsProcessor):
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
            tokens = inverse_cdf(log_probs, self._uniforms[:, input_ids.size(1) - self._width, None])
        self.log_probs.append(log_probs.gather(1, tokens).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def inverse_cdf(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(N, M) the first tokens at which the chance of all up to them is more than a number in [0, 1), M of them each."""
    cumulative = log_probs.to(uniforms.dtype).exp_().cumsum(dim=-1)
    whole = cumulative[:, -1:]
    # The product may be rounded up to the whole, beyond which there is no token.
    below = torch.minimum(uniforms * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(cumulative, below, right=True)


def uniforms_of(seeds: Sequence[int], length: int, device: torch.device) -> torch.Tensor:
    """(N, T) numbers in [0, 1); those of a completion are its seed's alone."""
    numbers = numpy.stack([numpy.random.default_rng(seed).random(length) for seed in seeds])
    # In float64 the sums over a vocabulary are exact enough that their order decides nothing.
    return torch.from_numpy(numbers).to(device, torch.float32 if device.type == "mps" else torch.float64)


def warpers(sampling: EngineSampling, paddings: torch.Tensor) -> list[LogitsProcessor]:
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


def warp_of(sampling: EngineSampling) -> Warp:
    """What is done to the logits of rows that come and go."""
    of_any_row = LogitsProcessorList(warpers(replace(sampling, repetition_penalty=1.0), torch.empty(0)))
    penalty = float(sampling.repetition_penalty)

    def warp(tokens_BL: torch.Tensor, paddings_B: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        if penalty != 1.0:
            scores_BV = RepetitionPenaltyLogitsProcessor(penalty, paddings_B)(tokens_BL, scores_BV)
        warped: torch.Tensor = of_any_row(tokens_BL, scores_BV)
        return warped

    return warp
