"""Which tests compare numbers with an independent computation: ``python -m tests.count_numeric``.

tests/**/test_*.py -> share of test functions, in all and for each folder

A test function counts where it, or a function of its file that it calls (or a fixture that it takes), compares a number

1. with ``tests.oracles``: it uses a name that was imported from there;
2. within a tolerance: ``torch.testing.assert_close``, ``pytest.approx``, ``allclose``, ``isclose``, or a difference
   that an assertion bounds (``abs(a - b) <= 1e-6``, ``(a - b).abs().max() < ...``);
3. exactly: ``torch.equal(a, b)`` asserted; ``a == b`` where one side is arithmetic on more than a count and a literal,
   or a sum, mean, binomial, exponential and the like, and the other is no literal; in a file that computes (it imports
   torch, numpy or math), ``f(a) == g(b)``: two runs, two orders, two ways.

Not counted: equality with a literal, of text, of names, of lengths or types, that two things differ, and a bound alone.
"""

import ast
import collections
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CLOSE = {"assert_close", "approx", "allclose", "isclose", "assert_allclose"}
EXACT = {"equal", "array_equal"}
COMPUTED = {"sum", "prod", "comb", "perm", "factorial", "fsum", "mean", "fmean", "pow", "sqrt", "exp", "log", "median"}
# Calls whose result is no number: a comparison of two of them is none of numbers.
OF_TEXT = {"str", "repr", "type", "set", "sorted", "list", "tuple", "dict", "len", "load", "loads", "dumps", "Path"}
OF_TEXT |= {"read_text", "read_bytes", "splitlines", "findall", "keys", "values", "items", "format", "join", "split"}
OF_TEXT |= {"strip", "range", "name", "entry", "digest", "base_fingerprint", "adapter_config_digest"}
PATHS = ("path", "folder", "checkout", "out")
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod, ast.MatMult)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> str:
    """The last part of the name that a call calls; empty for all else."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_computed(node: ast.expr) -> bool:
    """Arithmetic on more than a count and a literal, not of text or lists; or a sum, a mean and the like."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC)):
        return called(node) in COMPUTED
    parts = list(ast.walk(node))
    collections_ = [p for p in parts if isinstance(p, ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.Set)]
    texts = [p for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str | bytes)]
    numbers = [p for p in parts if isinstance(p, ast.Name | ast.Call) and called(p) != "len"]
    counted = {"len", *(n.id for p in parts if called(p) == "len" for n in ast.walk(p) if isinstance(n, ast.Name))}
    enough = len({ast.dump(p) for p in numbers if not (isinstance(p, ast.Name) and p.id in counted)}) >= 2
    joins = isinstance(node.op, ast.Div) and any(word in ast.dump(node) for word in PATHS)
    return enough and not collections_ and not texts and not joins


def is_a_law(left: ast.expr, right: ast.expr) -> bool:
    """Both sides are calls of what is tested, with other arguments or another function."""
    names = called(left), called(right)
    return all(names) and not set(names) & OF_TEXT and ast.dump(left) != ast.dump(right)


def bounds_a_difference(comparison: ast.Compare) -> bool:
    """``abs(a - b) <= tolerance`` and its kin: ``relative_difference(a, b)``, ``(a - b).abs().max()``, ``mismatch``."""
    if not isinstance(comparison.ops[0], ast.Lt | ast.LtE):
        return False
    names = {called(node) for node in ast.walk(comparison.left)}
    subtracts = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) for node in ast.walk(comparison.left))
    return bool(subtracts and names & {"abs", "norm", "max", "fabs"}) or any("difference" in name for name in names)


def compares_numbers(function: Function, oracles: set[str], computes: bool) -> bool:
    """Whether one of the three kinds of comparison stands in a function itself."""
    values = _assigned(function)
    for node in ast.walk(function):
        if (isinstance(node, ast.Name) and node.id in oracles) or called(node) in CLOSE:
            return True
        if isinstance(node, ast.Assert) and _asserts_numbers(node.test, values, computes):
            return True
    return False


def _assigned(function: Function) -> dict[str, ast.expr]:
    """What a function computes and gives a name, so that ``expected = sum(...)`` is known for what it is."""
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return {a.targets[0].id: a.value for a in assignments if isinstance(a.targets[0], ast.Name)}


def _asserts_numbers(test: ast.expr, values: dict[str, ast.expr], computes: bool) -> bool:
    differ = [node.operand for node in ast.walk(test) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)]
    for node in ast.walk(test):
        if called(node) in EXACT and node not in differ:
            return True
        if not isinstance(node, ast.Compare):
            continue
        left, right = node.left, node.comparators[0]
        if bounds_a_difference(node):
            return True
        if not isinstance(node.ops[0], ast.Eq) or isinstance(left, ast.Constant) or isinstance(right, ast.Constant):
            continue
        if _is_expected(left, values) or _is_expected(right, values) or (computes and is_a_law(left, right)):
            return True
    return False


def _is_expected(side: ast.expr, values: dict[str, ast.expr]) -> bool:
    return is_computed(values.get(side.id, side) if isinstance(side, ast.Name) else side)


def count(text: str) -> tuple[int, int]:
    """Of a file's text: test functions, and those that compare numbers with an independent computation."""
    tree = ast.parse(text)
    oracles = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.oracles")
        for alias in node.names
    }
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    computes = bool(_imports(tree) & {"torch", "numpy", "math"})
    numeric = {name for name, function in functions.items() if compares_numbers(function, oracles, computes)}
    uses = {name: _uses(function) for name, function in functions.items()}
    while True:  # what calls such a function, or takes it as a fixture, compares too
        more = {name for name, used in uses.items() if name not in numeric and used & numeric}
        if not more:
            break
        numeric |= more
    tests = {name for name in functions if name.startswith("test_")}
    return len(tests), len(tests & numeric)


def _imports(tree: ast.Module) -> set[str]:
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def _uses(function: Function) -> set[str]:
    called_names = {called(node) for node in ast.walk(function)} - {""}
    return (called_names | {argument.arg for argument in function.args.args}) - {function.name}


def counts() -> dict[str, tuple[int, int]]:
    """For each folder of tests: test functions, and those that compare numbers."""
    found: dict[str, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for path in sorted(TESTS.rglob("test_*.py")):
        folder = path.relative_to(TESTS).parent.as_posix()
        tests, numeric = count(path.read_text(encoding="utf-8"))
        found[folder] = found[folder][0] + tests, found[folder][1] + numeric
    return dict(found)


def share() -> float:
    """Of all test functions."""
    tests, numeric = (sum(column) for column in zip(*counts().values(), strict=True))
    return numeric / tests


def main() -> None:
    """Prints a line for each folder and one for all."""
    lines = [(folder, *numbers) for folder, numbers in counts().items()]
    lines.append(("all", *(sum(numbers) for numbers in zip(*counts().values(), strict=True))))
    for folder, tests, numeric in lines:
        sys.stdout.write(f"{folder:20} {tests:5} {numeric:5} {numeric / tests:6.1%}\n")


if __name__ == "__main__":
    main()
