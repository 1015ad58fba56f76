"""Every gradient that is worked out by hand, in float64 and in a GPU's sizes, against the one that autograd finds."""

import pytest
import torch
from torch.nn import functional

from perl.packing import fused_lora, head
from perl.packing.divergence import head_divergence
from perl.packing.head import HeadStates, head_log_probs
from perl.policy.quantised import _Product
from tests.oracles.distillation import reverse_kl
from tests.packing.test_head import SETTINGS, by_hand

TOKENS = 321
# Of Qwen3-0.6B a 64th: 151,936 tokens, 1024 wide; one more, which neither rows nor columns of a tile divide.
VOCABULARY, WIDTH = 2374 + 1, 16
# A 16th: queries, keys and values, what attention hands on, gate and up, down.
LAYERS = [(64, 128), (64, 64), (128, 64), (64, 192), (192, 64)]


def normal(*shape, trains=True):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(trains)


def assert_alike(found, expected, tensors, limit=1e-12):
    """Values, and the gradients of tensors, for random factors."""
    factors = torch.randn(expected.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad((one * factors).sum(), tensors, retain_graph=True) for one in (found, expected))
    for ours, plain in ((found, expected), *zip(*gradients, strict=True)):
        assert (ours - plain).norm() <= limit * plain.norm()


@pytest.mark.parametrize("rows", [64, 128, 384])
@pytest.mark.parametrize("settings", SETTINGS)
def test_of_the_head_by_tiles_as_a_gpu_has_them_and_by_trls_kernel(settings, rows, monkeypatch):
    memory = 256 * 4 * VOCABULARY * rows
    assert head.tile_rows(VOCABULARY, memory) == rows
    for module in ("head", "divergence"):
        monkeypatch.setattr(f"perl.packing.{module}.memory_of", lambda _: memory)
    monkeypatch.setattr(head, "_KERNEL_WIDTH", 512)
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 128)
    how = SETTINGS[settings]
    hidden, bias = normal(TOKENS, WIDTH), normal(VOCABULARY, trains=False) if rows > 64 else None
    teacher, weight = (normal(count, WIDTH, trains=False) for count in (TOKENS, VOCABULARY))
    targets = torch.randint(VOCABULARY, (TOKENS,))
    expected, entropies = by_hand(hidden, weight, bias, targets, how)
    for fused, limit in ((True, 1e-12), (False, 1e-5)):  # TRL's sums are float32
        found, own = head_log_probs(hidden, weight, bias, targets, how, fused=fused)
        assert_alike(found, expected, [hidden], limit)
        assert found.dtype == own.dtype == (torch.float64 if fused else torch.float32)
        assert not own.requires_grad
        assert (own - entropies).norm() <= limit * entropies.norm()
    if how.softcap is None:
        logits = [functional.linear(x, weight, bias) * how.scale / how.temperature for x in (hidden, teacher)]
        for top_k in (0, 7):
            found, _ = head_divergence(HeadStates(hidden, weight, bias, how), teacher, top_k=top_k)
            assert_alike(found, reverse_kl(*logits, top_k), [hidden])


@pytest.mark.parametrize("rank", [1, 8, 48])
@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
def test_of_a_fused_lora_as_it_runs_on_a_gpu(inputs, outputs, rank, monkeypatch):
    monkeypatch.setattr(fused_lora, "_library_sums_first", lambda *_: False)
    x, bias, A, B = normal(3, 37, inputs), normal(outputs), normal(rank, inputs), normal(outputs, rank)
    W = normal(outputs, inputs, trains=False)
    for scaling in (2.0, 1 / 3):
        found = fused_lora._LoraLinear.apply(x, W, bias, A, B, scaling, None)
        assert_alike(found, functional.linear(x, W, bias) + scaling * (x @ A.T @ B.T), [x, bias, A, B])


@pytest.mark.parametrize("kind", ["no codes", "Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
def test_of_a_product_with_codes(inputs, outputs, kind, monkeypatch):
    """torchao quantises no float64: there the weight stands for itself."""
    layer, limit = torch.nn.Linear(inputs, outputs, dtype=torch.float64), 1e-12
    numbers, x = layer.weight.detach(), normal(3, 37, inputs)
    if kind == "no codes":
        monkeypatch.setattr("perl.policy.quantised.numbers_of", torch.Tensor.to)
    else:
        torchao, limit, x = pytest.importorskip("torchao.quantization"), 1e-6, x.detach().float().requires_grad_()
        torchao.quantize_(layer.float(), getattr(torchao, kind)(set_inductor_config=False))
        numbers = layer.weight.qdata.double() * layer.weight.scale.double()
    for bias in (layer.bias, None):
        found = _Product.apply(x, layer.weight.requires_grad_(False), bias)
        expected = functional.linear(x.double(), numbers, None if bias is None else bias.double())
        assert_alike(found, expected, [x] if bias is None else [x, bias], limit)
