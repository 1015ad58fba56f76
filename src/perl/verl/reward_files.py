"""What a job carries of the user's rewards: the files of their modules, with what these import from beside them.

names of rewards -> files

Modules that are installed stay where they are: the environment of verl needs them too.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from perl.errors import Mistake, RecipeError, raise_all
from perl.verl.table import CANNOT, cannot_go

# Folders of installed packages, whatever Python, user or system they are of.
_SITES = {"site-packages", "dist-packages"}
# Arguments that no trainer but this package's hands to a reward function.
_ONLY_HERE = ("completion_ids", "trainer_state", "environments")


def check_rewards(needs: Mapping[str, Iterable[str]]) -> None:
    """Refuses rewards that cannot be asked for one completion's text.

    Args:
        needs: Name of a reward -> arguments that it insists on.

    Raises:
        RecipeError: With each of them.
    """
    rows = {name: row for row in CANNOT["rewards"] for name in row["names"]}
    found = [cannot_go(rows[name]["why"], f"rewards.{name}", rows[name]["instead"]) for name in needs if name in rows]
    for name, asked in needs.items():
        missing = [argument for argument in asked if argument in _ONLY_HERE]
        if missing and ":" in name:
            what = f"its reward functions get no {', '.join(missing)}"
            found.append(cannot_go(what, f"rewards.{name}", "give it a default, or score the text"))
    raise_all(RecipeError, found)


def reward_files(names: Iterable[str]) -> dict[str, Path]:
    """The files that the modules of custom rewards are, by their place in the job's folder.

    Args:
        names: Of a recipe's rewards, whose modules are imported already.

    Raises:
        RecipeError: A module is neither installed nor a file that can be carried.
    """
    found: dict[str, Path] = {}
    mistakes: list[Mistake] = []
    for name in names:
        module, colon, _ = name.partition(":")
        if colon:
            _carry(module, found)
            if not (_is_installed(module) or _place(module) in found):
                what = f"{module} is no file of Python, and is not installed"
                mistakes.append(cannot_go(what, f"rewards.{name}", "put the function into a .py file"))
    raise_all(RecipeError, mistakes)
    return found


def _place(module: str) -> str:
    """A module's file in the job's folder."""
    package = hasattr(sys.modules.get(module), "__path__")
    return module.replace(".", "/") + ("/__init__.py" if package else ".py")


def _is_installed(module: str) -> bool:
    """Whether a module is part of Python, of this package, or of one that is installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    known = module.partition(".")[0] in {"perl", *sys.stdlib_module_names}
    return known or (file is not None and bool(_SITES & {*Path(file).parts, *Path(file).resolve().parts}))


def _carry(module: str, found: dict[str, Path]) -> None:
    """A module's file, those of the packages that hold it, and those that it imports."""
    above, _, _ = module.rpartition(".")
    if above:
        _carry(above, found)
    file = getattr(sys.modules.get(module), "__file__", None)  # none has a folder without __init__.py
    if file is None or Path(file).suffix != ".py" or _is_installed(module) or _place(module) in found:
        return
    found[_place(module)] = Path(file)
    for imported in _imports(Path(file), module if hasattr(sys.modules[module], "__path__") else above):
        _carry(imported, found)


def _imports(file: Path, package: str) -> Iterator[str]:
    """Names of modules that a file imports, relative ones as absolute."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in sys.modules)
