"""PEFT's LoRA layers and the same layers fused: the two to compare, and how.

adapter settings -> a policy away from its start, and its fused twin
"""

import copy
import math

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn

from perl.packing.fused_lora import fuse_lora

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
INPUTS, OUTPUTS = 24, 40


class Projection(nn.Module):
    """The smallest base with a layer to adapt."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.proj = nn.Linear(INPUTS, OUTPUTS, bias=bias)

    def forward(self, x):
        return self.proj(x)


def fill(policy: nn.Module, seed: int = 1) -> None:
    """An adapter away from its start, so that B's product is not 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values / math.sqrt(parameter.shape[-1]))


def adapted(rank=4, scaling=2.0, bias=False, dtype=torch.float32, **options) -> PeftModel:
    base = Projection(bias).to(dtype)
    policy = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank * scaling, target_modules=["proj"], **options))
    fill(policy)
    return policy


def layer_of(policy) -> Linear:
    return next(m for m in policy.modules() if isinstance(m, Linear))


def twins(policy: nn.Module) -> tuple[nn.Module, nn.Module]:
    """PEFT's and ours; ours fused in every LoRA layer."""
    fused = copy.deepcopy(policy)
    assert fuse_lora(fused) == sum(isinstance(m, Linear) for m in fused.modules()) > 0
    return policy, fused


def results(policy, x, output_gradient=None, run=None) -> dict[str, torch.Tensor]:
    """Output and gradients of everything that needs one; the input is a new leaf with x's strides."""
    policy.zero_grad()
    x = x.detach().requires_grad_(x.is_floating_point())
    y = (policy if run is None else run)(x)
    if output_gradient is None:
        output_gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y.backward(output_gradient.to(y.dtype))
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def error(ours, theirs) -> float:
    """Relative, in the Frobenius norm."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def assert_close(ours, theirs, tolerance) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert error(ours[name], tensor) <= tolerance, name


def saved_bytes(policy, run) -> int:
    """Bytes that a forward pass keeps for backward, every storage once, the policy's own left out."""
    own = {t.untyped_storage().data_ptr() for t in (*policy.parameters(), *policy.buffers())}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = run()
    kept = sum(storage.nbytes() for storage in storages.values())
    del y
    return kept


def is_fused(y) -> bool:
    """Whether an output was computed by the fused function; it must need a gradient."""
    return "_LoraLinear" in type(y.grad_fn).__name__
