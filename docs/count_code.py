"""Counts the package, room by room: ``python docs/count_code.py``; ``--once`` lists the functions of the last column.

src/perl/**/*.py -> a row per folder: files, lines of code, functions, private functions named once in their file

Lines of code have a token that is no comment and no docstring. Below stand class names that several files bear.
"""

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "perl"
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Room:
    """What a folder, or the whole package, holds."""

    files: int = 0
    code: int = 0
    functions: int = 0
    once: int = 0

    def row(self, name: str) -> str:
        """One line of the table."""
        share = self.once / max(1, self.functions)
        return f"{name:24}{self.files:6}{self.code:8,}{self.functions:8,}{self.once:7}{share:8.1%}"


def code_lines(text: str, tree: ast.Module) -> int:
    """How many lines hold code: neither empty, nor a comment, nor a docstring."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    rows = text.split("\n")
    return sum(bool(rows[line - 1].strip()) for line in lines - documented)


def functions_of(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def called_once(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The private functions, without a decorator, whose name is used at one place of their file."""
    uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    uses += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for function in functions_of(tree):
        private = function.name.startswith("_") and not function.name.startswith("__")
        if private and not function.decorator_list and uses[function.name] == 1:
            yield function


def main() -> None:
    """Prints the table."""
    rooms: dict[str, Room] = defaultdict(Room)
    classes: dict[str, list[str]] = defaultdict(list)
    listed: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree, place = ast.parse(text), path.relative_to(PACKAGE)
        once = list(called_once(tree))
        for room in (rooms[str(place.parent)], rooms["all"]):
            room.files += 1
            room.code += code_lines(text, tree)
            room.functions += len(functions_of(tree))
            room.once += len(once)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(str(place))
        if "--once" in sys.argv:
            listed += [f"{place}:{f.lineno} {f.name} {f.end_lineno - f.lineno + 1}" for f in once]
    rows = [f"{'room':24}{'files':>6}{'code':>8}{'func.':>8}{'once':>7}{'share':>8}"]
    rows += [rooms[name].row(name) for name in sorted(rooms, key=lambda name: (name == "all", name))]
    rows += [f"class {name}: {', '.join(places)}" for name, places in sorted(classes.items()) if len(places) > 1]
    sys.stdout.write("\n".join([*listed, *rows]) + "\n")


if __name__ == "__main__":
    main()
