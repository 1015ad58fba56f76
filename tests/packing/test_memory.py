"""What autograd keeps, counted by hand on a small module; how it grows; what is planned from it."""

import pytest
import torch
import trl.kernels.chunked_logprob
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from perl.packing import head
from perl.packing.attention import use_packed_attention
from perl.packing.forward import score
from perl.packing.head import LogitSettings, add_scored_forward, head_bytes
from perl.packing.memory import MemoryPlan, TokenBytes, kept_bytes, measure, plan_memory
from perl.packing.rows import Row
from tests.oracles.kernel_memory import EVERY_WAY, as_on_a_gpu
from tests.packing.test_attention import COMMON

GIGA = 2**30


# Bytes that a token keeps in bfloat16 with LoRA on all layers; 28 layers, 1536 wide, 8960 inside, worked out by hand:
# kept 28 x (6 x 1536 + 4 x 8960) x 2; the inputs of the layers 28 x 1536 x 2, and 1.3 of one layer.
OF_1_5B = TokenBytes(kept=28 * 90_112, recomputed=28 * 3072 + 1.3 * 90_112, fixed=268_435_456)


@pytest.mark.parametrize(
    ("free", "longest", "expected"),
    [
        # T4, 16 GB: 14.7 GB less 3.1 GB of weights. 0.7 (11.6e9 - 12 x 18.5e6) - 0.268e9 = 7.696e9 bytes for tokens.
        (11.6e9, 2048, MemoryPlan(3050, recompute=False)),
        (11.6e9, 4096, MemoryPlan(37_881, recompute=True)),
        (11.6e9, 40_000, MemoryPlan(40_000, recompute=True)),  # more than fits: the step itself will say so
        # L4, 24 GB: 0.7 (19.0e9 - 0.222e9) - 0.268e9 = 12.876e9
        (19.0e9, 4096, MemoryPlan(5103, recompute=False)),
        (19.0e9, 16_384, MemoryPlan(63_378, recompute=True)),
        # H100, 80 GB: 0.7 (76e9 - 0.222e9) - 0.268e9 = 52.776e9
        (76e9, 16_384, MemoryPlan(20_917, recompute=False)),
        (76e9, 32_768, MemoryPlan(65_536, recompute=True)),
    ],
)
def test_plans_for_gpus_of_three_sizes_are_what_was_worked_out_by_hand(free, longest, expected):
    assert OF_1_5B.recomputed == pytest.approx(203_161.6)
    plan = plan_memory(free, 18_500_000, OF_1_5B, longest_row=longest)
    assert plan.recompute == expected.recompute
    assert plan.tokens == pytest.approx(expected.tokens, abs=3)


class Small(nn.Module):
    """Keeps x for the gradient of the first weight, the first output for both ReLU and the second weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(functional.relu(self.first(x)))


def test_bytes_are_counted_as_by_hand_without_parameters_and_each_tensor_once():
    """Also where gradients are off; a checkpoint keeps its input only."""
    model, x = Small(), torch.randn(10, 4)
    hidden = model.first(x).nbytes  # 10 x 8 numbers
    # x (10 x 4) for the first weight; ReLU's output (10 x 8) for itself and for the second weight: one tensor
    assert kept_bytes(lambda: model(x), model) == x.nbytes + hidden == 4 * (10 * 4 + 10 * 8)
    with torch.no_grad():
        assert kept_bytes(lambda: model(x), model) == x.nbytes + hidden
    leaf = torch.randn(10, 4, requires_grad=True)
    for reentrant in (True, False):
        assert kept_bytes(lambda again=reentrant: checkpoint(model, leaf, use_reentrant=again), model) == leaf.nbytes
    model.first.requires_grad_(False)  # nothing before the second layer has a gradient
    assert kept_bytes(lambda: model(x), model) == hidden
    model.requires_grad_(False)
    assert kept_bytes(lambda: model(x), model) == 0
    # ReLU's; the weights are not counted
    assert kept_bytes(lambda: model(x.clone().requires_grad_()), model) == hidden
    buffered = nn.BatchNorm1d(4).eval()
    buffered(x)
    own = {4 * 10 * 4, 4 * 10 * 4 + 2 * 4 * 4}  # x, and in some versions an inverse deviation; not the running averages
    assert kept_bytes(lambda: buffered(x), buffered) in own


def qwen(layers=2, dropout=0.0, width=32) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {**COMMON, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=1024))
    for layer in model.model.layers:
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(dropout))
    add_scored_forward(model, LogitSettings())
    assert use_packed_attention(model) is None
    model.lm_head.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    return model.train()


def adapted(model, rank=4, dtype=torch.float32):
    """With LoRA on all layers, as PEFT runs it."""
    model = model.to(dtype)
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")).train()


def true_peak(policy, tokens: int, *, recompute: bool, reentrant=False, prompt: int = 1, completions: int = 1) -> int:
    """The most that a pass holds at once, counted storage by storage, gradients of parameters left out."""
    base = policy.get_base_model()
    if recompute:
        base.activation_checkpointing_enable({"use_reentrant": reentrant})
        base.enable_input_require_grads()
    seen, scored = torch.randint(64, (prompt,)), torch.ones(tokens, dtype=torch.bool)
    rows = [Row(seen, torch.randint(64, (tokens,)), scored) for _ in range(completions)]
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    with LiveBytes() as live:
        log_probs_NT, _ = score(policy, rows, [list(range(completions))], packed=True, columns=tokens)
        log_probs_NT.sum().backward()
    gradients = sum(parameter.grad.nbytes for parameter in trained)
    policy.zero_grad()
    base.activation_checkpointing_disable()
    return live.peak - (gradients if recompute else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("recompute", "reentrant"), [(False, False), (True, False), (True, True)])
def test_what_is_planned_for_a_pass_is_its_true_peak(recompute, reentrant, dtype):
    policy = adapted(qwen(layers=4, width=64), dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        per_token = measure(policy, packed=True)
        peak = true_peak(policy, 600, recompute=recompute, reentrant=reentrant)
    assert peak == pytest.approx(per_token.of_pass(600, 600, recompute=recompute), rel=0.15)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("how", EVERY_WAY, ids=str)
def test_what_completions_see_of_a_shared_prompt_is_in_the_plan(how, recompute, monkeypatch):
    as_on_a_gpu(monkeypatch, how)
    policy = adapted(qwen(layers=4), dtype=torch.bfloat16)
    per_token = measure(policy, packed=True, shared=True)
    prompt, completion, count = 800, 8, 24
    tokens = prompt + count * (completion - 1)
    planned = per_token.of_pass(tokens, prompt + completion, recompute=recompute, copies=count * prompt)
    without = per_token.of_pass(tokens, prompt + completion, recompute=recompute)
    peak = true_peak(policy, completion, recompute=recompute, prompt=prompt, completions=count)
    if how.kernel:
        assert 1.08 * planned >= peak >= 0.85 * planned
        assert peak > 1.2 * without or recompute
    else:  # masks are planned as if each completion were as long as the longest row
        assert 1.08 * planned >= peak >= 0.6 * planned


def test_weights_that_autocast_has_rounded_are_one_layers_where_activations_are_computed_again():
    policy = adapted(qwen(layers=4, width=256))
    with torch.autocast("cpu", torch.bfloat16):
        per_token = measure(policy, packed=True)
        peak = true_peak(policy, 64, recompute=True)
    weights = 2 * sum(layer.weight.numel() for layer in policy.modules() if type(layer) is nn.Linear)
    assert per_token.kept_fixed + per_token.fixed == pytest.approx(weights, rel=0.1)
    assert per_token.fixed <= weights / 3
    assert peak <= 1.2 * per_token.of_pass(64, 64, recompute=True)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_and_masks_of_padded_rows_grow_with_the_square(attention):
    torch.manual_seed(0)
    model = qwen(layers=3)
    model.set_attn_implementation(attention)
    per_token = measure(model, packed=False)
    assert per_token.kept_pair > 0
    ids, length = torch.randint(64, (1500,)), 1400
    rows = [Row(ids[:1], ids[1 : n + 1], torch.ones(n, dtype=torch.bool)) for n in (length, length - 100)]
    kept = kept_bytes(lambda: score(model, rows, [[0], [1]], packed=False, columns=length), model)
    assert kept == pytest.approx(per_token.of_pass(2 * length, length, recompute=False), rel=0.03)


def test_the_tile_of_logits_is_as_large_as_the_kernels(monkeypatch):
    def tile_bytes(vocabulary: int, dtype: torch.dtype) -> int:
        return head_bytes((vocabulary, 1), torch.float32, dtype, GIGA, fused=False)

    rows, columns = trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, 32_768
    assert tile_bytes(151_936, torch.bfloat16) == rows * columns * torch.bfloat16.itemsize
    assert tile_bytes(1000, torch.float32) == rows * 1000 * 4
    monkeypatch.setattr(head, "_KERNEL_WIDTH", 64)
    monkeypatch.setattr(head, "TOKEN_CHUNK_SIZE", 32)
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 32)
    hidden, weight = torch.randn(100, 1, requires_grad=True), torch.randn(200, 1, requires_grad=True)
    with LiveBytes() as live:
        head.head_log_probs(hidden, weight, None, torch.zeros(100, dtype=torch.long), LogitSettings())
    assert live.largest == tile_bytes(200, torch.float32) == 32 * 64 * 4
