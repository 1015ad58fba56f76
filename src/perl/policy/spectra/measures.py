"""What an update does to a weight matrix, as numbers: along the base's singular directions, its rank, what it rotates.

W0, Delta W -> Spectrum

All measures but one follow from three products with the smaller side n of W0: W0 W0^T, Delta W W0^T and
Delta W Delta W^T, (n, n) float64. The eigenvectors of the first are W0's singular vectors on that side, those of the
other side are W0^T u / sigma. Singular values are so known to 1e-8 of the largest one, which is below what float32
gives for the directions, in less time and memory than W0's own decomposition in float32 takes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from perl.methods.delta import LowRank

Update = LowRank | torch.Tensor
"""Delta W as factors, or as a matrix (out, in), or as a vector where W0 is one."""

BINS = 20
"""Parts of equal width that the singular directions are counted in, from the largest to the smallest."""
UNCHANGED = 1e-3
"""The eta of Zhu et al. 2025: below bfloat16's spacing, so that it means the same number after rounding."""
# Singular values below this share of the largest have no directions that float64 products could tell.
_NEGLIGIBLE = 1e-7
# Numbers of a matrix that are made float64 at once.
_BLOCK = 1 << 24


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
    """What training changed of one weight. Shares are between 0 and 1, angles in degrees.

    Attributes:
        name: Of the module in the base.
        shape: (out, in), or (n,) of a norm, which is taken as the diagonal matrix that it is.
        norm: ||Delta W||_F.
        base_norm: ||W0||_F.
        stable_rank: ||Delta W||_F^2 / ||Delta W||_2^2; None: there is no update.
        unchanged: Share of weights that are the same bfloat16 number after the update.
        directions: Of W0 that count as principal, k of n.
        sides: n, the number of singular directions.
        energy: Share of ||Delta W||_F^2 in the k principal directions; k/n for an update without a direction.
        base_energy: Share of ||W0||_F^2 in them.
        trend: Rank correlation of r_j = e_j / sigma_j^2 with j: 1 where the update's energy relative to W0's grows
            from direction to direction (off-principal), -1 where it falls.
        outside: Share of the energy on the longer side, outside of the space that W0's singular vectors span.
        nss: ||sigma(W+) - sigma(W0)||_2 / ||sigma(W0)||_2, the shift of the spectrum.
        angle: Largest principal angle between the k principal directions of W0 and those of W+.
        mean_angle: Mean of these k angles.
        left_bins: Share of the energy in each of :data:`BINS` parts of the directions, from the largest singular value
            on; left side.
        right_bins: The same of the right side.
        base_bins: The same of W0 itself.
    """

    name: str
    shape: tuple[int, ...]
    norm: float
    base_norm: float
    stable_rank: float | None
    unchanged: float
    directions: int
    sides: int
    energy: Sides | None
    base_energy: float
    trend: Sides | None
    outside: float | None
    nss: float
    angle: Sides
    mean_angle: Sides
    left_bins: tuple[float, ...]
    right_bins: tuple[float, ...]
    base_bins: tuple[float, ...]

    @property
    def numbers(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Products:
    """G = M M^T, K = D M^T, L = D D^T of W0 and its update with the shorter side first, (n, n) float64."""

    base: torch.Tensor
    mixed: torch.Tensor
    update: torch.Tensor
    stable_rank: float | None


@torch.no_grad()
def measure(name: str, weight: torch.Tensor, update: Update, principal: float = 0.1) -> Spectrum:
    """Measures one update.

    The energies and their ratio are those of the spectral analysis of PeRL (arXiv:2512.23165, its released
    ``analyze_delta_w_projection.py``: e_j = ||Delta W v_j||^2, f_j = ||u_j^T Delta W||^2, r_j = e_j / sigma_j^2, each
    normalised to a sum of 1). Unchanged weights, principal angles (cos theta_i = sigma_i(U0,k^T U+,k), of V likewise)
    and the shift of the spectrum are those of "The Path Not Taken" (Zhu et al. 2025, arXiv:2511.08567), the stable rank
    as in arXiv:2606.07082.

    Args:
        name: Of the module.
        weight: W0, (out, in) of any floating type, or (n,).
        update: Delta W.
        principal: Share of the singular directions that count as principal; at least one does.
    """
    unchanged = unchanged_share(weight, update)
    if weight.dim() == 1:
        return _of_diagonal(name, weight.double(), _dense(update).double(), unchanged, principal)
    wide = weight.shape[0] <= weight.shape[1]
    products = _products(weight if wide else weight.T, update if wide else transposed(update))
    squares, U = _descending(products.base)
    sigma = squares.clamp(min=0).sqrt()
    n = len(sigma)
    k = directions_of(n, principal)
    known = sigma > _NEGLIGIBLE * sigma[0]
    short = ((products.update @ U) * U).sum(0).clamp(min=0)
    long = torch.where(known, (products.mixed @ U).square().sum(0) / squares.clamp(min=1e-300), 0.0)
    norm2 = float(products.update.trace())
    left, right = (short, long) if wide else (long, short)
    after_squares, after_U = _descending(products.base + products.mixed + products.mixed.T + products.update)
    after = after_squares.clamp(min=0).sqrt()
    # <v_i, v+_j> = u_i^T W0 W+^T u+_j / (sigma_i sigma+_j)
    cosines = U[:, :k].T @ after_U[:, :k]
    scale = sigma[:k, None] * after[None, :k]
    across = (U[:, :k].T @ (products.base + products.mixed.T) @ after_U[:, :k]) / scale.clamp(min=1e-300)
    angles = [_angles(m) for m in ((cosines, across) if wide else (across, cosines))]
    none = norm2 <= 0
    return Spectrum(
        name=name,
        shape=tuple(weight.shape),
        norm=math.sqrt(max(norm2, 0.0)),
        base_norm=float(squares.clamp(min=0).sum().sqrt()),
        stable_rank=products.stable_rank,
        unchanged=unchanged,
        directions=k,
        sides=n,
        energy=None if none else Sides(float(left[:k].sum()) / norm2, float(right[:k].sum()) / norm2),
        base_energy=float(squares[:k].sum() / squares.sum()) if float(squares.sum()) > 0 else 0.0,
        trend=None if none else Sides(_trend(left[known], sigma[known]), _trend(right[known], sigma[known])),
        outside=None if none else max(0.0, 1.0 - float(long.sum()) / norm2),
        nss=float((after - sigma).norm() / sigma.norm()) if float(sigma.norm()) > 0 else 0.0,
        angle=Sides(*(float(found.max()) for found in angles)),
        mean_angle=Sides(*(float(found.mean()) for found in angles)),
        left_bins=_binned(left, norm2),
        right_bins=_binned(right, norm2),
        base_bins=_binned(squares.clamp(min=0), float(squares.sum())),
    )


@dataclass(frozen=True)
class PrincipalSpace:
    """The principal directions of W0 on its shorter side, from which those of the other side follow.

    Attributes:
        vectors: (n, k) float32.
        values: (k,) their singular values.
    """

    vectors: torch.Tensor
    values: torch.Tensor


@torch.no_grad()
def principal_space(weight: torch.Tensor, principal: float = 0.1) -> PrincipalSpace:
    """The first directions of a matrix.

    Args:
        weight: W0, (out, in).
        principal: As of :func:`measure`.
    """
    M = weight if weight.shape[0] <= weight.shape[1] else weight.T
    squares, vectors = _descending(gram(M, M))
    k = directions_of(len(squares), principal)
    return PrincipalSpace(vectors[:, :k].float(), squares[:k].clamp(min=0).sqrt().float())


@torch.no_grad()
def principal_energy(weight: torch.Tensor, update: Update, space: PrincipalSpace) -> Sides:
    """||.||_F^2 of an update in the principal directions of W0, without decomposing W0 again.

    Args:
        weight: W0, (out, in).
        update: Delta W, of any norm.
        space: As :func:`principal_space` gave it for this weight.
    """
    wide = weight.shape[0] <= weight.shape[1]
    M, D = (weight, update) if wide else (weight.T, transposed(update))
    short, scale = space.vectors.double(), space.values.double().clamp(min=1e-300)
    long = gram(M.T, short.T) / scale
    if isinstance(D, LowRank):
        P, S, Q = singular_triples(D)
        found = [float(((S[:, None] * (side.T @ axes)) ** 2).sum()) for side, axes in ((P, short), (Q, long))]
    else:
        found = [float(gram(D.T, short.T).square().sum()), float(gram(D, long.T).square().sum())]
    return Sides(*found) if wide else Sides(*reversed(found))


@torch.no_grad()
def norms_of(update: Update) -> tuple[float, float]:
    """||Delta W||_F^2 and ||Delta W||_2^2."""
    if isinstance(update, LowRank):
        _, S, _ = singular_triples(update)
        return float(S.square().sum()), float(S[0].square())
    if update.dim() == 1:
        squares = update.double().square()
        return float(squares.sum()), float(squares.max())
    D = update if update.shape[0] <= update.shape[1] else update.T
    product = gram(D, D)
    return float(product.trace()), float(torch.linalg.eigvalsh(product)[-1])


def directions_of(n: int, principal: float) -> int:
    """How many of n singular directions count as principal."""
    return max(1, min(n, round(principal * n)))


def unchanged_share(weight: torch.Tensor, update: Update) -> float:
    """Share of weights that stay the same in bfloat16: |w+ - w| <= eta max(|w|, |w+|) (Zhu et al. 2025).

    W0 + Delta W is added up in float64 and rounded once, as ``perl export --as merged --dtype bfloat16`` does.
    """
    same = 0
    for rows in _row_blocks(weight):
        old = weight[rows].double()
        w, new = old.bfloat16().double(), (old + _rows_of(update, rows)).bfloat16().double()
        same += int(((new - w).abs() <= UNCHANGED * torch.maximum(w.abs(), new.abs())).sum())
    return same / weight.numel()


def singular_triples(update: LowRank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P (out, rank), S (rank,), Q (in, rank) with Delta W = P diag(S) Q^T, from the factors alone, float64."""
    Q_B, left = torch.linalg.qr(update.B_OR.double())
    Q_A, right = torch.linalg.qr(update.A_RI.double().T)
    U, S, V = torch.linalg.svd(left @ right.T, full_matrices=False)
    return Q_B @ U, S, Q_A @ V.T


def transposed(update: Update) -> Update:
    """The update of the transposed matrix."""
    if isinstance(update, LowRank):
        return LowRank(update.B_OR.T, update.A_RI.T, update.error)
    return update.T


def gram(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Product one other^T in float64, some columns at a time; both (n, m) of any type."""
    total = torch.zeros(one.shape[0], other.shape[0], dtype=torch.float64, device=one.device)
    step = max(1, _BLOCK // max(one.shape[0], other.shape[0]))
    for begin in range(0, one.shape[1], step):
        part = slice(begin, begin + step)
        total += one[:, part].double() @ other[:, part].double().T
    return total


def _products(M: torch.Tensor, update: Update) -> _Products:
    """M and the update (n, m) with n <= m."""
    base = gram(M, M)
    if isinstance(update, LowRank):
        P, S, Q = singular_triples(update)
        mixed = (P * S) @ gram(M, Q.T).T
        product = (P * S.square()) @ P.T
        largest = float(S[0].square())
        norm2 = float(S.square().sum())
    else:
        mixed, product = gram(update, M), gram(update, update)
        largest = float(torch.linalg.eigvalsh(product)[-1])
        norm2 = float(product.trace())
    return _Products(base, mixed, product, norm2 / largest if largest > 0 else None)


def _of_diagonal(name: str, w: torch.Tensor, delta: torch.Tensor, unchanged: float, principal: float) -> Spectrum:
    """As :func:`measure`, of diag(w): its singular directions are the channels, largest |w| first."""
    n = len(w)
    k = directions_of(n, principal)
    order, after = w.abs().argsort(descending=True, stable=True), (w + delta).abs()
    sigma, energy = w.abs()[order], delta.square()[order]
    norm2 = float(energy.sum())
    kept = set(order[:k].tolist()) & set(after.argsort(descending=True, stable=True)[:k].tolist())
    angle = Sides(*(2 * (0.0 if len(kept) == k else 90.0,)))
    mean = Sides(*(2 * (90.0 * (1 - len(kept) / k),)))
    share, bins = float(energy[:k].sum()) / norm2 if norm2 > 0 else 0.0, _binned(energy, norm2)
    known = sigma > _NEGLIGIBLE * sigma[0]
    trend = _trend(energy[known], sigma[known])
    total = float(sigma.square().sum())
    return Spectrum(
        name=name,
        shape=(n,),
        norm=math.sqrt(norm2),
        base_norm=math.sqrt(total),
        stable_rank=norm2 / float(energy.max()) if norm2 > 0 else None,
        unchanged=unchanged,
        directions=k,
        sides=n,
        energy=Sides(share, share) if norm2 > 0 else None,
        base_energy=float(sigma[:k].square().sum()) / total if total > 0 else 0.0,
        trend=Sides(trend, trend) if norm2 > 0 else None,
        outside=0.0 if norm2 > 0 else None,
        nss=float((after.sort(descending=True).values - sigma).norm()) / math.sqrt(total) if total > 0 else 0.0,
        angle=angle,
        mean_angle=mean,
        left_bins=bins,
        right_bins=bins,
        base_bins=_binned(sigma.square(), total),
    )


def _descending(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(0), vectors.flip(1)


def _angles(cosines: torch.Tensor) -> torch.Tensor:
    return torch.rad2deg(torch.arccos(torch.linalg.svdvals(cosines).clamp(0.0, 1.0)))


def _trend(energy: torch.Tensor, sigma: torch.Tensor) -> float:
    """Spearman's correlation of r_j with j."""
    if len(energy) < 2:
        return 0.0
    ranks = (energy / sigma.square()).argsort(stable=True).argsort().double()
    places = torch.arange(len(ranks), dtype=torch.float64, device=ranks.device)
    ranks, places = ranks - ranks.mean(), places - places.mean()
    return float((ranks * places).sum() / (ranks.norm() * places.norm()))


def _binned(values: torch.Tensor, total: float) -> tuple[float, ...]:
    n = len(values)
    bins = min(BINS, n)
    places = torch.arange(n, device=values.device) * bins // n
    sums = torch.zeros(bins, dtype=torch.float64, device=values.device).index_add_(0, places, values.double())
    return tuple((sums / total).tolist()) if total > 0 else (0.0,) * bins


def _row_blocks(weight: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(1, weight[0].numel()))
    return (slice(begin, begin + rows) for begin in range(0, len(weight), rows))


def _rows_of(update: Update, rows: slice) -> torch.Tensor:
    if isinstance(update, LowRank):
        return update.B_OR[rows].double() @ update.A_RI.double()
    return update[rows].double()


def _dense(update: Update) -> torch.Tensor:
    return update.B_OR @ update.A_RI if isinstance(update, LowRank) else update
