"""What a training changed of each weight matrix: ``perl.spectrum``, its table and its picture.

adapter or run, base -> SpectrumReport -> text, spectrum.json, spectrum.png
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from perl.errors import ModelError, PerlError, RecipeError, warn
from perl.evaluation.drawing.subject import Subject, find_subject
from perl.evaluation.scoring.figure import new_figure, save_figure
from perl.policy.attach import continue_adapter, own_method
from perl.policy.model import load_base, public_name
from perl.policy.spectrum import (
    BINS,
    Spectrum,
    Update,
    measure,
    pool,
    pool_by,
    updates_of_adapter,
    updates_of_model,
)
from perl.run.devices import accelerator
from perl.run.files import named, write_text
from perl.run.progress import progress
from perl.run.tables import percent, plain, plain_table

By = Literal["kind", "layer", "module"]

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
# Modules that an error, or a line, lists.
_MOST_NAMED = 6
_COLUMNS = (
    *("", "modules", "size", "stable rank", "unchanged", "energy out", "in", "chance", "base"),
    *("angle out", "in", "shift"),
)
_INK, _GREY, _BASE = "#333333", "#8a929a", "#c8641e"
# Energies below this share of what chance would have are drawn as this.
_FLOOR = 1e-4


def kind_of(name: str) -> str:
    """What kind of module it is: the last part of its name."""
    return name.rpartition(".")[2]


def layer_of(name: str) -> str:
    """The number of the layer that a module is in; a dash where it is in none, as an output head."""
    found = _LAYER.search(name)
    return found[1] if found else "-"


_KEYS: dict[By, Callable[[str], str]] = {"kind": kind_of, "layer": layer_of, "module": str}


@dataclass(frozen=True)
class SpectrumReport:
    """What was found.

    Attributes:
        adapter: What was read, by the name that results call it.
        method: As in ``peft.method``, as far as the files tell.
        base: The base's public name.
        principal: Share of the singular directions that count as principal.
        modules: A spectrum each, in the model's order.
        left_out: What was trained and is no matrix of a module.
    """

    adapter: str
    method: str
    base: str
    principal: float
    modules: tuple[Spectrum, ...]
    left_out: tuple[str, ...] = ()

    @property
    def pooled(self) -> Spectrum:
        """All matrices together; the norms' vectors only where there is nothing else."""
        return pool("all", self._matrices)

    def rows(self, by: By = "kind") -> list[Spectrum]:
        """One for each kind of module, each layer, or each module."""
        return pool_by(self._matrices if by == "layer" else self.modules, _KEYS[by])

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as plain values for JSON."""
        return {
            **{"version": 1, "adapter": self.adapter, "method": self.method, "base": self.base},
            **{"principal": self.principal, "left_out": list(self.left_out), "pooled": _values(self.pooled)},
            **{f"{by}s": [_values(row) for row in self.rows(by)] for by in _KEYS},
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Writes ``spectrum.json`` and ``spectrum.png`` into a folder, which is made if it is absent.

        Raises:
            OSError: It cannot be written.
            MissingExtraError: matplotlib is not installed; the numbers are written then.
        """
        place = Path(folder)
        with named(place):
            place.mkdir(parents=True, exist_ok=True)
        write_text(place / "spectrum.json", json.dumps(self.to_dict(), indent=2) + "\n")
        return [place / "spectrum.json", _draw(self, place / "spectrum.png")]

    def text(self, by: By = "kind") -> str:
        """A table with a row for each kind, layer or module and one for all."""
        share, rows = f"{100 * self.principal:g} %", self.rows(by)
        heading = (
            f"{plain(self.adapter)} ({plain(self.method)}) on {plain(self.base)}: {len(self.modules)} modules, "
            f"{sum(one.weights for one in self.modules):,} weights; energy in the first {share} of W's directions"
        )
        shown = [_COLUMNS, *map(_row, rows), *([_row(self.pooled)] if len(rows) > 1 else [])]
        lines = [heading, *plain_table(shown)]
        if self.left_out:
            lines.append(f"left out: {_some(self.left_out)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """The table by kind of module."""
        return self.text()

    @property
    def _matrices(self) -> list[Spectrum]:
        return [one for one in self.modules if one.matrix] or list(self.modules)


def spectrum(
    adapter: str | Path,
    *,
    base: str | None = None,
    modules: str | None = None,
    principal: float = 0.1,
) -> SpectrumReport:
    """Measures what a training changed of each weight matrix.

    Args:
        adapter: A run folder, a checkpoint or an adapter's folder, a Hub id with an optional ``@revision``, or
            ``zoo:NAME``; a run of method ``full`` too.
        base: Hub id or folder; None: the one that the adapter names.
        modules: Regular expression that modules' names must hold; None: all that were changed.
        principal: Share of the singular directions that count as principal, above 0 and below 1.

    Raises:
        PerlError: There is no such adapter or base, they do not fit each other, or the adapter changes no weights.
    """
    if not 0 < principal < 1:
        raise RecipeError(f"must be above 0 and below 1, not {principal:g}", "--principal", "0.1: the first tenth")
    try:
        chosen = re.compile(modules or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise RecipeError(f"{modules!r} is not a regular expression: {error}", "--modules") from None
    subject = find_subject(str(adapter), base)
    if not subject.trained:
        raise ModelError(f"{adapter} is a base, which nothing has changed")
    if subject.adapter is not None and subject.adapter.base_quantization is not None:
        where = f"{subject.name} was trained on a base quantised to {subject.adapter.base_quantization}"
        warn("PRL302", "%s; its update is measured against the ordinary base", where)
    subject = replace(subject, base=subject.base.model_copy(update={"quantization": None}))
    name = public_name(subject.base.name, None)[0]
    try:
        updates, left_out = _updates(subject)
    except PerlError as error:
        raise error.moved(lambda where: "" if where == "peft.adapter" else where) from error
    names = [one for one in updates if chosen.search(one)]
    if not names:
        hint = f"there are: {_some(sorted({kind_of(one) for one in updates}))}; as {next(iter(updates))}"
        raise RecipeError(f"{modules!r} fits no changed module", "--modules", hint)
    spectra = list[Spectrum]()
    with progress(len(names), "decomposing", unit="modules") as state:
        for one in names:
            spectra.append(measure(one, *updates[one](), principal))
            state.update()
    method = "full" if subject.adapter is None else own_method(subject.adapter).name
    return SpectrumReport(subject.name, method, name, principal, tuple(spectra), tuple(left_out))


def _updates(subject: Subject) -> tuple[dict[str, Update], list[str]]:
    device = accelerator() or torch.device("cpu")
    base = load_base(subject.base, device)
    if subject.adapter is not None:
        found, left_out = updates_of_adapter(continue_adapter(base, subject.adapter).eval())
        if not found:
            raise ModelError(f"{subject.name} changes no weight of a module of its base")
        return found, left_out
    assert subject.model is not None  # noqa: S101 (one of the two is there)
    return updates_of_model(base, load_base(subject.model, device)), []


def _values(one: Spectrum) -> dict[str, Any]:
    return {**asdict(one), "size": one.size}


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(plain, names[:_MOST_NAMED])) + (", ..." if len(names) > _MOST_NAMED else "")


def _row(row: Spectrum) -> tuple[str, ...]:
    energy = ("-", "-") if row.energy is None else (percent(row.energy.left), percent(row.energy.right))
    return (
        row.name,
        str(row.modules),
        f"{row.size:.1e}",
        "-" if row.stable_rank is None else f"{row.stable_rank:.2f}",
        percent(row.unchanged),
        *energy,
        percent(row.chance),
        percent(row.base_energy),
        *(f"{angle:.2f}" for angle in (row.angle.left, row.angle.right)),
        f"{row.shift:.1e}",
    )


def _draw(report: SpectrumReport, file: Path) -> Path:
    """Where each layer's energy is along the base's directions, on both sides."""
    figure = new_figure(11.0, 4.4, "drawing a spectrum")
    title = f"{report.adapter} ({report.method}) on {report.base}"
    figure.suptitle(title, color=_INK, fontsize=12, parse_math=False)
    layers = [row for row in report.rows("layer") if row.left_bins]
    middles = [100 * (i + 0.5) / BINS for i in range(BINS)]
    for index, name in enumerate(("Outputs: left singular directions", "Inputs: right singular directions")):
        axes = figure.add_subplot(1, 2, index + 1)
        for place, row in enumerate(layers):
            label = f"layer {row.name}" if place in (0, len(layers) - 1) and row.name != "-" else None
            shares = _relative(row.right_bins if index else row.left_bins)
            ink = (0.05, 0.17, 0.36, 0.3 + 0.7 * (place + 1) / len(layers))  # the first layer the lightest
            axes.plot(middles, shares, color=ink, linewidth=1.4, label=label)
        if base := report.pooled.base_bins:
            axes.plot(middles, _relative(base), color=_BASE, linewidth=2, linestyle="--", label="W itself")
        axes.axhline(1.0, color=_GREY, linewidth=1, label="no direction preferred")
        axes.set_title(name, loc="left", color=_INK, fontsize=10)
        axes.set_xlabel("singular directions of W, largest first (%)", fontsize=8)
        axes.set_yscale("log")
        axes.set_xlim(0, 100)
        axes.tick_params(labelsize=8)
        axes.grid(color="#e8e8e8", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if index == 0:
            axes.legend(fontsize=8, frameon=False)
            axes.set_ylabel("energy of the update, relative to chance", fontsize=8)
    return save_figure(figure, file, dpi=110)


def _relative(shares: Sequence[float]) -> list[float]:
    return [max(_FLOOR, share * BINS) for share in shares]
