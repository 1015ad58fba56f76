"""A base's completions, kept for the evaluations of other adapters on it.

what defines a completion -> a file of samples in the user's cache

A base is drawn once for all adapters that are compared with it. A file is named by all that its completions depend on:
what their key in ``samples.jsonl`` names (weights, prompts, sampling, seed, engine, type of numbers), and the device,
the attention and the versions of the packages that draw. Verdicts are never taken from it. Its last line is the SHA-256
of the others: nothing is taken from a file that was edited or cut since it was written.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from perl.errors import PerlError
from perl.evaluation.protocol import short_hash
from perl.evaluation.samples import NOT_JUDGED, Place, Sample, SampleFile, line_of
from perl.run.files import write_text
from perl.run.folder import installed_versions
from perl.run.warned import warn

VARIABLE = "PERL_CACHE"
"""Environment variable with the folder that holds caches."""
_DIGEST = "sha256"
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
    """The samples that are kept, without verdicts; none where there are none, or they cannot be read or were edited."""
    file = SampleFile(folder() / f"{name}.jsonl")
    try:
        if file.path.exists() and not _is_as_written(file.path):
            warn("PRL365", "%s: was edited or cut since it was written; the base is drawn again", file.path)
            return {}
        return {place: _unjudged(sample) for place, sample in file.read(key).items()}
    except (OSError, PerlError) as error:
        warn("PRL365", "%s: %s; the base's completions are not taken from there", file.path, _reason(error))
        return {}


def add(name: str, key: str, samples: Iterable[Sample]) -> None:
    """Keeps samples that are not kept yet; a cache that cannot be written costs a line, not an evaluation."""
    file = SampleFile(folder() / f"{name}.jsonl")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.path.with_suffix(".lock")):
            kept = file.path.exists() and _is_as_written(file.path)
            there = file.read(key) if kept else {}
            new = {sample.place: _unjudged(sample) for sample in samples if sample.place not in there}
            if new:
                write_text(file.path, _signed("".join(line_of(key, one) for one in (there | new).values())))
    except (OSError, PerlError) as error:
        warn("PRL365", "%s: %s; the base's completions are not kept there", file.path, _reason(error))


def _signed(text: str) -> str:
    """The text with a last line that has its SHA-256."""
    return text + json.dumps({_DIGEST: hashlib.sha256(text.encode()).hexdigest()}) + "\n"


def _is_as_written(path: Path) -> bool:
    """Whether the last line has the SHA-256 of those before it."""
    digest, last = hashlib.sha256(), b""
    with path.open("rb") as file:
        for line in file:
            digest.update(last)
            last = line
    return last == json.dumps({_DIGEST: digest.hexdigest()}).encode() + b"\n"


def _reason(error: OSError | PerlError) -> object:
    return error.mistakes[0].message if isinstance(error, PerlError) else error.strerror or error


def _unjudged(sample: Sample) -> Sample:
    return replace(sample, status=NOT_JUDGED, extracted=None)
