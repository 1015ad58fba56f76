"""Pictures of a spectrum: where each layer's energy is along the base's directions, and every module as a cell.

FoundSpectra -> energy.png, modules.png, against.png
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perl.evaluation.pictures import new_figure, save_figure
from perl.policy.spectra.against import Agreement
from perl.policy.spectra.measures import BINS, Spectrum
from perl.policy.spectra.pooled import kind_of, layer_of
from perl.reports.spectra_found import FoundSpectra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_INK, _GREY, _BASE = "#333333", "#8a929a", "#c8641e"
# Cells that still have room for their numbers.
_MOST_CELLS = 120
# Energies below this share of what chance would have are drawn as this.
_FLOOR = 1e-4


@dataclass(frozen=True)
class Panel:
    """A heat map.

    Attributes:
        title: Over it.
        form: Of the number in a cell.
        values: Module -> its value.
        limits: Of the colours; None: those of the values.
    """

    title: str
    form: str
    values: Mapping[str, float]
    limits: tuple[float, float] | None = None


def draw_spectra(report: FoundSpectra, folder: Path) -> list[Path]:
    """Draws what there is to draw.

    Args:
        report: What was found.
        folder: Where the pictures go.

    Returns:
        Their files: ``energy.png``, ``modules.png``, and where something was compared ``against.png``.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    title = f"{report.adapter} ({report.method}) on {report.base}"
    made = [_draw_energy(report, folder / "energy.png", title)]
    made.append(_draw_panels(_spectrum_panels(report), folder / "modules.png", title))
    if report.against is not None:
        made.append(
            _draw_panels(
                _against_panels(report.agreements), folder / "against.png", f"{title}\nagainst {report.against}"
            )
        )
    return made


def _draw_energy(report: FoundSpectra, file: Path, title: str) -> Path:
    figure = new_figure(11.0, 4.4, "drawing a spectrum")
    figure.suptitle(title, color=_INK, fontsize=12, parse_math=False)
    layers = [row for row in report.rows("layer") if row.left_bins]
    sides: Sequence[tuple[str, Callable[[object], tuple[float, ...]]]] = (
        ("Outputs: left singular directions", lambda row: row.left_bins),  # type: ignore[attr-defined]
        ("Inputs: right singular directions", lambda row: row.right_bins),  # type: ignore[attr-defined]
    )
    for index, (name, bins_of) in enumerate(sides):
        axes = figure.add_subplot(1, 2, index + 1)
        for place, row in enumerate(layers):
            colour = _of_depth(place / max(1, len(layers) - 1))
            label = f"layer {row.name}" if place in (0, len(layers) - 1) and row.name != "-" else None
            axes.plot(_middles(), _relative(bins_of(row)), color=colour, linewidth=1.4, label=label)
        pooled = report.pooled
        if pooled.base_bins:
            axes.plot(
                _middles(), _relative(pooled.base_bins), color=_BASE, linewidth=2, linestyle="--", label="W itself"
            )
        axes.axhline(1.0, color=_GREY, linewidth=1, label="no direction preferred")
        _decorate(axes, name)
        if index == 0:
            axes.legend(fontsize=8, frameon=False)
            axes.set_ylabel("energy of the update, relative to chance", fontsize=8)
    return save_figure(figure, file, dpi=110)


def _decorate(axes: "Axes", name: str) -> None:
    axes.set_title(name, loc="left", color=_INK, fontsize=10)
    axes.set_xlabel("singular directions of W, largest first (%)", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlim(0, 100)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _middles() -> list[float]:
    return [100 * (i + 0.5) / BINS for i in range(BINS)]


def _relative(bins: Sequence[float]) -> list[float]:
    return [max(_FLOOR, share * BINS) for share in bins]


def _of_depth(share: float) -> str:
    """From light to dark blue, first layer to last."""
    light, dark = (176, 208, 238), (14, 42, 92)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))


def _spectrum_panels(report: FoundSpectra) -> list[Panel]:
    modules = report.modules
    share = f"first {100 * report.principal:g} %"

    def values(of: Callable[[Spectrum], float | None]) -> dict[str, float]:
        return {one.name: value for one in modules if (value := of(one)) is not None}

    return [
        Panel("Stable rank of the update", "{:.1f}", values(lambda s: s.stable_rank)),
        Panel("Unchanged in bfloat16 (%)", "{:.0f}", values(lambda s: 100 * s.unchanged), (0, 100)),
        Panel(
            f"Energy in the {share}, outputs (%)",
            "{:.0f}",
            values(lambda s: 100 * s.energy.left if s.energy else None),
            (0, 100),
        ),
        Panel(
            f"Energy in the {share}, inputs (%)",
            "{:.0f}",
            values(lambda s: 100 * s.energy.right if s.energy else None),
            (0, 100),
        ),
    ]


def _against_panels(agreements: Sequence[Agreement]) -> list[Panel]:
    known = [one for one in agreements if one.overlap is not None and one.cosine is not None]
    return [
        Panel("Cosine of the updates", "{:+.2f}", {one.name: one.cosine or 0.0 for one in known}, (-1, 1)),
        Panel(
            "Overlap, outputs (%)",
            "{:.0f}",
            {one.name: 100 * one.overlap.left for one in known if one.overlap},
            (0, 100),
        ),
        Panel(
            "Overlap, inputs (%)",
            "{:.0f}",
            {one.name: 100 * one.overlap.right for one in known if one.overlap},
            (0, 100),
        ),
        Panel(
            "Nearest principal angle (degrees)",
            "{:.0f}",
            {one.name: min((*one.left_angles, *one.right_angles)) for one in known},
            (0, 90),
        ),
    ]


def _draw_panels(panels: Sequence[Panel], file: Path, title: str) -> Path:
    names = [name for panel in panels for name in panel.values]
    layers = sorted({layer_of(name) for name in names}, key=lambda n: (n is None, n or 0))
    kinds = list(dict.fromkeys(kind_of(name) for name in names))
    # All panels in two columns, cells of one size.
    width, height = 1.9 + 0.55 * max(3, len(kinds)), 1.4 + 0.3 * max(3, len(layers))
    lines = math.ceil(len(panels) / 2)
    figure = new_figure(2 * width, lines * height + 0.6, "drawing a spectrum")
    figure.suptitle(title, color=_INK, fontsize=12, parse_math=False)
    for index, panel in enumerate(panels):
        _draw_panel(figure, figure.add_subplot(lines, 2, index + 1), panel, layers, kinds)
    return save_figure(figure, file, dpi=110)


def _draw_panel(
    figure: "Figure", axes: "Axes", panel: Panel, layers: Sequence[int | None], kinds: Sequence[str]
) -> None:
    cells = [[math.nan] * len(kinds) for _ in layers]
    counts: dict[tuple[int, int], int] = {}
    for name, value in panel.values.items():
        place = layers.index(layer_of(name)), kinds.index(kind_of(name))
        n = counts[place] = counts.get(place, 0) + 1  # experts of a layer: their mean
        before = 0.0 if n == 1 else cells[place[0]][place[1]]
        cells[place[0]][place[1]] = before + (value - before) / n
    limits = panel.limits or _limits(panel.values.values())
    diverging = limits[0] < 0
    image = axes.imshow(cells, cmap="RdBu_r" if diverging else "Blues", vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set_title(panel.title, loc="left", color=_INK, fontsize=10)
    axes.set_xticks(range(len(kinds)), kinds, rotation=45, ha="right", fontsize=7)
    step = max(1, len(layers) // 16)
    shown = list(range(0, len(layers), step))
    axes.set_yticks(shown, ["-" if layers[i] is None else f"layer {layers[i]}" for i in shown], fontsize=7)
    axes.spines[:].set_visible(False)
    if len(layers) * len(kinds) <= _MOST_CELLS:
        low, high = limits
        for row, line in enumerate(cells):
            for column, value in enumerate(line):
                if not math.isnan(value):
                    depth = abs(2 * (value - low) / (high - low) - 1) if diverging else (value - low) / (high - low)
                    colour = "white" if depth > 0.6 else _INK
                    axes.text(column, row, panel.form.format(value), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)


def _limits(values: object) -> tuple[float, float]:
    numbers = [float(value) for value in values]  # type: ignore[attr-defined]
    high = max(numbers, default=1.0)
    return (min(1.0, min(numbers, default=0.0)), high if high > 1.0 else 2.0)
