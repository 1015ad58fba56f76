"""How the next token is drawn from logits: by a completion's own numbers, or as ``generate`` draws it.

GenerationConfig -> EngineSampling, or why there is none; logits -> warped, as transformers' processors do -> tokens,
log-probs

Shapes: N completions, n of them that still go on, B rows of logits, V vocabulary, T tokens of a completion.
"""

from collections.abc import Sequence
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

from perl.rollouts.branching import Numbers, Warp, write
from perl.rollouts.engine import EngineSampling

# Set even where it changes nothing: transformers fills what is left open from the model's generation_config.json, and
# a repetition penalty or a cut-off there would sample from another policy than the one that is trained or scored.
_NEUTRAL_GREEDY = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
_NEUTRAL = {**_NEUTRAL_GREEDY, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
# What it takes for unset where one token is left; it would warn of values of the model's generation config.
_UNSET = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "num_return_sequences": 1}

# What an engine's sampling has of them too.
_DRAWN_BY = ("repetition_penalty", "min_p")
# What a generation config may have and any loop does: how tokens are drawn, and what says nothing of it.
_KNOWN = frozenset(
    [
        *(*_NEUTRAL, *_UNSET, "do_sample", "max_length", "max_new_tokens"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation", "use_cache", "disable_compile"),
        *("transformers_version", "_from_model_config", "output_attentions", "output_hidden_states"),
    ]
)


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


def of_last_processor(sampling: EngineSampling, padding: int | None) -> GenerationConfig:
    """Of a loop whose last processor leaves one token.

    Args:
        sampling: The length, and what ends a completion.
        padding: What fills up the others.
    """
    return GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(sampling.end_token_ids),
        pad_token_id=padding,
        do_sample=False,
        **_NEUTRAL_GREEDY,
        **_UNSET,
    )


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
