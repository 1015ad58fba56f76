"""Convolutions and scans of packed rows against those of each row by itself, its prompt included."""

import functools
import inspect
import sys

import pytest
import torch

from perl.packing.rows import Layout, Segment
from perl.packing.states import use_packed_states
from tests.packing.families import make

CPU = torch.device("cpu")
# What all prompts begin with (longer than a chunk), two prompts of one length, completions shorter and longer than a
# kernel, a chunk and two; a row alone, one of a single token.
BEGUN = ((0, 70),)
LAYOUT = Layout(
    (
        *(Segment(0, 70), Segment(70, 5, BEGUN), Segment(75, 5, BEGUN)),
        *(Segment(80, 1, (*BEGUN, (70, 5))), Segment(81, 2, (*BEGUN, (70, 5))), Segment(83, 66, (*BEGUN, (75, 5)))),
        *(Segment(149, 130, (*BEGUN, (75, 5))), Segment(279, 64), Segment(343, 1)),
    ),
    CPU,
)
LENGTH = 344
LAYERS = {  # of a family, where it is, which of its functions are told of segments
    "Qwen3_5Text": ("linear_attn", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]),
    "KimiLinear": ("self_attn", ["causal_conv1d_fn", "chunk_kimi_delta_attention"]),
    "GraniteMoeHybrid": ("mamba", ["causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"]),
    "Lfm2": ("conv", ["causal_conv1d_fn"]),
}


def by_itself(layer, hidden, segment):
    """A segment's outputs in a row with all that it follows, in a pass of its own."""
    seen = [hidden[:, start : start + length] for start, length in segment.prefixes]
    own = hidden[:, segment.start : segment.start + segment.length]
    return layer(torch.cat([*seen, own], dim=1))[:, segment.prefix_length :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_gives_each_segment_what_it_gives_it_behind_its_own_past(family, dtype):
    model = make(family).to(dtype).train()
    assert use_packed_states(model) is None
    layer = getattr(model.model.layers[0], LAYERS[family][0])
    hidden = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    parts = [by_itself(layer, hidden, segment) for segment in LAYOUT.segments]
    ways = {"alone": torch.cat(parts, dim=1), "packed": layer(hidden, packed_layout=LAYOUT)}
    factors = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    found = {}
    for way, outputs in ways.items():
        gradients = torch.autograd.grad((outputs * factors).sum(), [hidden, *layer.parameters()])
        found[way] = [outputs, *gradients]
    limit = 1e-5 if dtype == torch.float32 else 0.01  # bfloat16 has 8 bits
    for ours, expected in zip(found["packed"], found["alone"], strict=True):
        assert (ours - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("family", LAYERS)
def test_functions_are_told_once_and_stay_what_they_were_without_a_layout(family):
    model = make(family)
    layer = getattr(model.model.layers[0], LAYERS[family][0])
    hidden = torch.randn(3, 9, 32)
    before = layer(hidden)
    file = sys.modules[type(layer).__module__]
    assert use_packed_states(model) is None
    told = {name: getattr(file, name) for name in LAYERS[family][1]}
    assert use_packed_states(model) is None
    assert all(function.knows_segments and getattr(file, name) is function for name, function in told.items())
    assert torch.equal(layer(hidden), before)


def test_a_kernel_with_other_names_for_what_comes_by_place_is_called_as_the_layer_calls_it(monkeypatch):
    """As flash-linear-attention's."""
    layer, name = make("Qwen3_5Text").model.layers[0].linear_attn, "torch_chunk_gated_delta_rule"
    file = sys.modules[type(layer).__module__]
    plain = inspect.unwrap(getattr(file, name))

    @functools.wraps(plain)
    def kernel(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **_):
        how = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return plain(q, k, v, g=g, beta=beta, initial_state=initial_state, **how)

    monkeypatch.setattr(file, name, kernel)
    assert use_packed_states(layer) is None
    hidden = torch.randn(1, LENGTH, 32)
    expected = torch.cat([by_itself(layer, hidden, segment) for segment in LAYOUT.segments], dim=1)
    assert (layer(hidden, packed_layout=LAYOUT) - expected).norm() <= 1e-5 * expected.norm()


def test_waves_run_what_others_follow_first_and_as_many_together_as_have_as_many_chunks():
    waves = LAYOUT.waves(64)
    assert [wave.starts for wave in waves] == [(0,), (279, 343), (70, 75), (80, 81), (83,), (149,)]
    assert [wave.follows for wave in waves] == [(), (), (0, 0), (70, 70), (75,), (75,)]
    assert [wave.followed for wave in waves] == [True, False, True, False, False, False]
    assert waves[1].tokens.tolist() == [*range(279, 343), 343, *[LENGTH] * 63]
    rows = torch.cat([wave.tokens for wave in waves])
    assert torch.equal(rows[LAYOUT.scanned(64)], torch.arange(LENGTH))
    many = Layout(tuple(Segment(0, length) for length in range(64, 64 * 130, 64)), CPU)
    assert len(many.waves(64)) == 3 + 4 * 5 + 2  # four of each octave from 4 on


def test_a_convolution_sees_the_end_of_what_a_segment_follows_and_zeros_before_a_row():
    layout = Layout((Segment(0, 2), Segment(2, 1, ((0, 2),)), Segment(3, 2, ((0, 2), (2, 1))), Segment(5, 1)), CPU)
    takes, own = layout.with_past(3)
    nothing = 6
    assert takes.tolist() == [*[nothing] * 3, 0, 1, nothing, 0, 1, 2, 0, 1, 2, 3, 4, *[nothing] * 3, 5]
    assert takes[own].tolist() == list(range(6))
    assert layout.with_past(0)[0].tolist() == list(range(6))
