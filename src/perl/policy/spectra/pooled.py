"""Spectra of many modules as one line: of all, of each kind of module, of each layer.

Spectra -> Pooled
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perl.policy.spectra.measures import BINS, Sides, Spectrum

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Pooled:
    """Several updates together. Norms and energies are those of one update that has all of them as blocks.

    Attributes:
        name: Of the kind or layer.
        modules: How many.
        numbers: Weights of these modules.
        size: ||Delta W||_F / ||W0||_F.
        stable_rank: Mean over the modules that were changed; None: there is none.
        unchanged: Share of the weights that are the same bfloat16 number.
        energy: Share of ||Delta W||_F^2 in the principal directions; None: there is no update.
        base_energy: Share of ||W0||_F^2 in them.
        chance: What ``energy`` would be for an update without a direction.
        trend: Mean rank correlation of r_j with j over the changed modules.
        nss: ||sigma(W+) - sigma(W0)||_2 / ||sigma(W0)||_2 over all.
        angle: Largest principal angle of any module, in degrees.
        mean_angle: Mean over modules of their mean angle.
        left_bins: As of :class:`perl.policy.spectra.measures.Spectrum`; of modules with fewer directions than bins no
            part is taken.
        right_bins: Likewise.
        base_bins: Likewise.
    """

    name: str
    modules: int
    numbers: int
    size: float
    stable_rank: float | None
    unchanged: float
    energy: Sides | None
    base_energy: float
    chance: float
    trend: Sides | None
    nss: float
    angle: Sides
    mean_angle: Sides
    left_bins: tuple[float, ...]
    right_bins: tuple[float, ...]
    base_bins: tuple[float, ...]


def kind_of(name: str) -> str:
    """What kind of module it is: the last part of its name."""
    return name.rpartition(".")[2]


def layer_of(name: str) -> int | None:
    """The number of the layer that a module is in; None: it is in none, as an output head."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def pooled_by(spectra: Sequence[Spectrum], key: Callable[[str], object]) -> list[Pooled]:
    """A line for each value that ``key`` has of modules' names, in the order in which they come."""
    groups: dict[object, list[Spectrum]] = {}
    for one in spectra:
        groups.setdefault(key(one.name), []).append(one)
    return [pool("-" if value is None else str(value), group) for value, group in groups.items()]


def pool(name: str, spectra: Sequence[Spectrum]) -> Pooled:
    """Pools some modules.

    Args:
        name: Of the group.
        spectra: At least one.
    """
    changed = [one for one in spectra if one.energy is not None]
    update2 = math.fsum(one.norm**2 for one in spectra)
    base2 = math.fsum(one.base_norm**2 for one in spectra)
    numbers = sum(one.numbers for one in spectra)

    def by_energy(value: Callable[[Spectrum], float]) -> float:
        return math.fsum(value(one) * one.norm**2 for one in changed) / update2

    def by_base(value: Callable[[Spectrum], float]) -> float:
        return math.fsum(value(one) * one.base_norm**2 for one in spectra) / base2 if base2 else 0.0

    def sides(value: Callable[[Spectrum, str], float], mean: Callable[[list[float]], float]) -> Sides:
        return Sides(*(mean([value(one, side) for one in spectra]) for side in ("left", "right")))

    whole = [one for one in spectra if len(one.base_bins) == BINS]
    return Pooled(
        name=name,
        modules=len(spectra),
        numbers=numbers,
        size=math.sqrt(update2 / base2) if base2 else 0.0,
        stable_rank=statistics.fmean(one.stable_rank or 0.0 for one in changed) if changed else None,
        unchanged=math.fsum(one.unchanged * one.numbers for one in spectra) / numbers,
        energy=Sides(by_energy(lambda s: _side(s.energy, "left")), by_energy(lambda s: _side(s.energy, "right")))
        if changed
        else None,
        base_energy=by_base(lambda s: s.base_energy),
        chance=by_energy(lambda s: s.directions / s.sides) if changed else spectra[0].directions / spectra[0].sides,
        trend=Sides(*(statistics.fmean(_side(s.trend, side) for s in changed) for side in ("left", "right")))
        if changed
        else None,
        nss=math.sqrt(by_base(lambda s: s.nss**2)),
        angle=sides(lambda s, side: _side(s.angle, side), max),
        mean_angle=sides(lambda s, side: _side(s.mean_angle, side), statistics.fmean),
        left_bins=_bins([(s.left_bins, s.norm**2) for s in whole]),
        right_bins=_bins([(s.right_bins, s.norm**2) for s in whole]),
        base_bins=_bins([(s.base_bins, s.base_norm**2) for s in whole]),
    )


def _side(sides: Sides | None, side: str) -> float:
    return float(getattr(sides, side)) if sides is not None else 0.0


def _bins(weighted: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    total = math.fsum(weight for _, weight in weighted)
    if not total:
        return ()
    return tuple(math.fsum(bins[i] * weight for bins, weight in weighted) / total for i in range(BINS))
