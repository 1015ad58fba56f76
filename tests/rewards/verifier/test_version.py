"""Verdicts are named by the code that gave them: no change of it without another version."""

import ast
import hashlib
from importlib.metadata import version
from pathlib import Path

import perl.rewards
from perl.rewards.verifier import verifier_version
from perl.rewards.verifier.version import VERSION

# Of the code that decides on verdicts. After a change of it: raise VERSION if any verdict may be another one, so that
# stored verdicts are known to be older, and then put both here.
KNOWN = (5, "035693053e93446e1da23848cb8833fa405bc5759afd28d1ea79ff19a467ddd9")
FOLDER = Path(perl.rewards.__file__).parent


class _Code(ast.NodeTransformer):
    """Leaves what decides: neither docstrings nor where a name is imported from."""

    def visit_ImportFrom(self, node):
        return ast.ImportFrom("", node.names, 0)

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node


def code_of(path):
    tree = _Code().visit(ast.parse(path.read_text(encoding="utf-8")))
    return ast.dump(tree)


def test_the_code_is_that_of_its_version():
    files = [FOLDER / "answers.py", *sorted((FOLDER / "verifier").glob("*.py"))]
    assert len(files) > 8
    digest = hashlib.sha256()
    for path in files:
        if path.name != "version.py":
            digest.update(path.name.encode() + b"\0" + code_of(path).encode() + b"\0")
    assert (VERSION, digest.hexdigest()) == KNOWN


def test_it_names_the_libraries_that_verdicts_depend_on():
    assert verifier_version().startswith(f"{VERSION} (")
    for name in ("math-verify", "latex2sympy2_extended", "sympy"):
        assert f"{name} {version(name)}" in verifier_version()
