"""Which versions of vLLM are known.

version -> nothing, or an error that says which ones are

Knows nothing of where a vLLM runs.
"""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from perl.errors import PerlError, Problem

SUPPORTED = ">=0.32,<0.33"
"""The LoRA manager, weight loading and log-probabilities change between minor releases; each of those is looked at."""


def check_version(version: str, where: str = "") -> None:
    """Refuses a vLLM whose inner parts are not known.

    Args:
        version: What it says of itself.
        where: The server, or the package.

    Raises:
        PerlError: It is outside of :data:`SUPPORTED`.
    """
    try:
        known = SpecifierSet(SUPPORTED).contains(version, prereleases=True)
    except InvalidVersion:
        known = False
    if not known:
        raise PerlError(f"vLLM {version} is not supported", where, f"install vllm{SUPPORTED}")


def missing_vllm(needed_for: str) -> Problem:
    """The problem of a vLLM that is not installed; no extra, since it asks for an older transformers than ours."""
    hint = f"pip install 'vllm{SUPPORTED}', then pip install perl-rl once more, for its newer transformers"
    return Problem(f"{needed_for} needs the package vllm", hint=hint)
