"""Two updates of the same weight, compared: their cosine and the principal angles between the spaces that they span.

Delta W 1, Delta W 2 -> Agreement
"""

import math
from dataclasses import dataclass

import torch

from perl.methods.delta import LowRank
from perl.policy.spectra.measures import Sides, Update, gram, singular_triples, transposed

MOST_DIRECTIONS = 16
"""Of each update that are compared, those with the largest singular values."""
# Singular values of an update below this share of its largest are rounding of float32 factors.
_NEGLIGIBLE = 1e-5


@dataclass(frozen=True)
class Agreement:
    """How far two updates of a module are the same.

    Attributes:
        name: Of the module.
        cosine: <Delta W 1, Delta W 2> / (||.||_F ||.||_F); None, as all below: one of them is zero.
        directions: k, singular directions of each that are compared: of the lower rank, at most
            :data:`MOST_DIRECTIONS`.
        overlap: Mean of cos^2 of the principal angles, on each side: 1 for the same space.
        chance: The same of random spaces: k over the size of the side.
        left_angles: Principal angles between the column spaces, in degrees, smallest first.
        right_angles: Those between the row spaces.
    """

    name: str
    cosine: float | None
    directions: int
    overlap: Sides | None
    chance: Sides | None
    left_angles: tuple[float, ...]
    right_angles: tuple[float, ...]


@torch.no_grad()
def compare_updates(name: str, one: Update, other: Update) -> Agreement:
    """Compares two updates of one weight.

    The angles are those of Bjorck and Golub 1973, cos theta_i = sigma_i(Q1^T Q2); their mean cos^2 is the subspace
    similarity of LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 4, with i = j = k).

    Args:
        name: Of the module.
        one: An update.
        other: Another one of the same shape.
    """
    first, second = (_leading(update) for update in (one, other))
    norms = [math.sqrt(max(0.0, _inner(update, update))) for update in (one, other)]
    k = min(len(first[1]), len(second[1]), MOST_DIRECTIONS)
    if not all(norms) or k == 0:
        return Agreement(name, None, 0, None, None, (), ())
    cosines = [
        torch.linalg.svdvals(a[:, :k].T @ b[:, :k]).clamp(0.0, 1.0)
        for a, b in zip(first[::2], second[::2], strict=True)
    ]
    left, right = (tuple(torch.rad2deg(torch.arccos(found)).tolist()) for found in cosines)
    sizes = (len(first[0]), len(first[2]))
    return Agreement(
        name,
        _inner(one, other) / (norms[0] * norms[1]),
        k,
        Sides(*(float(found.square().mean()) for found in cosines)),
        Sides(*(k / size for size in sizes)),
        left,
        right,
    )


def _leading(update: Update) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first singular triples: P (out, k), S (k,), Q (in, k) float64, without those that are rounding."""
    if isinstance(update, LowRank):
        P, S, Q = singular_triples(update)
    elif update.dim() == 1:
        order = update.abs().argsort(descending=True, stable=True)[:MOST_DIRECTIONS]
        P = torch.zeros(len(update), len(order), dtype=torch.float64, device=update.device)
        P[order, torch.arange(len(order), device=update.device)] = 1.0
        S, Q = update.abs()[order].double(), P
    elif update.shape[0] > update.shape[1]:
        Q, S, P = _leading(transposed(update))
    else:
        squares, vectors = torch.linalg.eigh(gram(update, update))
        P, S = vectors.flip(1)[:, :MOST_DIRECTIONS], squares.flip(0)[:MOST_DIRECTIONS].clamp(min=0).sqrt()
        Q = gram(P.T, update.T).T / S.clamp(min=1e-300)
    kept = (_NEGLIGIBLE * S[0] < S)[:MOST_DIRECTIONS] if len(S) else S.bool()
    return P[:, : len(kept)][:, kept], S[: len(kept)][kept], Q[:, : len(kept)][:, kept]


def _inner(one: Update, other: Update) -> float:
    """Sum of the products of their numbers, from the factors where there are some."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        B = one.B_OR.double().T @ other.B_OR.double()
        return float((B * (one.A_RI.double() @ other.A_RI.double().T)).sum())
    if isinstance(one, LowRank):
        one, other = other, one
    assert isinstance(one, torch.Tensor)  # noqa: S101 (for the type checker)
    if isinstance(other, LowRank):
        return float((gram(one, other.A_RI) * other.B_OR.double()).sum())
    return float(sum((a.double() * b.double()).sum() for a, b in zip(one.split(1024), other.split(1024), strict=True)))
