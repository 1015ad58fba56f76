"""What the project needs of an environment and does not find there.

pyproject.toml -> (package, what is wrong with it), those of its dependencies' dependencies too

Pip tells it where it installs; where packages are copied into a folder, nobody does.
"""

import importlib
import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# What `perl train`, `perl push` and these benchmarks import, the packages that they import late among it.
IMPORTED = (
    "perl.cli.main",
    "perl.training.plan",
    "perl.training.stages",
    "perl.training.scores",
    "perl.rewards.verifier",
    "perl.hub.push.publish",
    "math_verify",
    "httpx2",
    "detect_secrets.core.plugins.util",
    "datasets",
    "accelerate",
)


def dependencies(project: Path = PROJECT) -> list[str]:
    """What the project asks for, extras aside."""
    return list(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"])


def unmet(asked: list[str], path: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """Packages that are missing or of another version, each once.

    Args:
        asked: Requirements as in ``pyproject.toml``.
        path: Folders of packages; Python's own if None.

    Yields:
        The name, and what is wrong in a few words.
    """
    todo = [(Requirement(requirement), "perl-rl") for requirement in asked]
    known: set[tuple[str, str]] = set()
    while todo:
        requirement, by = todo.pop(0)
        name = canonicalize_name(requirement.name)
        if (name, str(requirement)) in known:
            continue
        known.add((name, str(requirement)))
        found = _distribution(name, path)
        if found is None:
            yield name, f"missing, {by} needs it"
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            yield name, f"{found.version} is here, {by} needs {requirement.specifier}"
        todo += [(further, name) for further in _needs(found, requirement.extras)]


def _distribution(name: str, path: list[str] | None) -> importlib.metadata.Distribution | None:
    options = {"name": name} if path is None else {"name": name, "path": path}
    return next(iter(importlib.metadata.distributions(**options)), None)


def _needs(distribution: importlib.metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Of a package, with the extras that it is asked for, on this Python."""
    for text in distribution.requires or []:
        further = Requirement(text)
        if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield further


def not_importable(modules: tuple[str, ...] = IMPORTED) -> Iterator[tuple[str, str]]:
    """Modules that do not come, with the reason in a line."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 (a broken package fails with anything)
            yield module, f"{type(error).__name__}: {error}"[:200]
