"""The picture of ``scaling.py``: seconds of a sync and of a step, and the sync's share, against GPUs.

measured, derived -> PNG
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaling_model import MOST_SHARE, TRANSPORTS

COLOURS = {
    "nfs_by_server": "#a8324a",
    "nfs_by_node": "#b3541e",
    "parallel_fs": "#7a4a8c",
    "http": "#35618f",
    "ray": "#2f7d5b",
}
_SERVED = 7 / 8


def draw(measured: Mapping[str, Any], derived: Mapping[str, Any], path: Path) -> None:
    """Draws it.

    Args:
        measured: Rows of pools.
        derived: Syncs and steps.
        path: Of the PNG.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (syncs, steps, shares) = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained")
    _syncs(syncs, measured, derived)
    _steps(steps, derived)
    _shares(shares, derived)
    gpus = sorted({row["gpus"] for row in derived["syncs"]})
    for axes in (syncs, steps, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _seconds(axes: Any, title: str) -> None:  # noqa: ANN401 (matplotlib's)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_ylabel("seconds")
    axes.set_title(title, fontsize=10)


def _syncs(axes: Any, measured: Mapping[str, Any], derived: Mapping[str, Any]) -> None:  # noqa: ANN401
    sizes = sorted({row["bytes"] for row in derived["syncs"]})
    for name, transport in TRANSPORTS.items():
        for size, style in zip(sizes, (":", "-"), strict=True):
            rows = [row for row in derived["syncs"] if row["transport"] == name and row["bytes"] == size]
            label = transport.label if size == sizes[-1] else None
            line = [row["gpus"] for row in rows], [row["seconds"] for row in rows]
            axes.plot(*line, style, color=COLOURS[name], label=label)
    for size, marker in zip(sizes, ("o", "s"), strict=True):
        found = [row for row in measured["pool"] if str(size) in row["syncs"] and row["servers"] >= 7]
        dots = [row["servers"] / _SERVED for row in found], [row["syncs"][str(size)]["seconds"] for row in found]
        label = f"measured: {size / 1e6:.0f} MB, fake servers on one machine"
        axes.plot(*dots, marker, color="black", markersize=5, label=label, fillstyle="none")
    _seconds(axes, f"a sync: lines derived\n{sizes[1] / 1e6:.0f} MB, dotted {sizes[0] / 1e6:.0f} MB")
    axes.set_ylim(top=3000)


def _steps(axes: Any, derived: Mapping[str, Any]) -> None:  # noqa: ANN401
    own = int(derived["adapter_bytes"])
    for series in derived["steps"]:
        if series["bytes"] != own or series["ahead"] or series["transport"] not in ("ray", "nfs_by_server"):
            continue
        rows = series["rows"]
        gpus, step = [row["gpus"] for row in rows], [row["step"] for row in rows]
        large = series["prompts"] == max(one["prompts"] for one in derived["steps"])
        label = f"{series['prompts']:,} prompts x 8, {TRANSPORTS[series['transport']].label}"
        axes.plot(gpus, step, "-" if large else "--", color=COLOURS[series["transport"]], label=label)
        knee = series["halving_knee"]
        if series["transport"] == "ray":
            low, high = zip(*(row["range"] for row in rows), strict=True)
            axes.fill_between(gpus, low, high, color=COLOURS["ray"], alpha=0.08, linewidth=0)
            axes.plot(gpus, [step[0] * gpus[0] / count for count in gpus], ":", color="grey", linewidth=1)
            if knee is not None:
                at = dict(zip(gpus, step, strict=True))[knee]
                axes.plot([knee], [at], "o", color=COLOURS["ray"], markersize=7)
                axes.annotate(f"knee: {knee}", (knee, at), textcoords="offset points", xytext=(6, 8), fontsize=8)
    _seconds(axes, "a step of 7B: derived, middle and range\ndotted: half as long on twice as many")
    axes.set_ylim(bottom=8)


def _shares(axes: Any, derived: Mapping[str, Any]) -> None:  # noqa: ANN401
    largest = max(series["prompts"] for series in derived["steps"])
    sizes = sorted({series["bytes"] for series in derived["steps"]})
    for series in derived["steps"]:
        if series["prompts"] != largest or series["ahead"] or series["bytes"] == sizes[1]:
            continue
        rows, large = series["rows"], series["bytes"] == sizes[-1]
        line = [row["gpus"] for row in rows], [100 * row["sync_share"] for row in rows]
        label = TRANSPORTS[series["transport"]].label if large else None
        axes.plot(*line, "-" if large else ":", color=COLOURS[series["transport"]], label=label)
    axes.axhline(100 * MOST_SHARE, color="grey", linewidth=1)
    axes.set_ylabel("% of a step")
    title = f"the sync's share of a step of 7B, {largest:,} prompts x 8: derived"
    axes.set_title(f"{title}\n{sizes[-1] / 1e6:.0f} MB, dotted {sizes[0] / 1e6:.0f} MB", fontsize=10)
