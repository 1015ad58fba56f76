"""What autograd keeps, counted by hand on a small module; how it grows; what is planned from it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from perl.attention import use_packed_attention
from perl.head import LogitSettings, add_scored_forward
from perl.memory import _SHARE, MOST_TOKENS, MemoryPlan, TokenBytes, free_bytes, kept_bytes, measure, plan_memory
from perl.packing import Row
from perl.rollouts.vllm_engine import InProcessEngine
from perl.scoring import score

GIGA = 2**30


@pytest.mark.parametrize("trained", [0, 10**6])
@pytest.mark.parametrize("free", [GIGA, 8 * GIGA])
def test_a_pass_is_as_long_as_what_it_keeps_fits(free, trained):
    per_token = TokenBytes(kept=10**6, recomputed=10**5)
    plan = plan_memory(free, trained, per_token, longest_row=100)
    assert not plan.recompute
    usable = _SHARE * (free - 12 * trained)  # in float32: a gradient and Adam's two averages
    assert plan.tokens * per_token.kept <= usable < (plan.tokens + 1) * per_token.kept


@pytest.mark.parametrize(("longest", "recompute"), [(500, False), (700, False), (701, True), (2000, True)])
def test_activations_are_computed_again_only_if_the_longest_row_does_not_fit_otherwise(longest, recompute):
    plan = plan_memory(1000 / _SHARE * 0.7, 0, TokenBytes(kept=1.0, recomputed=0.1), longest_row=longest)
    usable = _SHARE * 1000 / _SHARE * 0.7
    assert usable == pytest.approx(700)
    expected = 7000 if recompute else 700
    assert plan.recompute == recompute
    assert plan.tokens == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("free", [0, 10**4, 10**6, -(10**6)])
def test_the_longest_row_is_never_longer_than_a_pass(free):
    plan = plan_memory(free, 1000, TokenBytes(kept=1e3, recomputed=1e2), longest_row=10**5)
    assert plan == MemoryPlan(10**5, recompute=True)


def test_no_pass_is_longer_than_needed_for_full_speed_unless_a_row_is():
    per_token = TokenBytes(kept=1e3, recomputed=1e2)
    assert plan_memory(1e12, 0, per_token, longest_row=100) == MemoryPlan(MOST_TOKENS, recompute=False)
    longer = plan_memory(1e12, 0, per_token, longest_row=2 * MOST_TOKENS)
    assert longer == MemoryPlan(2 * MOST_TOKENS, recompute=False)
    tight = plan_memory(1e7, 0, TokenBytes(kept=1e4, recomputed=1.0), longest_row=1000)
    assert tight == MemoryPlan(MOST_TOKENS, recompute=True)


class Small(nn.Module):
    """Keeps x for the gradient of the first weight, the first output for both ReLU and the second weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(functional.relu(self.first(x)))


def test_bytes_are_counted_as_by_hand_without_parameters_and_each_tensor_once():
    model, x = Small(), torch.randn(10, 4)
    # x (10 x 4) for the first weight; ReLU's output (10 x 8) for itself and for the second weight: one tensor
    assert kept_bytes(lambda: model(x), model) == 4 * (10 * 4 + 10 * 8)
    model.first.requires_grad_(False)  # nothing before the second layer has a gradient
    assert kept_bytes(lambda: model(x), model) == 4 * (10 * 8)
    model.requires_grad_(False)
    assert kept_bytes(lambda: model(x), model) == 0
    assert kept_bytes(lambda: model(x.clone().requires_grad_()), model) == 4 * (
        10 * 8
    )  # ReLU's; the weights are not counted
    buffered = nn.BatchNorm1d(4).eval()
    buffered(x)
    own = {4 * 10 * 4, 4 * 10 * 4 + 2 * 4 * 4}  # x, and in some versions an inverse deviation; not the running averages
    assert kept_bytes(lambda: buffered(x), buffered) in own


def test_bytes_are_counted_also_where_gradients_are_off():
    model, x = Small(), torch.randn(10, 4)
    with torch.no_grad():
        assert kept_bytes(lambda: model(x), model) == 4 * (10 * 4 + 10 * 8)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_its_input_only(reentrant):
    model, x = Small(), torch.randn(10, 4, requires_grad=True)
    assert kept_bytes(lambda: checkpoint(model, x, use_reentrant=reentrant), model) == 4 * 10 * 4


def qwen(layers=2, dropout=0.0, width=32) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(dropout))
    add_scored_forward(model, LogitSettings())
    assert use_packed_attention(model) is None
    model.lm_head.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    return model.train()


def pass_bytes(model, tokens: int) -> int:
    """What is kept of one row of so many tokens."""
    ids = torch.randint(64, (tokens + 1,))
    row = Row(ids[:1], ids[1:], torch.ones(tokens, dtype=torch.bool))
    return kept_bytes(lambda: score(model, [row], [[0]], packed=True, columns=tokens), model)


def test_bytes_per_token_grow_with_layers_and_with_dropout():
    one, two, three = (measure(qwen(layers), packed=True).kept for layers in (1, 2, 3))
    assert 0 < one < two < three
    assert three - two == pytest.approx(two - one, rel=0.01)
    # Of dropout its input's mask, a byte or a float for each number, and the scaled output.
    assert measure(qwen(dropout=0.1), packed=True).kept >= two + 2 * 32


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_per_token_tell_what_a_longer_pass_keeps(packed):
    model = qwen()
    per_token = measure(model, packed=packed)
    assert pass_bytes(model, 600) == pytest.approx(600 * per_token.kept, rel=0.1)


def test_bytes_per_token_tell_what_more_tokens_keep_under_autocast():
    """Where weights are cast, the copies are there once, however many tokens there are."""
    model = qwen(width=256)
    with torch.autocast("cpu", torch.bfloat16):
        kept = measure(model, packed=True).kept
        assert pass_bytes(model, 1000) - pass_bytes(model, 500) == pytest.approx(500 * kept, rel=0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_keeps_less_and_no_more_than_is_said(reentrant):
    model = qwen(layers=4)
    per_token = measure(model, packed=True)
    assert per_token.recomputed < per_token.kept
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    checkpointed = pass_bytes(model, 256) / 256
    assert checkpointed < per_token.kept / 2
    assert checkpointed <= per_token.recomputed


def test_measuring_leaves_no_gradient_and_the_mode_as_it_was():
    model = qwen().eval()
    with torch.no_grad():
        assert measure(model, packed=True).kept > 0
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


class Device:
    """A GPU that torch's allocator and vLLM share, in GiB; what does not fit raises, as there."""

    def __init__(self, monkeypatch, total=80.0, base=3.0, engine=6.0, cache=26.0):
        self.total, self.allocated, self.reserved = total, base, base
        self.engine, self.cache, self.mapped = engine, cache, cache
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(self.free * GIGA), int(total * GIGA)))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(self.reserved * GIGA))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: int(self.allocated * GIGA))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    @property
    def free(self) -> float:
        return self.total - self.reserved - self.engine - self.mapped

    def empty_cache(self):
        self.reserved = self.allocated

    def run_pass(self, size: float):
        """A pass whose activations torch's allocator keeps when it is over."""
        more = self.allocated + size - self.reserved
        if more > self.free:
            raise torch.OutOfMemoryError(f"{more} GiB more")
        self.reserved += max(more, 0.0)

    def sleep(self, level):
        assert level == 0

    def release_kv_cache_memory(self):
        self.mapped = 0.0

    def wake_up(self, tags):
        assert tags == ["kv_cache"]
        if self.cache > self.free:
            raise torch.OutOfMemoryError(f"{self.cache} GiB, {self.free} are left")
        self.mapped = self.cache


def engine_on(device: Device) -> InProcessEngine:
    """The part of the engine that sleeps and wakes, without vLLM."""
    engine = InProcessEngine.__new__(InProcessEngine)
    engine._llm, engine._sleeps, engine._resting, engine._released = device, True, False, 0
    engine._settings = []
    engine._settle = lambda: None
    engine._as_vllm = contextlib.nullcontext
    return engine


def test_an_engine_that_sleeps_wakes_after_passes_that_took_all_that_was_free(monkeypatch):
    device = Device(monkeypatch)
    engine = engine_on(device)
    for _ in range(3):
        engine.rest()
        device.run_pass(device.free + device.reserved - device.allocated)
        assert device.free == pytest.approx(0)
        engine._wake()
        assert device.mapped == device.cache


def test_memory_is_planned_alike_while_an_engine_sleeps_and_while_it_is_awake(monkeypatch):
    device = Device(monkeypatch)
    engine = engine_on(device)
    awake = free_bytes(engine.asleep_bytes)
    assert awake == (80 - 3 - 6 - 26) * GIGA
    engine.rest()
    assert engine.asleep_bytes == 26 * GIGA
    assert free_bytes(engine.asleep_bytes) == awake
    engine.rest()  # asleep already: what was released is remembered
    assert free_bytes(engine.asleep_bytes) == awake
    device.run_pass(20.0)  # kept by the allocator, and used again by the next pass
    assert free_bytes(engine.asleep_bytes) == awake
    engine._wake()
    assert engine.asleep_bytes == 0
    assert free_bytes(engine.asleep_bytes) == awake


def test_an_engine_that_never_sleeps_holds_its_cache_and_nothing_is_counted_twice(monkeypatch):
    device = Device(monkeypatch)
    engine = engine_on(device)
    engine._sleeps = False
    engine.rest()
    assert engine.asleep_bytes == 0
    assert free_bytes(engine.asleep_bytes) == (80 - 3 - 6 - 26) * GIGA
