"""The update of each adapted layer as matrices, computed beside the base, which is only read.

policy -> LowRank factors, or merged weights

A layer's update is given as factors where it has a low rank: read off where the method keeps them, else found from the
update itself. Weights are added up in float64, so that what is left of W - W is not taken for an update; results are
float32.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.miss.layer import MissLinear
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.tuners.vera.layer import VeraLayer
from torch import nn

from perl.methods.anchor import AnchoredLora, anchor_of
from perl.methods.names import name_in_base

# Largest rank that servers load as an adapter.
LARGEST_RANK = 512
# An update is of a rank if what the factors leave out is below this share of it; float32 rounds to about 1e-7.
EXACT = 1e-5
# Singular values below this share of the largest are rounding.
_NEGLIGIBLE = 1e-6
# Seed of the range finder's random directions, and its power iterations where the rank is not low.
_SEED, _ITERATIONS = 0, 4


@dataclass(frozen=True)
class LowRank:
    """An update B A.

    Attributes:
        A_RI: (rank, in) float32.
        B_OR: (out, rank) float32.
        error: What B A leaves out of the update, relative (Frobenius norm).
    """

    A_RI: torch.Tensor
    B_OR: torch.Tensor
    error: float = 0.0

    @property
    def rank(self) -> int:
        """Number of columns of B."""
        return len(self.A_RI)


def adapted_layers(policy: PeftModel) -> Iterator[tuple[str, BaseTunerLayer]]:
    """Layers that the active adapter changes, under the base's names."""
    adapter = policy.active_adapter
    for name, layer in policy.named_modules():
        if isinstance(layer, TrainableTokensLayer):  # of embeddings; it goes with the modules that are trained whole
            continue
        if isinstance(layer, BaseTunerLayer) and any(
            adapter in getattr(layer, part, {}) for part in layer.adapter_layer_names
        ):
            yield name_in_base(name), layer


def low_rank_update(layer: BaseTunerLayer, adapter: str) -> LowRank:
    """A layer's update as factors, of the lowest rank that leaves nothing out.

    Where even the largest rank leaves something out, ``error`` says how much.
    """
    for kind, factors_of in _CLOSED_FORMS:
        if isinstance(layer, kind):
            factors = factors_of(layer, adapter)
            if factors is not None:
                return factors
    return factorise(update_of(layer, adapter))


def update_of(layer: BaseTunerLayer, adapter: str) -> torch.Tensor:
    """(out, in) float64: merged weight minus the base's."""
    weight = dict(layer.get_base_layer().named_parameters())["weight"]
    delta = merged_parameters(layer, adapter)["weight"] - weight.detach().double()
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def merged_parameters(layer: BaseTunerLayer, adapter: str) -> dict[str, torch.Tensor]:
    """The base layer's parameters with the adapter merged in, float64, by name; the layer is left alone."""
    merged = copy.deepcopy(layer).double()
    merged.merge(adapter_names=[adapter])
    base: nn.Module = merged.get_base_layer()
    return {name: p.detach() for name, p in base.named_parameters()}


def factorise(update_OI: torch.Tensor) -> LowRank:
    """Factors of a matrix, exact if its rank is low: factors with fewer numbers than the matrix, and servable.

    A random range finder with a rank that doubles until nothing is left over (Halko, Martinsson and Tropp 2011,
    algorithm 4.1), then the singular values that are rounding are dropped.
    """
    norm = update_OI.norm()
    outputs, inputs = update_OI.shape
    if norm == 0:
        return LowRank(torch.zeros(1, inputs, device=norm.device), torch.zeros(outputs, 1, device=norm.device))
    largest = max(1, min(LARGEST_RANK, outputs * inputs // (outputs + inputs)))
    generator = torch.Generator(update_OI.device).manual_seed(_SEED)
    rank = min(32, largest)
    while True:
        directions = torch.randn(inputs, rank, generator=generator, dtype=update_OI.dtype, device=norm.device)
        Q, _ = torch.linalg.qr(update_OI @ directions)
        A = Q.T @ update_OI
        error = float((update_OI - Q @ A).norm() / norm)
        if error <= EXACT or rank == largest:
            break
        rank = min(2 * rank, largest)
    if error > EXACT:  # then at least the best factors of that rank
        for _ in range(_ITERATIONS):
            Q, _ = torch.linalg.qr(update_OI.T @ Q)
            Q, _ = torch.linalg.qr(update_OI @ Q)
        A = Q.T @ update_OI
        error = float((update_OI - Q @ A).norm() / norm)
    U, S, V = torch.linalg.svd(A, full_matrices=False)
    kept = max(1, int((_NEGLIGIBLE * S[0] < S).sum()))
    return LowRank((S[:kept, None] * V[:kept]).float(), (Q @ U[:, :kept]).float(), error)


def _lora(layer: LoraLinear, adapter: str) -> LowRank | None:
    """B A times the scale, with the anchor's factors if there is one; another variant (DoRA) is no LoRA."""
    if adapter in layer.lora_variant and not isinstance(layer.lora_variant[adapter], AnchoredLora):
        return None
    if layer.lora_bias.get(adapter):
        return None
    A, B = (part[adapter].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
    anchor = anchor_of(layer, adapter)
    if anchor is not None:
        A, B = torch.cat([A, anchor[0].float()]), torch.cat([B, -anchor[1].float()], dim=1)
    return LowRank(A, B * layer.scaling[adapter])


def _adalora(layer: AdaLoraLayer, adapter: str) -> LowRank:
    """Triples that are not masked (Zhang et al. 2023, eq. 3; the scale is PEFT's)."""
    A, B, E = (part[adapter].detach().float() for part in (layer.lora_A, layer.lora_B, layer.lora_E))
    kept = E.flatten() != 0
    if not kept.any():
        return LowRank(A[:0].new_zeros(1, A.shape[1]), B.new_zeros(len(B), 1))
    scale = layer.scaling[adapter] / (layer.ranknum[adapter].detach().float() + 1e-5)
    return LowRank((E * A)[kept], B[:, kept] * scale)


def _vera(layer: VeraLayer, adapter: str) -> LowRank:
    """diag(b) B diag(d) A with the shared matrices cut to this layer (Kopiczko et al. 2023, eq. 2)."""
    A = layer.vera_A[adapter][:, : layer.in_features].float()
    B = layer.vera_B[adapter][: layer.out_features].float()
    b, d = (vector[adapter].detach().float() for vector in (layer.vera_lambda_b, layer.vera_lambda_d))
    return LowRank(d[:, None] * A, b[:, None] * B)


def _miss(layer: MissLinear, adapter: str) -> LowRank | None:
    """The trained matrix, and a selector that sums the inputs it is repeated along (Kang et al. 2024, eq. 6)."""
    if layer.miss_fn in ("bat", "mini"):
        return None
    block = layer.miss_block[adapter].detach().float()
    rank = len(block)
    selector = torch.eye(rank, device=block.device).repeat(1, -(-layer.in_features // rank))[:, : layer.in_features]
    return LowRank(selector, block.T.contiguous())


_CLOSED_FORMS: tuple[tuple[type, Callable[..., LowRank | None]], ...] = (
    (LoraLinear, _lora),
    (AdaLoraLayer, _adalora),
    (VeraLayer, _vera),
    (MissLinear, _miss),
)
