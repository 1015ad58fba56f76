"""A base's completions, kept for the evaluations of other adapters on it.

what defines a completion -> a file of samples in the user's cache

A base is drawn once for all adapters that are compared with it. A file is named by all that its completions depend on:
what their key in ``samples.jsonl`` names (weights, prompts, sampling, seed, engine, type of numbers), and the device,
the attention and the versions of the packages that draw. Verdicts are never taken from it.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from filelock import FileLock

from perl.evaluation.protocol import short_hash
from perl.evaluation.samples import Place, Sample, SampleFile
from perl.run.folder import installed_versions
from perl.run.warned import warn

VARIABLE = "PERL_CACHE"
"""Environment variable with the folder that holds caches."""
_DRAWING = ("torch", "transformers", "vllm")


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
    """The samples that are kept; none where there are none.

    Raises:
        PerlError: The file cannot be read.
    """
    return SampleFile(folder() / f"{name}.jsonl").read(key)


def add(name: str, key: str, samples: Iterable[Sample]) -> None:
    """Keeps samples that are not kept yet; a cache that cannot be written costs a line, not an evaluation."""
    file = SampleFile(folder() / f"{name}.jsonl")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.path.with_suffix(".lock")):
            there: Mapping[Place, Sample] = file.read(key)
            new = [sample for sample in samples if there.get(sample.place) != sample]
            if new:
                file.append(key, new)
    except OSError as error:
        warn("PRL365", "%s: %s; the base's completions are not kept there", file.path, error.strerror or error)
