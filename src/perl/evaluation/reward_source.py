"""What the code of a user's reward says, in a few digits, in which two of one name and of other code differ.

``package.module:function`` -> the files of its code -> digest

Its own file counts, and those of the user's that it imports, as far as they were imported with it. What is installed,
and what it reads or asks while it runs, does not.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from perl.rewards.workers.worker import is_users_file

DIGITS = 12


def source_digest(path: str) -> str:
    """Hexadecimal digits of the code of a reward.

    Args:
        path: ``package.module:function``, which can be imported.

    Returns:
        Of the texts of its files as they are now, whatever ends their lines and wherever they lie.
    """
    module = importlib.import_module(path.partition(":")[0])
    digest = hashlib.sha256()
    for name, file in _files(module):
        text = "\n".join(file.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
        digest.update(f"{name}\0{text}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:DIGITS]


@functools.cache
def _files(module: ModuleType) -> tuple[tuple[str, Path], ...]:
    """Name and file of each module that counts, as they are when this is first asked: what runs may import more."""
    return tuple(sorted(_found(module)))


def _found(module: ModuleType) -> Iterator[tuple[str, Path]]:
    """The module itself, and the modules of the user's that it has something of, and so on."""
    seen, left = {module.__name__}, [module]
    while left:
        one = left.pop()
        file = getattr(one, "__file__", None)
        if not isinstance(file, str) or not Path(file).is_file():
            continue
        if one is not module and not is_users_file(file):
            continue
        yield one.__name__, Path(file)
        held = [v if isinstance(v, ModuleType) else _defined_in(v) for v in list(vars(one).values())]
        for other in [*held, *map(sys.modules.get, _imported(one, Path(file)))]:
            if other is not None and other.__name__ not in seen:
                seen.add(other.__name__)
                left.append(other)


def _imported(module: ModuleType, file: Path) -> Iterator[str]:
    """Names of modules that a file's lines outside of functions may import: of constants nothing else tells."""
    left: list[ast.AST] = [ast.parse(file.read_bytes())] if file.suffix == ".py" else []
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = str(module.__package__ or "").split(".")
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def _defined_in(value: object) -> ModuleType | None:
    """The module that a function or class is of; None: it is neither."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    return sys.modules.get(str(value.__module__))
