"""A base's completions, kept for the evaluations of other adapters on it.

what defines a completion -> a file of samples in the user's cache

A base is drawn once for all adapters that are compared with it. A file is named by all that its completions depend on:
what their key in ``samples.jsonl`` names (weights, prompts, sampling, seed, engine, type of numbers), and the device,
the attention and the versions of the packages that draw. Verdicts are never taken from it.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from perl.errors import PerlError
from perl.evaluation.protocol import short_hash
from perl.evaluation.samples import NOT_JUDGED, Place, Sample, SampleFile
from perl.run.folder import installed_versions
from perl.run.warned import warn

VARIABLE = "PERL_CACHE"
"""Environment variable with the folder that holds caches."""
_DRAWING = ("torch", "transformers", "vllm", "bitsandbytes", "torchao")


def folder() -> Path:
    """Where base completions are kept: ``$PERL_CACHE/bases``, else ``perl-rl/bases`` in the user's cache."""
    chosen = os.environ.get(VARIABLE)
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "perl-rl"
    return (Path(chosen) if chosen else usual).expanduser() / "bases"


def name_of(key: str, device: str, attention: str | None) -> str:
    """The file's name.

    Args:
        key: Under which the samples are kept in ``samples.jsonl``.
        device: Type of the device that draws.
        attention: ``attn_implementation`` that was asked for; None: transformers' choice.
    """
    versions = {name: found for name, found in installed_versions(_DRAWING).items() if name in _DRAWING}
    return short_hash({"key": key, "device": device, "attention": attention, "versions": versions})


def read(name: str, key: str) -> dict[Place, Sample]:
    """The samples that are kept, without verdicts; none where there are none, or they cannot be read."""
    file = SampleFile(folder() / f"{name}.jsonl")
    try:
        return {place: _unjudged(sample) for place, sample in file.read(key).items()}
    except PerlError as error:
        warn("PRL365", "%s: %s; the base's completions are not taken from there", file.path, error.mistakes[0].message)
        return {}


def add(name: str, key: str, samples: Iterable[Sample]) -> None:
    """Keeps samples that are not kept yet; a cache that cannot be written costs a line, not an evaluation."""
    file = SampleFile(folder() / f"{name}.jsonl")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.path.with_suffix(".lock")):
            there = file.read(key)
            new = [_unjudged(sample) for sample in samples if sample.place not in there]
            if new:
                file.append(key, new)
    except (OSError, PerlError) as error:
        reason = error.mistakes[0].message if isinstance(error, PerlError) else error.strerror or error
        warn("PRL365", "%s: %s; the base's completions are not kept there", file.path, reason)


def _unjudged(sample: Sample) -> Sample:
    return replace(sample, status=NOT_JUDGED, extracted=None)
