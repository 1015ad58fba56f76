"""What the user's own code says: the files of a function or a class that a recipe names, and digits of their texts.

``package.module:function`` -> files with their texts, hexadecimal digits
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from perl.errors import PerlError

_DIGITS = 12
# What a reward reads, and no log that it writes; in bytes.
_TABLES, _LARGEST_FILE = (".json", ".toml", ".yaml", ".yml"), 2**20


def module_of_file(file: str, where: str, example: str) -> str:
    """The module of ``folder/my_code.py``, which can be imported then; its folder is looked in last.

    Args:
        file: As somebody wrote it.
        where: What in.
        example: How it is written.

    Raises:
        PerlError: There is no such file, or its name is another module's.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise PerlError(f"no such file: {file}", where, example)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.find_spec(path.stem)
    found = None if spec is None else spec.origin
    if found is None or Path(found).resolve() != path:
        raise PerlError(f"{path.stem} is the name of another module, {found or 'built in'}", where, "rename the file")
    return path.stem


def code_digest(path: str) -> str:
    """Digits of the texts of a reward's files, whatever ends their lines.

    Args:
        path: ``package.module:function``, which was imported.
    """
    _, files = code_files(path)
    texts = [files[one] for one in sorted(files)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_DIGITS]


def code_files(path: str) -> tuple[Path, dict[Path, str]]:
    """The folder that a reward is imported from, and its file and all that it uses there, with their texts.

    Those are the files that it imports, wherever it does and through others, and the JSON, TOML and YAML files that a
    text in it names. Of a package that is installed, the package's.

    Args:
        path: ``package.module:function``, which was imported.
    """
    name = path.partition(":")[0]
    file = getattr(sys.modules[name], "__file__", None)
    first = Path(file or ".").resolve()
    root = first.parents[min(name.count(".") + (first.stem == "__init__"), len(first.parents) - 1)]
    installed = root.name in ("site-packages", "dist-packages")
    within = root / name.partition(".")[0] if installed else root
    packages = [above / "__init__.py" for above in first.parents if root in above.parents]
    found, ahead = dict[Path, str](), [first, *packages] if file else []
    while ahead:
        one = ahead.pop().resolve()
        if one in found or not one.is_file() or (one != first and within not in one.parents):
            continue
        if one.stat().st_size > _LARGEST_FILE:
            continue
        found[one] = "\n".join(one.read_text(encoding="utf-8", errors="replace").splitlines())
        ahead += _files_named_in(found[one], one, root) if one.suffix == ".py" else []
    return root, found


def _files_named_in(text: str, file: Path, root: Path) -> Iterator[Path]:
    """Where the modules that a file imports would lie, and the tables beside it that its texts name."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            modules: list[str] = []
            above = root
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
                of = node.module or ""
                modules = [of, *(f"{of}.{alias.name}".lstrip(".") for alias in node.names)]
            elif isinstance(node, ast.Constant) and str(node.value).endswith(_TABLES):
                yield file.parent / str(node.value)
            for parts in (module.split(".") for module in modules if module):
                yield from (above.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1))
                yield above.joinpath(*parts).with_suffix(".py")
