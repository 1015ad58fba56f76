"""What a job carries of the user's rewards: the files of their modules, with what these import from beside them.

names of rewards -> files

Modules that are installed stay where they are: the environment of verl needs them too.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from perl.errors import Mistake, RecipeError, raise_all

FOLDER_OF_FILES = "reward_files"
# Folders of installed packages, whatever Python, user or system they are of.
_SITES = ("site-packages", "dist-packages")
_INSTALLED = tuple(
    folder
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    for folder in (Path(sysconfig.get_path(name)).absolute(), Path(sysconfig.get_path(name)).resolve())
)

REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "process_reward": ("it holds a model", "an outcome reward"),
        "length_penalty": ("it compares the completions of a group, and verl asks for one at a time", "soft_overlong"),
        "cosine_length": ("it counts tokens, and verl's reward functions get text", "soft_overlong"),
        "repetition_penalty": ("it counts tokens, and verl's reward functions get text", "a custom reward of text"),
    }
)
"""Rewards that cannot go: why, and the nearest thing that works."""
NEEDS_REFUSED = ("completion_ids", "trainer_state", "environments")
"""Arguments that no trainer but this package's hands to a reward function."""


def check_rewards(needs: Mapping[str, Iterable[str]]) -> None:
    """Refuses rewards that cannot be asked for one completion's text.

    Args:
        needs: Name of a reward -> arguments that it insists on.

    Raises:
        RecipeError: With each of them.
    """
    found = []
    for name, asked in needs.items():
        missing = [argument for argument in asked if argument in NEEDS_REFUSED]
        if name in REFUSED:
            why, instead = REFUSED[name]
            found.append(Mistake(f"cannot go to verl: {why}", f"rewards.{name}", instead))
        elif missing and ":" in name:
            what = f"cannot go to verl: its reward functions get no {', '.join(missing)}"
            found.append(Mistake(what, f"rewards.{name}", "give it a default, or score the text"))
    raise_all(RecipeError, found)


def reward_files(names: Iterable[str]) -> dict[str, Path]:
    """The files that the modules of custom rewards are, by their place in the job's folder.

    Args:
        names: Of a recipe's rewards, whose modules are imported already.

    Raises:
        RecipeError: A module is neither installed nor a file that can be carried.
    """
    found: dict[str, Path] = {}
    mistakes = []
    for name in names:
        module, colon, _ = name.partition(":")
        if not colon:
            continue
        _carry(module, found)
        path = module.replace(".", "/")
        if not (_is_installed(module) or {f"{path}.py", f"{path}/__init__.py"} & found.keys()):
            what = f"cannot go to verl: {module} is no file of Python, and is not installed"
            mistakes.append(Mistake(what, f"rewards.{name}", "put the function into a .py file"))
    raise_all(RecipeError, mistakes)
    return found


def _is_installed(module: str) -> bool:
    """Whether a module is part of Python, of this package, or of one that is installed."""
    if module.partition(".")[0] in {"perl", *sys.stdlib_module_names}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and _in_site(Path(file))


def _in_site(file: Path) -> bool:
    """Whether a file is of what is installed: where it is imported from, or where a link leads."""
    places = (file.absolute(), file.resolve())
    inside = any(place.is_relative_to(folder) for place in places for folder in _INSTALLED)
    return inside or any(part in _SITES for place in places for part in place.parts)


def _carry(module: str, found: dict[str, Path]) -> None:
    """A module's file, those of the packages that hold it, and those that it imports from beside them."""
    parts = module.split(".")
    if parts[0] in {"perl", *sys.stdlib_module_names}:
        return
    for count in range(1, len(parts) + 1):
        loaded = sys.modules.get(".".join(parts[:count]))
        file = getattr(loaded, "__file__", None)
        if file is None and hasattr(loaded, "__path__"):
            continue  # a folder without __init__.py, which has no file of its own
        if file is None or Path(file).suffix != ".py" or _in_site(Path(file)):
            return
        place = Path(file).resolve()
        path = "/".join(parts[:count]) + ("/__init__.py" if place.name == "__init__.py" else ".py")
        if path in found:
            continue
        found[path] = place
        package = ".".join(parts[:count] if place.name == "__init__.py" else parts[: count - 1])
        for imported in _imports(place, package):
            _carry(imported, found)


def _imports(file: Path, package: str) -> Iterator[str]:
    """Names of modules that a file imports, relative ones as absolute."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in sys.modules)
