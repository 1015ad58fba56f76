"""The estimate from a config against what is measured on the model itself, and against arithmetic by hand."""

import gc

import pytest
import torch
from live_bytes import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

from perl.methods.base_parameters import parts_of
from perl.methods.settings import adaptation
from perl.packing.attention import use_packed_attention
from perl.packing.forward import choose_passes, score
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import LogitSettings, add_scored_forward
from perl.packing.memory import measure
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base, total_parameters, trainable_parameters
from perl.recipe.quantisations import QUANTISATIONS
from perl.recipe.sections import ModelSection, PeftSection
from perl.training.counted import counted_decoder
from perl.training.decoder import Decoder, Types, cached_bytes, decoder_of, weight_bytes
from perl.training.hardware import GIB, sold_as
from perl.training.memory_estimate import Attention, GpuWork, estimate_memory, token_bytes
from tests.oracles.kernel_memory import EVERY_WAY, as_on_a_gpu
from tests.packing.families import PACKED, make

WITHIN = 0.01
# Type, layers, hidden, inner, heads, key-value heads, vocabulary, rank, further.
SHAPES = {
    "qwen3": ("qwen3", 2, 64, 192, 4, 2, 128, 8, {"head_dim": 32}),
    "qwen3, many layers": ("qwen3", 5, 32, 64, 4, 4, 256, 4, {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", 3, 64, 256, 8, 2, 128, 16, {"tie_word_embeddings": True}),
    "llama": ("llama", 2, 96, 256, 6, 2, 64, 8, {}),
    "llama with biases": ("llama", 2, 64, 128, 4, 1, 64, 2, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", 2, 64, 160, 4, 2, 64, 32, {"head_dim": 32, "sliding_window": None}),
}
BY_SEGMENT = Attention(kernel=False)  # as on a CPU


def config_of(name: str):
    kind, layers, hidden, inner, heads, key_heads, vocabulary, _, further = SHAPES[name]
    sizes = {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner},
        **{"num_attention_heads": heads, "num_key_value_heads": key_heads},
        **{"vocab_size": vocabulary, "max_position_embeddings": 1024},
    }
    return AutoConfig.for_model(kind, **sizes, **further)


def policy_of(name: str, dtype: torch.dtype = torch.float32, method: str = "lora"):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype)
    policy = attach_adapter(base, adaptation(PeftSection(rank=SHAPES[name][7], method=method))).train()
    fuse_lora(policy)
    add_scored_forward(base, LogitSettings())
    assert use_packed_attention(base) is None
    return policy


def test_parameters_of_base_and_adapter_are_those_of_the_model():
    for name in SHAPES:
        policy, decoder = policy_of(name), decoder_of(config_of(name))
        trained = trainable_parameters(policy)
        assert decoder.lora_parameters(SHAPES[name][7]) == trained, name
        assert decoder.parameters == total_parameters(policy) - trained, name
        assert weight_bytes(decoder, Types(weights=2)) == 2 * decoder.parameters, name


FULL, HALF, MIXED = (torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "types"),
    [*(("qwen3", types) for types in (FULL, HALF, MIXED)), *((name, MIXED) for name in SHAPES if name != "qwen3")],
)
def test_bytes_of_a_token_are_those_that_are_measured(name, types):
    dtype, autocast = types
    policy = policy_of(name, dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        measured = measure(policy, packed=True)
    types = Types(weights=dtype.itemsize, compute=(autocast or dtype).itemsize)
    estimated = token_bytes(decoder_of(config_of(name)), types, SHAPES[name][7], BY_SEGMENT)
    assert estimated.kept == pytest.approx(measured.kept, rel=WITHIN)
    assert estimated.recomputed == pytest.approx(measured.recomputed, rel=WITHIN)


@pytest.mark.parametrize("name", ["qwen3", "llama with biases"])
def test_bytes_of_a_token_with_a_dora_are_those_that_are_held_between_the_passes(name):
    policy, decoder = policy_of(name, method="dora"), decoder_of(config_of(name))
    assert decoder.lora_parameters(SHAPES[name][7]) + decoder.outputs == trainable_parameters(policy)

    def held(tokens: int) -> int:
        row = Row(torch.zeros(1, dtype=torch.long), torch.zeros(tokens - 1, dtype=torch.long), torch.ones(tokens - 1))
        with LiveBytes() as live:
            kept = score(policy, [row], [[0]], packed=True, columns=tokens - 1)
            gc.collect()
            found = live.now
        del kept
        return found

    held(16)  # the first pass makes tables
    measured = (held(256) - held(128)) / 128
    estimated = token_bytes(decoder, Types(weights=4, compute=4), SHAPES[name][7], BY_SEGMENT, dora=True)
    assert estimated.kept == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_bytes_of_a_token_on_a_quantised_base_and_of_its_weights_are_those_that_are_measured(name, tmp_path):
    pytest.importorskip(QUANTISATIONS[name].package.modules[0])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("qwen2"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    section = ModelSection(name=str(tmp_path), dtype="bfloat16", quantization=name)
    base = load_base(section, torch.device("cpu"))
    decoder, rank, types = decoder_of(config_of("qwen2")), SHAPES["qwen2"][7], Types(quantised=QUANTISATIONS[name])
    held = sum(part.nbytes for key, p in base.named_parameters() for _, part in parts_of(key, p.detach()))
    for parameter in base.parameters():
        if hasattr(parameter, "quant_state"):
            held += parameter.quant_state.absmax.nbytes + parameter.quant_state.state2.absmax.nbytes
    assert weight_bytes(decoder, types) == pytest.approx(held, rel=WITHIN)
    policy = attach_adapter(base, adaptation(PeftSection(rank=rank))).train()
    fuse_lora(policy)
    add_scored_forward(base, LogitSettings())
    assert use_packed_attention(base) is None
    with torch.autocast("cpu", torch.bfloat16):
        measured = measure(policy, packed=True)
    estimated = token_bytes(decoder, types, rank, BY_SEGMENT)
    assert estimated.kept == pytest.approx(measured.kept, rel=WITHIN)
    assert estimated.recomputed == pytest.approx(measured.recomputed, rel=WITHIN)
    assert estimated.fixed + estimated.kept_fixed == pytest.approx(measured.fixed + measured.kept_fixed, rel=0.1)


QWEN2_1B5 = Decoder(
    **{"layers": 28, "hidden": 1536, "inner": 8960, "queries": 1536, "keys": 256, "heads": 12, "head_size": 128},
    **{"vocabulary": 151936, "tied": True, "normed_heads": False, "biases": 1536 + 512},
)


def test_a_known_model_has_the_parameters_and_the_cache_that_are_published():
    assert QWEN2_1B5.parameters == 1_543_714_304
    assert QWEN2_1B5.lora_parameters(16) == 18_464_768
    assert cached_bytes(QWEN2_1B5, Types()) == 2 * 28 * 2 * 128 * 2  # keys and values, layers, heads, size, bytes


def test_a_run_on_an_80_gb_gpu_is_added_up_by_hand():
    found = estimate_memory(QWEN2_1B5, Types(), 16, GpuWork(4096, completions=64), sold_as(80))
    assert found.weights == 2 * 1_543_714_304
    assert found.adapter == 16 * 18_464_768
    assert found.cache == 28_672 * 4096 * 64
    layer = 2 * 4 * 1536 + 2 * 2 * 1536 + 2 * (2 * 1536 + 2 * 256) + 4 * 2 * 8960 + 2 * 7 * 16
    assert found.per_token.kept == pytest.approx(28 * layer, rel=0.005)  # but for the head and a few numbers a token
    assert not found.plan.recompute
    assert found.fits
    assert found.least == pytest.approx((0.6 + 2.88 + 0.275 + max(0.25 + 4096 * 28 * layer / GIB, 7.0)) * GIB, rel=0.01)


@pytest.mark.parametrize("attention", EVERY_WAY, ids=str)
def test_bytes_of_shared_prompts_are_those_that_are_measured_whatever_way_attention_takes(attention, monkeypatch):
    name = "qwen3"
    as_on_a_gpu(monkeypatch, attention)
    policy = policy_of(name, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        measured = measure(policy, packed=True, shared=True)
    estimated = token_bytes(decoder_of(config_of(name)), Types(), SHAPES[name][7], attention)
    assert estimated.kept == pytest.approx(measured.kept, rel=WITHIN)
    assert estimated.recomputed == pytest.approx(measured.recomputed, rel=WITHIN)
    # Where a key stands, in 8 bytes for all layers, and the mask of a single token are nothing to a model of real size.
    assert estimated.kept_copy <= measured.kept_copy <= estimated.kept_copy + 13
    assert estimated.recomputed_copy <= measured.recomputed_copy <= estimated.recomputed_copy + 13
    assert estimated.kept_pair == pytest.approx(measured.kept_pair, rel=0.02)


@pytest.mark.parametrize("name", ["Gemma3Text", "Olmo3", "Phi3", "GptOss", "Qwen3Moe", "Mixtral", "Lfm3"])
def test_bytes_of_a_token_of_other_layers_are_about_those_that_are_measured(name):
    base = make(name)
    counted = counted_decoder(base.config)
    policy = attach_adapter(base, adaptation(PeftSection(rank=8))).train()
    fuse_lora(policy)
    assert choose_passes(policy, padding_free=True, share=False).packed
    measured = measure(policy, packed=True)
    estimated = token_bytes(counted, Types(weights=4, compute=4), 8, BY_SEGMENT)
    assert estimated.kept == pytest.approx(measured.kept, rel=0.12)


def test_numbers_of_models_with_experts_and_states_are_counted_exactly():
    for name in set(PACKED) - {"GPT2", "Gemma3nText", "Mamba2", "Llama4Text"}:
        base = make(name)
        assert counted_decoder(base.config).parameters == total_parameters(base), name
    hybrid, experts = (counted_decoder(make(name).config) for name in ("Qwen3_5Text", "Qwen3Moe"))
    assert (hybrid.attention_layers, hybrid.layers) == (1, 2)
    assert hybrid.state_numbers == 4 * 8 * 8  # heads, keys, values of one layer
    assert cached_bytes(hybrid, Types()) == 2 * 1 * 2 * 8 * 2  # keys and values of two heads in bfloat16
    # Of two layers: attention, and two of four experts with gate, up and down of 32 x 16.
    assert experts.active_parameters == 2 * (2 * 32 * (32 + 16) + 2 * 3 * 32 * 16)
    assert experts.linear_parameters == 2 * (2 * 32 * (32 + 16))
    assert weight_bytes(experts, Types(quantised=QUANTISATIONS["nf4"])) > 2 * 2 * 4 * 3 * 32 * 16  # in bfloat16
