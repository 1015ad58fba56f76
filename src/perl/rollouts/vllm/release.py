"""Which versions of vLLM are known, and what is called otherwise in each.

version -> nothing, a warning, or an error that names the tested ones; version -> Calls

A newer one than was tested is let in: whether it samples from the policy is proven before its first rollout is trained
on.
"""

from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

from perl.errors import MissingExtraError, Mistake, PerlError, raise_all, warn
from perl.recipe.rollout_section import RolloutSection


@dataclass(frozen=True)
class Calls:
    """What is called in this process; servers are asked alike in all versions.

    Attributes:
        renaming: Method of a model's mapper of names that renames layers and joins none.
        releases_cache: Whether the cache's memory can be given back while the weights stay.
    """

    renaming: str
    releases_cache: bool


# The first version of each row; ``benchmarks/vllm_versions.py`` runs them.
_CALLS = {
    Version("0.28"): Calls("get_unstacked_mapper", releases_cache=False),
    Version("0.29"): Calls("get_rename_mapper", releases_cache=False),
    Version("0.31"): Calls("get_rename_mapper", releases_cache=True),
}
OLDEST, NEWER = min(_CALLS), Version("0.33.dev0")
"""The oldest that was tested, and where those begin that were not: the LoRA manager, weight loading and
log-probabilities change between minor releases."""
TESTED = f">={OLDEST},<0.33"


def calls_of(version: str) -> Calls:
    """What is called of a version that :func:`check_version` lets in."""
    return _CALLS[max(since for since in _CALLS if since <= Version(version))]


def check_version(version: str, where: str = "") -> None:
    """Refuses a vLLM that is older than the oldest tested, and warns once of one that is newer than the newest.

    Whether older ones have what is called was not looked at.

    Args:
        version: As the package or the server reports it.
        where: The server, or the package.

    Raises:
        PerlError: It is too old, or reports no version.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        found = None
    if found is None or found < OLDEST:
        raise PerlError(f"vLLM {version} is not supported", where, f"install vllm>={OLDEST}; {TESTED} is tested")
    if found >= NEWER:
        _warn_of(version)


@cache
def _warn_of(version: str) -> None:
    """One line for each version, however many servers have it."""
    warn(
        "PRL337",
        "vLLM %s is newer than the newest tested (%s): it is used if its log-probabilities are the policy's",
        version,
        TESTED,
    )


def check_engine(section: RolloutSection) -> None:
    """Refuses rollouts from what is not installed here.

    Args:
        section: The recipe's ``rollout``.

    Raises:
        MissingExtraError: vLLM is absent.
    """
    missing = [] if section.capabilities.installed else [missing_vllm("rollout.backend")]
    raise_all(MissingExtraError, missing)


def missing_vllm(needed_for: str) -> Mistake:
    """The mistake of a vLLM that is not installed; no extra, since it requires an older transformers than ours."""
    hint = f"pip install 'vllm{TESTED}', then pip install perl-rl again: vLLM's own pin of transformers is too old"
    return Mistake(f"{needed_for} needs the package vllm", hint=hint)
