"""What training changed of each weight matrix, as numbers: its rank, the base's singular directions it lies along.

adapted policy, or trained model and base -> weight and update of each module -> Spectrum
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from peft import PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from perl.methods.base_parameters import base_weight, name_in_base
from perl.methods.delta import adapted_layers, closed_form, update_of

BINS = 20
"""Parts of equal width that the singular directions are counted in, from the largest to the smallest."""
UNCHANGED = 1e-3
"""The eta of Zhu et al. 2025: below bfloat16's spacing, so that it means the same number after rounding."""
# Singular values below this share of the largest have no directions that float64 products could tell.
_NEGLIGIBLE = 1e-7
# Numbers of a matrix that are made float64 at once.
_BLOCK = 1 << 24

Update = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""W0 and Delta W of a module, both (out, in) or (n,), computed when it is called."""


@dataclass(frozen=True)
class Sides:
    """One measure on both sides of a matrix.

    Attributes:
        left: Outputs: columns of U, ||u_j^T Delta W||^2.
        right: Inputs: rows of V^T, ||Delta W v_j||^2.
    """

    left: float
    right: float


@dataclass(frozen=True)
class Spectrum:
    """What training changed of a weight, or of several as the blocks of one. Shares are from 0 to 1, angles in degrees.

    Attributes:
        name: Of the module in the base, or of the group.
        modules: How many it is of.
        weights: Numbers in them.
        matrix: Whether it is of a matrix; a norm's vector counts as the diagonal matrix that it is.
        norm: ||Delta W||_F.
        base_norm: ||W0||_F.
        stable_rank: ||Delta W||_F^2 / ||Delta W||_2^2, of several the mean; None: there is no update.
        unchanged: Share of weights that are the same bfloat16 number after the update.
        energy: Share of ||Delta W||_F^2 in the principal directions; None: there is no update.
        chance: The same of an update without a direction, k / n.
        base_energy: The same of W0.
        angle: Largest principal angle between the k principal directions of W0 and those of W0 + Delta W.
        shift: ||sigma(W+) - sigma(W0)||_2 / ||sigma(W0)||_2.
        left_bins: Share of the energy in each of :data:`BINS` parts of the directions, largest singular value first;
            left side. Of fewer directions, none.
        right_bins: The same of the right side.
        base_bins: The same of W0 itself.
    """

    name: str
    modules: int
    weights: int
    matrix: bool
    norm: float
    base_norm: float
    stable_rank: float | None
    unchanged: float
    energy: Sides | None
    chance: float
    base_energy: float
    angle: Sides
    shift: float
    left_bins: tuple[float, ...]
    right_bins: tuple[float, ...]
    base_bins: tuple[float, ...]

    @property
    def size(self) -> float:
        """||Delta W||_F / ||W0||_F."""
        return self.norm / self.base_norm if self.base_norm else 0.0


def updates_of_adapter(policy: PeftModel) -> tuple[dict[str, Update], list[str]]:
    """The update of each module that an adapter changes, and the names of those that are left out: no matrices."""
    adapter, left_out = policy.active_adapter, list[str]()
    found: dict[str, Update] = {}
    for name, layer in adapted_layers(policy):
        if _has_weight(layer.get_base_layer()):
            found[name] = partial(_of_layer, layer, adapter)
        else:
            left_out.append(name)
    for name, module in policy.named_modules():
        if isinstance(module, TrainableTokensLayer):
            left_out.append(f"trained rows of {name_in_base(name)}")
        elif isinstance(module, ModulesToSaveWrapper) and _has_weight(module.original_module):
            found[name_in_base(name)] = partial(_between, module.original_module, module.modules_to_save[adapter])
    return found, left_out


def updates_of_model(base: PreTrainedModel, trained: PreTrainedModel) -> dict[str, Update]:
    """The update of each module of a model that was itself trained: its weights minus the base's, without biases."""
    weights = (name for name, p in base.named_parameters() if name.endswith(".weight") and p.dim() <= 2)
    names = [name.removesuffix(".weight") for name in weights]
    return {name: partial(_between, base.get_submodule(name), trained.get_submodule(name)) for name in names}


def _has_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() <= 2


def _of_layer(layer: BaseTunerLayer, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
    weight, factors = base_weight(layer.get_base_layer()), closed_form(layer, adapter)
    weight = weight.T if getattr(layer, "fan_in_fan_out", False) else weight
    if factors is None:
        return weight, update_of(layer, adapter)
    return weight, factors.B_OR.double() @ factors.A_RI.double()


def _between(before: nn.Module, after: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a module that was itself trained."""
    old, new = (one.get_parameter("weight").detach().float() for one in (before, after))
    old, new = (old.T, new.T) if isinstance(before, Conv1D) else (old, new)
    return old, new - old


@torch.no_grad()
def measure(name: str, weight: torch.Tensor, update: torch.Tensor, principal: float = 0.1) -> Spectrum:
    """Measures one update.

    The energies are those of the spectral analysis of PeRL (arXiv:2512.23165, its released
    ``analyze_delta_w_projection.py``: ||Delta W v_j||^2 and ||u_j^T Delta W||^2 over ||Delta W||_F^2). Unchanged
    weights, principal angles (cos theta_i = sigma_i(U0,k^T U+,k), of V likewise) and the shift of the spectrum are
    those of "The Path Not Taken" (Zhu et al. 2025, arXiv:2511.08567), the stable rank as in arXiv:2606.07082.

    All follows from three products with the shorter side n: W0 W0^T, Delta W W0^T and Delta W Delta W^T, (n, n)
    float64. The eigenvectors of the first are W0's singular vectors on that side, those of the other W0^T u / sigma.
    This is faster than W0's own decomposition in float32, and singular values are known to 1e-8 of the largest.

    Args:
        name: Of the module.
        weight: W0, (out, in) of any floating type, or (n,).
        update: Delta W.
        principal: Share of the singular directions that count as principal; at least one does.
    """
    unchanged, matrix = unchanged_share(weight, update), weight.dim() == 2
    if not matrix:
        weight, update = weight.diag(), update.diag()
    wide = weight.shape[0] <= weight.shape[1]
    M, D = (weight, update) if wide else (weight.T, update.T)
    base, mixed, product = _product(M, M), _product(D, M), _product(D, D)
    sigma2, U = _descending(base)
    after2, after_U = _descending(base + mixed + mixed.T + product)
    sigma, after = sigma2.sqrt(), after2.sqrt()
    n, norm2, base2 = len(sigma), float(product.trace()), float(sigma2.sum())
    k = max(1, min(n, round(principal * n)))
    # ||u_j^T Delta W||^2, and with v_j = W0^T u_j / sigma_j that of the longer side.
    short = ((product @ U) * U).sum(0).clamp(min=0)
    known = sigma > _NEGLIGIBLE * sigma[0]
    long = torch.where(known, (mixed @ U).square().sum(0) / sigma2.clamp(min=1e-300), 0.0)
    # <v_i, v+_j> = u_i^T W0 W+^T u+_j / (sigma_i sigma+_j)
    across = U[:, :k].T @ (base + mixed.T) @ after_U[:, :k] / (sigma[:k, None] * after[:k]).clamp(min=1e-300)
    energies, angles = [short, long], [_largest_angle(U[:, :k].T @ after_U[:, :k]), _largest_angle(across)]
    if not wide:
        energies, angles = energies[::-1], angles[::-1]
    largest2 = float(torch.linalg.eigvalsh(product)[-1])
    return Spectrum(
        name=name,
        modules=1,
        weights=weight.numel() if matrix else n,
        matrix=matrix,
        norm=math.sqrt(max(norm2, 0.0)),
        base_norm=math.sqrt(base2),
        stable_rank=norm2 / largest2 if norm2 > 0 else None,
        unchanged=unchanged,
        energy=Sides(*(float(of[:k].sum()) / norm2 for of in energies)) if norm2 > 0 else None,
        chance=k / n,
        base_energy=float(sigma2[:k].sum()) / base2 if base2 > 0 else 0.0,
        angle=Sides(*angles),
        shift=float((after - sigma).norm() / sigma.norm()) if base2 > 0 else 0.0,
        left_bins=_binned(energies[0], norm2),
        right_bins=_binned(energies[1], norm2),
        base_bins=_binned(sigma2, base2),
    )


def unchanged_share(weight: torch.Tensor, update: torch.Tensor) -> float:
    """Share of weights that stay the same in bfloat16: |w+ - w| <= eta max(|w|, |w+|) (Zhu et al. 2025).

    W0 + Delta W is added up in float64 and rounded once, as ``perl export --as merged --dtype bfloat16`` does.
    """
    same, rows = 0, max(1, _BLOCK // weight[0].numel())
    for old, delta in zip(weight.split(rows), update.split(rows), strict=True):
        w, new = old.bfloat16().double(), (old.double() + delta.double()).bfloat16().double()
        same += int(((new - w).abs() <= UNCHANGED * torch.maximum(w.abs(), new.abs())).sum())
    return same / weight.numel()


def pool(name: str, spectra: Sequence[Spectrum]) -> Spectrum:
    """Several updates together, at least one: norms and energies are those of one that has all of them as blocks."""
    changed = [one for one in spectra if one.energy is not None]
    by_update, by_base = [one.norm**2 for one in spectra], [one.base_norm**2 for one in spectra]
    weights = [one.weights for one in spectra]

    def mean(values: Iterator[float], by: Sequence[float]) -> float:
        total = math.fsum(by)
        return math.fsum(v * weight for v, weight in zip(values, by, strict=True)) / total if total else 0.0

    def sides(of: Callable[[Spectrum], Sides | None], together: Callable[[Iterator[float]], float]) -> Sides:
        both = [of(one) or Sides(0.0, 0.0) for one in spectra]
        return Sides(together(s.left for s in both), together(s.right for s in both))

    def bins(of: Callable[[Spectrum], tuple[float, ...]], by: Sequence[float]) -> tuple[float, ...]:
        whole = [(of(one), weight) for one, weight in zip(spectra, by, strict=True) if of(one)]
        if not whole:
            return ()
        return tuple(mean((shares[i] for shares, _ in whole), [weight for _, weight in whole]) for i in range(BINS))

    return Spectrum(
        name=name,
        modules=len(spectra),
        weights=sum(weights),
        matrix=any(one.matrix for one in spectra),
        norm=math.sqrt(math.fsum(by_update)),
        base_norm=math.sqrt(math.fsum(by_base)),
        stable_rank=statistics.fmean(one.stable_rank or 0.0 for one in changed) if changed else None,
        unchanged=mean((one.unchanged for one in spectra), weights),
        energy=sides(lambda s: s.energy, lambda values: mean(values, by_update)) if changed else None,
        chance=mean((one.chance for one in spectra), by_update if changed else weights),
        base_energy=mean((one.base_energy for one in spectra), by_base),
        angle=sides(lambda s: s.angle, max),
        shift=math.sqrt(mean((one.shift**2 for one in spectra), by_base)),
        left_bins=bins(lambda s: s.left_bins, by_update),
        right_bins=bins(lambda s: s.right_bins, by_update),
        base_bins=bins(lambda s: s.base_bins, by_base),
    )


def pool_by(spectra: Sequence[Spectrum], key: Callable[[str], str]) -> list[Spectrum]:
    """One for each value that ``key`` has of modules' names, in the order in which they come."""
    groups: dict[str, list[Spectrum]] = {}
    for one in spectra:
        groups.setdefault(key(one.name), []).append(one)
    return [pool(value, group) for value, group in groups.items()]


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Product one other^T in float64, some columns at a time; both (n, m) of any type."""
    total = torch.zeros(len(one), len(other), dtype=torch.float64, device=one.device)
    step = max(1, _BLOCK // len(one))
    for begin in range(0, one.shape[1], step):
        part = slice(begin, begin + step)
        total += one[:, part].double() @ other[:, part].double().T
    return total


def _descending(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def _largest_angle(cosines: torch.Tensor) -> float:
    return math.degrees(math.acos(min(1.0, float(torch.linalg.svdvals(cosines)[-1]))))


def _binned(energies: torch.Tensor, total: float) -> tuple[float, ...]:
    n = len(energies)
    if n < BINS or total <= 0:
        return ()
    places = torch.arange(n, device=energies.device) * BINS // n
    sums = torch.zeros(BINS, dtype=torch.float64, device=energies.device).index_add_(0, places, energies)
    return tuple((sums / total).tolist())
