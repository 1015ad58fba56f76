"""Layers that carry a state from token to token, over packed rows: each segment from the state of what it follows.

model -> why its layers cannot keep segments apart, or None and they do

Linear attention (gated delta rule, Kimi's), state spaces (Mamba-2) and short convolutions of transformers call
functions of their module: a causal convolution and a scan. The projections around them act on each token. So only these
functions are told of the segments: given a layout, a convolution finds a segment's own past in front of it, and a scan
begins where the state of the segments before it ended: at zero, or at the end of a shared prompt. Without a layout they
are transformers' own. Whatever kernels transformers finds for them run here too. Shapes: L tokens of the packed row, E
of the row with a past in front of each segment, C channels, k tokens of a kernel, n segments of T tokens at most.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from perl.packing.rows import Layout

Function = Callable[..., Any]


@dataclass(frozen=True)
class Scan:
    """How a function that carries a state is called.

    Attributes:
        tokens: Its arguments with one entry a token, (1, L, ...) each.
        begin: Its argument for the states that rows begin with, (n, ...).
        wants: Its argument that asks for the states they end with.
        alone: Whether it returns the result alone where they are not asked for, not a pair.
    """

    tokens: tuple[str, ...]
    begin: str
    wants: str
    alone: bool


_DELTA = Scan(("query", "key", "value", "g", "beta"), "initial_state", "output_final_state", alone=False)
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Scan(("hidden_states", "dt", "B", "C"), "initial_states", "return_final_states", alone=True),
}
_CONVOLUTION = "causal_conv1d_fn"
# Convolution, scan and projection in one; it takes no states, and transformers goes on without it where it gives None.
_FUSED = "mamba2_split_conv1d_scan_combined"
# Mamba-1's scan, which has no argument for the state to begin with.
_STATELESS = "mamba_selective_scan"
# Tokens that scans take at once by themselves, where they are not told otherwise.
_CHUNK = 64


def use_packed_states(model: nn.Module) -> str | None:
    """Lets the layers of a model that carry a state run packed rows.

    Args:
        model: A model of transformers, without wrappers.

    Returns:
        Why they cannot; None if they can. What else a layer may do with its past shows when rows are compared.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    convolving = [file for file in files if hasattr(file, _CONVOLUTION)]
    if not convolving:
        return "its layers carry a state in a way that is not known here"
    if any(hasattr(file, _STATELESS) for file in convolving):
        return "its Mamba-1 layers cannot begin with a state"
    for file in convolving:
        for name in (_CONVOLUTION, _FUSED, *_SCANS):
            function = getattr(file, name, None)
            if function is not None and not hasattr(function, "knows_segments"):
                setattr(file, name, _knowing(function, name))
    return None


def _knowing(function: Function, name: str) -> Function:
    """The function that is told of the segments where there is a layout."""
    signature = inspect.signature(function)

    def by_segment(layout: Layout, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        if name == _FUSED:
            return None
        if name == _CONVOLUTION:
            return _convolve(function, layout, *args, **options)
        # By place or by name as the layer has it: kernels have other names for what comes by place.
        given = {name: value for name, value in zip(signature.parameters, args, strict=False)} | options
        return _scan(function, list(signature.parameters)[: len(args)], _SCANS[name], layout, given)

    @torch.compiler.disable(reason="the number and lengths of the segments differ from row to row")
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        layout = options.pop("packed_layout", None)
        return function(*args, **options) if layout is None else by_segment(layout, *args, **options)

    called.knows_segments = True
    return called


def _convolve(
    function: Function,
    layout: Layout,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> torch.Tensor:
    """(1, C, L) -> (1, C, L): a row with k - 1 tokens of its own past, or zeros, in front of each segment."""
    layout = layout.on(hidden_states.device)
    takes_E, own_L = layout.with_past(weight.size(-1) - 1)
    longer_1CE = functional.pad(hidden_states, (0, 1)).index_select(2, takes_E)
    convolved: torch.Tensor = function(longer_1CE, weight, *args, **options)
    return convolved.index_select(2, own_L)


def _scan(function: Function, places: list[str], how: Scan, layout: Layout, given: dict[str, Any]) -> Any:  # noqa: ANN401
    """A scan of the packed row, waves of segments at once; each wave needs the states of those before it.

    A wave's segments that others follow are of one length. Others end with tokens of zeros, whose states nobody reads.
    """
    tokens = {name: given.pop(name) for name in how.tokens}
    layout = layout.on(tokens[how.tokens[0]].device)
    given |= {how.wants: layout.shares}
    padded = {name: functional.pad(value.squeeze(0).flatten(1), (0, 0, 0, 1)) for name, value in tokens.items()}
    states: dict[int, torch.Tensor] = {}  # of segments that others follow, by where they start
    results = []
    for wave in layout.waves(given.get("chunk_size", _CHUNK)):
        size = (len(wave.starts), wave.tokens.size(0) // len(wave.starts))
        taken = {
            name: value.index_select(0, wave.tokens).unflatten(0, size).unflatten(-1, tokens[name].shape[2:])
            for name, value in padded.items()
        }
        given[how.begin] = torch.stack([states[start] for start in wave.follows]) if wave.follows else None
        asked = given | taken
        by_place = [asked.pop(name) for name in places]
        found = function(*by_place, **asked)
        result, ends = found if layout.shares or not how.alone else (found, None)
        results.append(result.flatten(0, 1))
        if wave.followed and ends is not None:
            states |= dict(zip(wave.starts, ends.unbind(0), strict=True))
    result_1L = torch.cat(results).index_select(0, layout.scanned(given.get("chunk_size", _CHUNK))).unsqueeze(0)
    return result_1L if how.alone else (result_1L, None)
