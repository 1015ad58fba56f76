"""What a training changed, as a spectrum: each module's update along the base's singular directions, from files alone.

adapter or run, base -> SpectrumReport -> spectrum.json, pictures

No model is loaded: one module at a time is read, measured and forgotten (``policy/spectra/``).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from perl.errors import ModelError, PerlError, RecipeError, did_you_mean
from perl.evaluation.subject import Subject, find_subject
from perl.methods.delta import LowRank
from perl.policy.attach import own_method
from perl.policy.model import load_empty_base, public_name
from perl.policy.spectra.against import Agreement, compare_updates
from perl.policy.spectra.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from perl.policy.spectra.measures import Spectrum, Update, measure
from perl.policy.spectra.pooled import kind_of
from perl.policy.spectra.updates import ModuleUpdate, Updates, updates_of_adapter, updates_of_model
from perl.recipe.sections import ModelSection
from perl.reports.spectra_found import FoundSpectra
from perl.reports.spectra_pictures import draw_spectra
from perl.reports.spectra_text import spectrum_lines
from perl.run.devices import accelerator
from perl.run.files import write_text
from perl.run.progress import progress
from perl.run.warned import warn

FILE = "spectrum.json"
# Modules that an error lists.
_SHOWN = 6


class SpectrumReport(FoundSpectra):
    """What was found, with its files and its table."""

    def save(self, folder: str | Path) -> list[Path]:
        """Writes ``spectrum.json`` and the pictures into a folder, which is made if it is absent.

        Raises:
            PerlError: It cannot be written.
            MissingExtraError: matplotlib is not installed; the numbers are written then.
        """
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            write_text(place / FILE, json.dumps(self.to_dict(), indent=2) + "\n")
        except OSError as error:
            raise PerlError(f"cannot be written: {error.strerror or error}", str(folder), "another folder") from None
        return [place / FILE, *draw_spectra(self, place)]

    def __str__(self) -> str:
        """The table by kind of module."""
        return "\n".join(spectrum_lines(self))


def spectrum(
    adapter: str | Path,
    against: str | Path | None = None,
    *,
    base: str | None = None,
    modules: str | None = None,
    principal: float = 0.1,
    device: str = "auto",
) -> SpectrumReport:
    """Measures what a training changed of each weight matrix, from files, one module at a time.

    Args:
        adapter: A run folder, a checkpoint or an adapter's folder, a Hub id with an optional ``@revision``, or
            ``zoo:NAME``; a run of method ``full`` too.
        against: Another one on the same base, whose updates are compared with these.
        base: Hub id or folder; None: the one that the adapter names.
        modules: Regular expression that modules' names must hold; None: all that were changed.
        principal: Share of the singular directions that count as principal, above 0 and below 1.
        device: ``auto``: a GPU if there is one; ``cpu``.

    Raises:
        PerlError: There is no such adapter or base, they do not fit each other, or the adapter changes no weights.
    """
    _check_arguments(modules, principal, device)
    try:
        opened = _opened(str(adapter), base)
        other = None if against is None else _opened(str(against), base, opened)
        names = _chosen(opened.updates.modules, modules)
        spectra, agreements = list[Spectrum](), list[Agreement]()
        place = torch.device("cpu") if device == "cpu" else accelerator() or torch.device("cpu")
        both = set(names) & set(other.updates.modules) if other is not None else set()
        if other is not None and not both:
            raise ModelError(f"{adapter} and {against} change no module in common", "--against")
        with progress(len(names), "decomposing", unit="modules") as state:
            for name in names:
                found = _moved(opened.updates.read(name), place)
                spectra.append(measure(name, found.weight, found.update, principal))
                if other is not None and name in both:
                    compared = _moved(other.updates.read(name), place)
                    agreements.append(compare_updates(name, found.update, compared.update))
                state.update()
    except PerlError as error:
        raise error.moved(lambda where: "" if where in ("peft.adapter", "--adapter", "spectrum") else where) from error
    only = () if other is None else tuple(sorted(set(_chosen(other.updates.modules, modules, empty=True)) ^ set(names)))
    return SpectrumReport(
        opened.subject.name,
        opened.method,
        public_name(opened.subject.base.name, None)[0],
        principal,
        tuple(spectra),
        opened.updates.left_out,
        None if other is None else other.subject.name,
        tuple(agreements),
        only,
    )


@dataclass(frozen=True)
class _Opened:
    """What was found of an adapter before any of its matrices is read."""

    subject: Subject
    method: str
    model: PreTrainedModel
    checkpoint: Checkpoint
    updates: Updates


def _opened(name: str, base: str | None, beside: _Opened | None = None) -> _Opened:
    """An adapter and its base, or the base of the one that it is compared with."""
    subject = find_subject(name, base)
    saved = subject.adapter
    if saved is None and subject.model is None:
        raise ModelError(f"{name} is a base, which nothing has changed")
    if saved is not None and saved.base_quantization is not None:
        where = f"{subject.name} was trained on a base quantised to {saved.base_quantization}"
        warn("PRL302", "%s; its update is measured against the ordinary base", where)
    plain = {"quantization": None, "attn_implementation": None}
    if beside is None:
        section = subject.base.model_copy(update=plain)
        model = load_empty_base(section)
        checkpoint = open_checkpoint(section, model)
    else:
        model, checkpoint = beside.model, beside.checkpoint
        _check_same_base(subject, beside.subject)
    if saved is not None:
        updates = updates_of_adapter(saved, model, checkpoint)
        dtype = getattr(torch, saved.base_dtype or "", None)
        if saved.base_fingerprint is not None and dtype is not None:
            found = checkpoint_fingerprint(checkpoint, model, dtype)
            if found not in (None, saved.base_fingerprint):
                raise ModelError(
                    f"{subject.name} was trained on other weights of {saved.config.base_model_name_or_path} "
                    f"({saved.base_fingerprint[:12]} then, {str(found)[:12]} of {checkpoint.name} here)",
                    "--base",
                    "name the base, and the revision, that it was trained on",
                )
        return _Opened(subject, own_method(saved).name, model, checkpoint, updates)
    trained = ModelSection(name=str(subject.model.name)) if subject.model is not None else subject.base
    return _Opened(
        subject, "full", model, checkpoint, updates_of_model(open_checkpoint(trained, model), checkpoint, model)
    )


def _check_same_base(subject: Subject, other: Subject) -> None:
    names = [public_name(one.base.name, None)[0] for one in (other, subject)]
    if names[0] != names[1]:
        raise ModelError(f"{subject.name} was made for {names[1]}, {other.name} for {names[0]}", "--against")


def _check_arguments(modules: str | None, principal: float, device: str) -> None:
    if not 0 < principal < 1:
        raise RecipeError(f"must be above 0 and below 1, not {principal:g}", "--principal", "0.1: the first tenth")
    if device not in ("auto", "cpu"):
        raise RecipeError(f"no device {device!r}", "--device", did_you_mean(device, ("auto", "cpu")))
    try:
        re.compile(modules or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise RecipeError(f"{modules!r} is not a regular expression: {error}", "--modules") from None


def _chosen(names: Sequence[str], pattern: str | None, *, empty: bool = False) -> list[str]:
    found = [name for name in names if pattern is None or re.search(pattern, name)]
    if not found and not empty:
        kinds = sorted({kind_of(name) for name in names})
        hint = f"there are: {', '.join(kinds[:_SHOWN])}; as {names[0]}"
        raise RecipeError(f"{pattern!r} fits no changed module", "--modules", hint)
    return found


def _moved(found: ModuleUpdate, place: torch.device) -> ModuleUpdate:
    """The same on the device that computes."""
    update: Update = found.update
    if isinstance(update, LowRank):
        update = LowRank(update.A_RI.detach().to(place), update.B_OR.detach().to(place), update.error)
    else:
        update = update.detach().to(place)
    return ModuleUpdate(found.name, found.weight.detach().to(place), update)
