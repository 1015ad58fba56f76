"""Completions by forward passes over a cache in which all that begins alike is one row.

prompts, how a token is drawn -> tokens of each completion, log-probs

The completions of a prompt share a row of the cache until they differ: the prompt is read once, and so is every
beginning that several of them have. What all prompts begin with, as few-shot examples, is read once for all of them.
Rows that nothing goes on from leave the cache. Shapes: N completions, n of them that still go on, B rows of the cache,
V vocabulary, T tokens of a completion at most.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from perl.packing.forward import adapter_by_row
from perl.packing.rope import rope_width
from perl.packing.rows import LEAST_COMMON, Numbers
from perl.policy.model import base_of
from perl.policy.multimodal import dropped_towers, towers
from perl.run.products import packed_weights, quickened
from perl.run.shards import any_goes_on, is_sharded

# Layers whose states are selected by rows, in any order and several times.
_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
# Rows of the cache that nothing goes on from stay for a while: to take them out copies all others.
_IDLE_SHARE = 8
# Tokens after which matrices are packed, if as many may still come: to pack them takes the time that 14 to 20 save.
_PACKED_AFTER = 16
# Tokens for which the cache has room when it grows, at least, and as a share of those that it holds.
_ROOM, _ROOM_SHARE = 32, 4


class Draw(Protocol):
    """Draws tokens."""

    def __call__(
        self, step: int, scores_BV: torch.Tensor, slots: Numbers, rows: Numbers, /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next tokens of completions that go on.

        Args:
            step: How many tokens each of them has.
            scores_BV: Float32, logits after what is done to them.
            slots: (n,) the row of ``scores_BV`` of each.
            rows: (n,) which completions they are, of all N.

        Returns:
            (n,) tokens, and (n,) their log-probs or None.
        """


Warp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What is done to logits: (B, L) tokens so far, padded on the left; (B,) how much of it is padding; (B, V) scores."""


@dataclass(frozen=True)
class WrittenCompletions:
    """What was drawn.

    Attributes:
        token_ids: Of each completion, with the token that ended it.
        log_probs: Of each token; None: they were not asked for.
        ran: Rows of the cache in each forward pass.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]] | None
    ran: list[int]


def why_not_branching(model: nn.Module) -> str | None:
    """Why a model's cache cannot be selected by rows here, so that ``generate`` has to write; None: it can.

    Args:
        model: Without the wrappers of distributed training.
    """
    if why := adapter_by_row(model):
        return why
    base = base_of(model)
    prepares = type(base).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if prepares and not (towers(base) or dropped_towers(base)):  # what multimodal ones prepare is images
        return "it prepares the inputs of its forward passes itself"
    usual = base.generation_config.cache_implementation in (None, "dynamic") and base._supports_default_dynamic_cache()
    if base.config.is_encoder_decoder or not usual:
        return "its cache is not the usual one"
    parameters = inspect.signature(type(base).forward).parameters.keys()
    if "position_ids" not in parameters or not parameters & {"cache", "past_key_values"}:
        return "its forward pass takes other arguments"
    layers = {type(layer) for layer in _cache(base).layers}
    others = {layer.__name__ for layer in layers - _LAYERS - {_RoomyLayer}}
    if others or not layers:
        return f"its cache has layers of {', '.join(sorted(others)) or 'no known kind'}"
    return None


def write(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    padding: int,
    ends: Sequence[int],
    longest: int,
    draw: Draw,
    warp: Warp,
    needs_tokens: bool = False,
) -> WrittenCompletions:
    """One completion for each prompt; the model must be in evaluation mode, and :func:`why_not_branching` say nothing.

    Args:
        model: Without the wrappers of distributed training.
        prompts: N of them, in tokens; those that are equal are read once.
        padding: A token to fill up shorter prompts with.
        ends: Tokens that end a completion.
        longest: Tokens of a completion, at most; 1 or more.
        draw: How a token is drawn.
        warp: What is done to logits before that.
        needs_tokens: Whether ``warp`` looks at the tokens; else it is given an empty tensor.
    """
    places: dict[tuple[int, ...], int] = {}
    slots = numpy.array([places.setdefault(tuple(ids), len(places)) for ids in prompts], dtype=numpy.int64)
    rows = numpy.arange(len(slots))
    tokens_NT, lengths = numpy.zeros((len(rows), longest), dtype=numpy.int64), numpy.zeros(len(rows), numpy.int64)
    found: list[tuple[Numbers, torch.Tensor]] = []
    base = base_of(model)
    with contextlib.ExitStack() as held:
        held.enter_context(quickened(base))
        state = _State(base, list(places), padding, longest, keeps_tokens=needs_tokens)
        logits_BV = state.read()
        for step in range(longest):
            if step == _PACKED_AFTER and longest > 2 * _PACKED_AFTER:
                held.enter_context(packed_weights(base, len(slots)))
            scores_BV = warp(state.tokens, state.paddings, logits_BV)
            drawn, log_probs = draw(step, scores_BV, slots, rows)
            if log_probs is not None:
                found.append((rows, log_probs))
            tokens = drawn.cpu().numpy()
            tokens_NT[rows, step] = tokens
            lengths[rows] = step + 1
            going = ~numpy.isin(tokens, ends)
            rows, slots, tokens = rows[going], slots[going], tokens[going]
            if not len(rows) or step + 1 == longest:
                break
            slots = state.branch(slots, tokens)
            logits_BV = state.go_on()
        state.wait()
    token_ids = [tokens_NT[row, :length].tolist() for row, length in enumerate(lengths)]
    if not found:
        return WrittenCompletions(token_ids, None, state.ran)
    values = torch.cat([log_probs for _, log_probs in found]).tolist()  # from the device at once
    of_each: list[list[float]] = [[] for _ in token_ids]
    for row, value in zip(numpy.concatenate([rows for rows, _ in found]).tolist(), values, strict=True):
        of_each[row].append(value)
    return WrittenCompletions(token_ids, of_each, state.ran)


class _State:
    """The cache, and what each of its rows has been given.

    Attributes:
        tokens: (B, L) all tokens, padded on the left, if they are kept; else empty.
        paddings: (B,) how many of them are padding.
        ran: Rows of each forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        padding: int,
        longest: int,
        *,
        keeps_tokens: bool,
    ) -> None:
        width = max(map(len, prompts))
        self._model, self._cache, self._keeps = model, _cache(model, width + longest - 1), keeps_tokens
        parameters = inspect.signature(type(model).forward).parameters
        device = next(model.parameters()).device
        given = {"logits_to_keep": 1, "cache": self._cache, "past_key_values": self._cache}  # by either name
        self._options: dict[str, Any] = {name: value for name, value in given.items() if name in parameters}
        fill = [width - len(ids) for ids in prompts]
        common = 0 if keeps_tokens else self._common_beginning(prompts)
        self.tokens = torch.tensor(
            [[*ids[:common], *[padding] * n, *ids[common:]] for n, ids in zip(fill, prompts, strict=True)]
        ).to(device)
        self.paddings = torch.tensor(fill).to(device)
        # Of all tokens that may come; a pass is given the part up to its own.
        columns = torch.arange(width + longest, device=device)
        self._mask_BL = ((columns < common) | (columns >= common + self.paddings[:, None])).long()
        self._common, self._padded, self._width, self._next = common, any(fill), width, self.tokens
        self._sharded = is_sharded(model)  # then each pass is one of all processes
        self.ran: list[int] = []

    def _common_beginning(self, prompts: Sequence[Sequence[int]]) -> int:
        """Tokens that all prompts begin with, and that are worth a pass of their own; each has one token more."""
        if len(prompts) == 1 or not all(isinstance(layer, _RoomyLayer) for layer in self._cache.layers):
            return 0
        if rope_width(self._model)(1):  # rotary factors depend on the longest position of a pass
            return 0
        columns = zip(*(ids[:-1] for ids in prompts), strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        return count if count >= LEAST_COMMON else 0

    def read(self) -> torch.Tensor:
        """(B, V) logits after the prompts."""
        # as generate numbers them: what stands under the padding is never looked at
        mask_BL, common = self._mask_BL[:, : self._width], self._common
        positions = (mask_BL.cumsum(-1) - 1).masked_fill_(mask_BL == 0, 1)
        if common:
            self._pass(self.tokens[:1, :common], positions[:1, :common], common)
            for layer in self._cache.layers:
                layer.reorder_cache(torch.zeros_like(self.paddings))
        logits_BV = self._pass(self.tokens[:, common:], positions[:, common:], self._width)
        if not self._keeps:
            self.tokens = self.tokens[:, :0]
        return logits_BV

    def branch(self, slots: Numbers, tokens: Numbers) -> Numbers:
        """Gives completions their next tokens, so that those with another one get a row of their own.

        Args:
            slots: (n,) rows that they go on from.
            tokens: (n,) what comes next in each.

        Returns:
            (n,) their rows now.
        """
        size = int(tokens.max()) + 1
        keys, places = numpy.unique(slots * size + tokens, return_inverse=True)
        parents, nexts = numpy.divmod(keys, size)
        count = len(self.paddings)
        if len(parents) == len(numpy.unique(parents)) > count - max(1, count // _IDLE_SHARE):
            given = numpy.full(count, nexts[0])
            given[parents] = nexts  # a row that nothing goes on from is given any token
            nexts, places = given, parents[places]
        else:
            indices = torch.from_numpy(parents).to(self.paddings.device)
            for layer in self._cache.layers:
                layer.reorder_cache(indices)
            self.paddings, self._mask_BL = self.paddings[indices], self._mask_BL[indices]
            if self._keeps:
                self.tokens = self.tokens[indices]
        self._next = torch.from_numpy(nexts).to(self.paddings.device)[:, None]
        if self._keeps:
            self.tokens = torch.cat([self.tokens, self._next], dim=1)
        return places

    def go_on(self) -> torch.Tensor:
        """(B, V) logits after the tokens that were given."""
        self._width += 1
        return self._pass(self._next, (self._width - 1 - self.paddings)[:, None], self._width)

    def wait(self) -> None:
        """Takes part in the passes that other processes have left, of a model in shards."""
        while self._sharded and any_goes_on(False, self.paddings.device):
            self._model(input_ids=self._next[:1, :1], use_cache=False)

    def _pass(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        if self._sharded:
            any_goes_on(True, tokens.device)
        self.ran.append(len(tokens))
        options = self._options
        if tokens.size(1) > 1 and tokens.is_cpu and "logits_to_keep" in options:
            # An index copies the last states. A slice of them is a view with gaps, which torch multiplies by a frozen
            # head in a product for each row, and copies the head as often: 57 MB a row of SmolLM2-135M in bfloat16.
            options = options | {"logits_to_keep": torch.tensor([-1])}
        # Without padding a single token sees all that there is; the mask that would say so costs as much as a layer.
        masked = self._padded or tokens.size(1) > 1
        outputs = self._model(
            input_ids=tokens,
            attention_mask=self._mask_BL[: len(tokens), :width] if masked else None,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **options,
        )
        logits_BLV = outputs.logits  # a copy of the last ones where there are more, which are not kept then
        return logits_BLV[:, -1].to(tokens.device, torch.float32, copy=logits_BLV.size(1) > 1)


def _cache(model: PreTrainedModel, longest: int = 0) -> DynamicCache:
    """As ``generate`` makes it for so many tokens, but that one more copies none of those before."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [_RoomyLayer(longest) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _RoomyLayer(DynamicLayer):
    """A cache layer with room for tokens that come; transformers' own is copied for each of them."""

    is_initialized: bool

    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest = longest  # tokens that may come in all
        self._room: list[torch.Tensor] = []  # keys and values, (B, H, more than there are tokens, D)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values; returns all."""
        begin = self.get_seq_length() if self.is_initialized else 0
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._room = [states[:, :, :0] for states in (key_states, value_states)]
        end = begin + key_states.size(-2)
        if end > self._room[0].size(-2):
            room = max(end, min(end + max(_ROOM, end // _ROOM_SHARE), self._longest))
            larger = [old.new_empty(*old.shape[:2], room, old.size(-1)) for old in self._room]
            for new, old in zip(larger, self._room, strict=True):
                new[:, :, :begin] = old[:, :, :begin]
            self._room = larger
        for held, states in zip(self._room, (key_states, value_states), strict=True):
            held[:, :, begin:end] = states
        self.keys, self.values = (held[:, :, :end] for held in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in another order; some of them several times, others not at all."""
        if self.is_initialized:
            end = self.get_seq_length()
            self._room = [held.index_select(0, beam_idx.to(held.device)) for held in self._room]
            self.keys, self.values = (held[:, :, :end] for held in self._room)
