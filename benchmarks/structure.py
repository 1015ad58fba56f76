"""How the code is built: rooms, imports, lines, what is overridden of TRL, words; a table, and JSON for two versions.

Run as ``python benchmarks/structure.py [CHECKOUT ...]``: without arguments of this checkout, with several side by side,
as of ``git worktree add ../before REVISION``. Reads sources; only for overrides are TRL and transformers imported.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "structure.json"
# What the field says otherwise, and what may stand where the boundary is the point.
PHRASES = {
    "is no, is none": r"\b(?:is|are|was|were) (?:no|none)\b",
    "nothing of": r"\bnothing of\b",
    "said, told, asked": r"\b(?:said|told|asked)\b",
}
_TEXTS = ("src", "docs", "README.md", "CONTRIBUTING.md")


def measure(checkout: Path) -> dict[str, object]:
    """The figures of a checkout, by what they are called in the table."""
    package = checkout / "src" / "perl"
    sources = sorted(package.rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    top = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    rooms = top - {"__init__", "__main__"}
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    tests = sorted((checkout / "tests").rglob("*.py"))
    overrides = overridden(trees)
    blind = sum(
        1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and catches_all(node)
    )
    text = "\n".join(read(path) for name in _TEXTS for path in files_in(checkout / name))
    return {
        "names at the top": len(rooms),
        "packages": sum(1 for path in sources if path.name == "__init__.py"),
        "imports between names at the top": len(edges(trees, package)),
        "layers": layers(checkout),
        "source files": len(sources),
        "lines of src": lines,
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        "test functions": sum(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test")
            for path in tests
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        ),
        "classes between TRL's trainer and ours": tower(trees),
        "methods of TRL and transformers overridden": len(overrides),
        "longest override, lines of its body": max(overrides.values(), default=0),
        "blind excepts": blind,
        "blind excepts per 1,000 lines": round(1000 * blind / lines, 2),
        "files that name AdaLoRA": sum("adalora" in read(path).lower() for path in sources),
        "files that compare a backend's name": sum(compares_backend(tree) for tree in trees.values()),
        **{f"'{name}' in src and docs": len(re.findall(pattern, text)) for name, pattern in PHRASES.items()},
    }


def edges(trees: dict[Path, ast.Module], package: Path) -> set[tuple[str, str]]:
    """Which name at the top imports which other one."""
    found = set()
    for path, tree in trees.items():
        here = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            for name in imported(node):
                parts = name.split(".")
                if parts[0] == "perl" and len(parts) > 1 and here not in ("__init__", "__main__") and parts[1] != here:
                    found.add((here, parts[1]))
    return {(a, b) for a, b in found if b != "__version__"}


def imported(node: ast.AST) -> Iterator[str]:
    """Full names that an import statement reads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers(checkout: Path) -> int:
    """Layers of the import contract."""
    settings = tomllib.loads(read(checkout / "pyproject.toml"))
    return max(len(contract.get("layers", ())) for contract in settings["tool"]["importlinter"]["contracts"])


def trainer_classes(trees: dict[Path, ast.Module]) -> list[ast.ClassDef]:
    """The classes from ours down to TRL's, ours first."""
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found, name = [], "PeftGRPOTrainer"
    while name in classes:
        found.append(classes[name])
        name = next((base.id for base in classes[name].bases if isinstance(base, ast.Name)), "")
    return found


def tower(trees: dict[Path, ast.Module]) -> int:
    """How many classes of ours stand on TRL's trainer."""
    return len(trainer_classes(trees))


def overridden(trees: dict[Path, ast.Module]) -> dict[str, int]:
    """``Class.method`` -> lines of its body without the docstring, of each method that TRL or transformers has too."""
    from trl import GRPOTrainer

    found = {}
    for cls in trainer_classes(trees):
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and hasattr(GRPOTrainer, node.name) and node.name != "__init__":
                body = node.body[1:] if ast.get_docstring(node) else node.body
                found[f"{cls.name}.{node.name}"] = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
    return found


def catches_all(node: ast.ExceptHandler) -> bool:
    """``except:``, ``except Exception`` or ``except BaseException`` that does not raise again by itself."""
    named = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
    last = node.body[-1]
    return named and not (isinstance(last, ast.Raise) and last.exc is None)


def compares_backend(tree: ast.Module) -> bool:
    """Whether a file compares something with the name of an engine."""
    names = {"transformers", "vllm", "vllm-server"}

    def constants(node: ast.expr) -> set[object]:
        return {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}

    return any(
        isinstance(node, ast.Compare)
        and "backend" in ast.unparse(node)
        and any(names & constants(side) for side in (node.left, *node.comparators))
        for node in ast.walk(tree)
    )


def files_in(path: Path) -> list[Path]:
    """A file, or the Python and Markdown files of a folder."""
    if path.is_file():
        return [path]
    return [found for found in sorted(path.rglob("*")) if found.suffix in (".py", ".md")]


def read(path: Path) -> str:
    """A file's text."""
    return path.read_text(encoding="utf-8")


def main() -> None:
    """Prints the table and keeps it."""
    checkouts = [Path(name) for name in sys.argv[1:]] or [Path(__file__).resolve().parent.parent]
    git = ["git", "rev-parse", "--short", "HEAD"]
    names = [subprocess.run(git, cwd=c, capture_output=True, text=True, check=True).stdout.strip() for c in checkouts]  # noqa: S603
    columns = [measure(checkout) for checkout in checkouts]
    width = max(map(len, columns[0]))
    print(f"{'':{width}}  " + "  ".join(f"{name:>9}" for name in names))
    for key in columns[0]:
        print(f"{key:{width}}  " + "  ".join(f"{column[key]!s:>9}" for column in columns))
    RESULTS.write_text(json.dumps(dict(zip(names, columns, strict=True)), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
