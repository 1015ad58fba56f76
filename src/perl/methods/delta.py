"""The update of each adapted layer as matrices, computed beside the base, which is only read.

policy -> LowRank factors, or merged weights

A layer's update is given as factors where it has a low rank: read off where the method keeps them, else found from the
update itself. Weights are added up in float64, so that what is left of W - W is not taken for an update; factors are
float32. The weight of a quantised layer is the one that it stands for.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.delora.layer import DeloraLinear
from peft.tuners.gralora.layer import Linear as GraloraLinear
from peft.tuners.hra.layer import HRALinear
from peft.tuners.loha.layer import Linear as LoHaLinear
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.miss.layer import MissLinear
from peft.tuners.tinylora.layer import Linear as TinyLoraLinear
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.tuners.vera.layer import VeraLayer
from torch import nn

from perl.methods.anchor import AnchoredLora, anchor_of
from perl.methods.base_parameters import base_weight, is_packed, name_in_base
from perl.methods.hooks import factors_of
from perl.methods.registry import LARGEST_RANK
from perl.run.shards import gathered

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
    own = factors_of(layer)
    if own is not None:
        return LowRank(*own(layer, adapter, masked=False))
    return closed_form(layer, adapter) or factorise(update_of(layer, adapter))


def closed_form(layer: BaseTunerLayer, adapter: str) -> LowRank | None:
    """A linear layer's update as the factors that the method keeps, or None where it keeps none.

    Their rank is the method's, whatever the numbers are: it does not change while training, nor at its start, where the
    product is 0.
    """
    own = factors_of(layer)  # such a layer may be one of PEFT's LoRA layers too
    if own is not None:
        return LowRank(*own(layer, adapter, masked=True))
    for kind, form in _CLOSED_FORMS:
        if isinstance(layer, kind):
            return form(layer, adapter)
    return None


def balanced(factors: LowRank) -> LowRank:
    """The same product as singular triples, split evenly over both factors.

    Where the factors' products cancel each other, as with an anchor, rounding the factors to half precision leaves
    errors as large as the update. Singular triples do not cancel.
    """
    Q_OR, left_RR = torch.linalg.qr(factors.B_OR.double())
    P_IR, right_RR = torch.linalg.qr(factors.A_RI.double().T)
    U, S, V = torch.linalg.svd(left_RR @ right_RR.T, full_matrices=False)
    root = S.sqrt()
    return LowRank((root[:, None] * V @ P_IR.T).float(), (Q_OR @ U * root).float(), factors.error)


def update_of(layer: BaseTunerLayer, adapter: str) -> torch.Tensor:
    """(out, in) float64: merged weight minus the base's."""
    delta = merged_parameters(layer, adapter)["weight"] - base_weight(layer.get_base_layer()).double()
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def merged_parameters(layer: BaseTunerLayer, adapter: str) -> dict[str, torch.Tensor]:
    """The base layer's parameters with the adapter merged in, float64, by name; the layer is left alone."""
    base = layer.get_base_layer()
    with gathered(base):
        # The copy of the layer takes the copy of its base that is made here for the base itself.
        merged = copy.deepcopy(layer, {id(base): _in_float64(base)}).double()
        if is_packed(getattr(base, "weight", None)):
            _without_quantisation(merged)
        merged.merge(adapter_names=[adapter])
        parameters = {name: p.detach() for name, p in merged.get_base_layer().named_parameters()}
    # Such a layer changes one parameter; others of the same module may have layers of their own.
    return {layer.parameter_name: parameters[layer.parameter_name]} if isinstance(layer, ParamWrapper) else parameters


def _in_float64(base: nn.Module) -> nn.Module:
    weight = getattr(base, "weight", None)
    if not is_packed(weight):
        return copy.deepcopy(base).double()
    weight_OI, bias = base_weight(base).double(), dict(base.named_parameters()).get("bias")
    outputs, inputs = weight_OI.shape
    plain = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")  # which draws no random numbers
    plain.weight = nn.Parameter(weight_OI)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().double())
    return plain


def _without_quantisation(layer: BaseTunerLayer) -> None:
    """Makes PEFT's layer over quantised weights the one that it has for plain weights."""
    layer.quantization_backend = None
    module, name = type(layer).__module__, type(layer).__name__
    for kind, written in (("bnb", "4bit"), ("bnb", "8bitLt"), ("torchao", "Torchao")):
        if module.endswith(f".{kind}") and written in name:
            plain = importlib.import_module(f"{module.removesuffix(kind)}layer")
            called = name.replace(written, "").replace("LoraLinear", "Linear")
            layer.__class__ = getattr(plain, called)
            layer.fan_in_fan_out = False


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


def _lora(layer: LoraLayer, adapter: str) -> LowRank | None:
    """B A times the scale, with the anchor's factors if there is one; another variant (DoRA) is no LoRA."""
    factor = dict(layer.lora_A).get(adapter)  # embeddings have theirs elsewhere
    if isinstance(layer, (ParamWrapper, MultiheadAttention)) or not isinstance(factor, nn.Linear):
        return None
    if adapter in layer.lora_variant and not isinstance(layer.lora_variant[adapter], AnchoredLora):
        return None
    if layer.lora_bias.get(adapter):
        return None
    A, B = (part[adapter].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
    anchor = anchor_of(layer, adapter)
    if anchor is not None:
        A, B = torch.cat([A, anchor[0].float()]), torch.cat([B, -anchor[1].float()], dim=1)
    return LowRank(A, B * layer.scaling[adapter])


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


def _hra(layer: HRALinear, adapter: str) -> LowRank:
    """W (Q - I), the chain of reflections as Q = I - U T U^T (Schreiber and Van Loan 1989)."""
    U = layer.hra_u[adapter].detach().double()
    U = torch.linalg.qr(U).Q if layer.hra_apply_GS[adapter] else U / U.norm(dim=0)
    T = 2 * torch.eye(U.shape[1], dtype=U.dtype, device=U.device)
    for i in range(1, len(T)):
        T[:i, i] = -2 * T[:i, :i] @ (U[:, :i].T @ U[:, i])
    return LowRank(U.T.float(), -(base_weight(layer.get_base_layer()).double() @ U @ T).float())


def _tinylora(layer: TinyLoraLinear, adapter: str) -> LowRank:
    """B R A with the fixed singular factors B and A (Morris et al. 2026)."""
    R = layer._compute_R(adapter).detach().float()
    return LowRank(R @ layer.tinylora_A[adapter].float(), layer.tinylora_B[adapter].float())


def _loha(layer: LoHaLinear, adapter: str) -> LowRank | None:
    """(B1 A1) * (B2 A2): of each row of the Bs, and each column of the As, all products of two numbers."""
    if adapter in layer.hada_t1:
        return None
    parts = (layer.hada_w1_a, layer.hada_w2_a, layer.hada_w1_b, layer.hada_w2_b)
    B1, B2, A1, A2 = (part[adapter].detach().float() for part in parts)
    A, B = (A1[:, None] * A2).flatten(0, 1), (B1[:, :, None] * B2[:, None]).flatten(1)
    return LowRank(A, B * layer.scaling[adapter])


def _delora(layer: DeloraLinear, adapter: str) -> LowRank:
    """(lambda/rank) B A, columns of B and rows of A normalised, inputs scaled as W is (Bini et al. 2025)."""
    A, B, bound = (part[adapter].detach().float() for part in (layer.delora_A, layer.delora_B, layer.delora_lambda))
    norms = A.norm(dim=1).clamp(min=1e-4) * B.norm(dim=0).clamp(min=1e-4)  # PEFT's bounds
    return LowRank(A * layer.delora_w_norm[adapter].float(), B * (bound / layer.r[adapter] / norms))


def _gralora(layer: GraloraLinear, adapter: str) -> LowRank:
    """Row j of the k x k blocks reads the j-th part of the rank of each block of inputs (Jung et al. 2025)."""
    k, rank = layer.gralora_k[adapter], layer.r[adapter]
    A_nir, B_jro = (part[adapter].detach().float() for part in (layer.gralora_A, layer.gralora_B))
    A_njsi = A_nir.unflatten(2, (k, rank // k)).permute(0, 2, 3, 1)
    A = torch.cat([torch.block_diag(*A_njsi[:, j]) for j in range(k)])
    B = torch.block_diag(*B_jro.transpose(1, 2))
    if layer.hybrid_r[adapter]:
        general = (part[adapter].weight.detach().float() for part in (layer.gralora_A_general, layer.gralora_B_general))
        A, B = (torch.cat(pair, dim=side) for side, pair in enumerate(zip((A, B), general, strict=True)))
    return LowRank(A, B * layer.scaling[adapter])


_CLOSED_FORMS: tuple[tuple[type, Callable[..., LowRank | None]], ...] = (
    (LoraLayer, _lora),
    (VeraLayer, _vera),
    (MissLinear, _miss),
    (HRALinear, _hra),
    (TinyLoraLinear, _tinylora),
    (LoHaLinear, _loha),
    (DeloraLinear, _delora),
    (GraloraLinear, _gralora),
)
