"""Engines are told apart by what they can do; their names are compared in one file."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import perl
from perl.recipe.engines import ENGINES, OF_TRL, Backend, best_backend, capabilities
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.open_engine import _OPENED
from perl.rollouts.vllm.in_process import InProcessEngine
from perl.rollouts.vllm.servers import ServerPool

SOURCES = Path(perl.__file__).parent
THE_FILE = "recipe/engines.py"
CLASSES = {"transformers": TransformersEngine, "vllm": InProcessEngine, "vllm-server": ServerPool}
SERVERS = {"vllm-server": ["http://localhost:8000"]}


def named(node: ast.AST) -> bool:
    """Whether an expression is an engine's name, or a collection of some."""
    values = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(isinstance(value, ast.Constant) and value.value in get_args(Backend) for value in values)


def compares_a_backend(path: Path) -> bool:
    """Whether a file compares something called a backend with an engine's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            about = any(re.search(r"backend", ast.unparse(side)) for side in sides)
            if about and any(named(side) for side in sides):
                return True
        if isinstance(node, ast.Match) and "backend" in ast.unparse(node.subject):
            return True
    return False


def test_engines_names_are_compared_in_one_file_only(tmp_path):
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if compares_a_backend(path)}
    assert found <= {THE_FILE}
    # The search finds what it looks for.
    for text in ('how.backend == "vllm"', 'backend not in ("auto", "transformers")', '"vllm-server" != s["backend"]'):
        (tmp_path / "found.py").write_text(f"x = {text}\n")
        assert compares_a_backend(tmp_path / "found.py"), text
    (tmp_path / "other.py").write_text('x = package == "vllm"\ny = how.backend == best\n')
    assert not compares_a_backend(tmp_path / "other.py")


def test_every_name_but_auto_has_a_row_and_a_class_that_declares_it_and_auto_has_those_of_transformers():
    assert set(ENGINES) == set(get_args(Backend)) - {"auto"} == set(CLASSES)
    assert {name: row.name for name, row in ENGINES.items()} == {name: name for name in ENGINES}
    assert [name for name, row in ENGINES.items() if CLASSES[name].capabilities is not row] == []
    assert set(_OPENED) == {row for row in ENGINES.values() if row.takes_updates}
    assert OF_TRL == {"colocate": "vllm", "server": "vllm-server"}  # TRL's two ways to run vLLM
    for backend in get_args(Backend):
        how = RolloutSection(backend=backend, servers=SERVERS.get(backend, []))
        assert how.capabilities is capabilities(backend) is ENGINES.get(backend, ENGINES["transformers"])
        assert how.decided == (backend != "auto")


@pytest.mark.parametrize("backend", sorted(ENGINES))
def test_prefetch_is_taken_by_engines_that_sample_ahead_and_refused_by_the_others(backend):
    given = {"backend": backend, "servers": SERVERS.get(backend, []), "prefetch": 1}
    if ENGINES[backend].samples_ahead:
        assert RolloutSection(**given).prefetch == 1
    else:
        with pytest.raises(ValueError, match="prefetch"):
            RolloutSection(**given)


@pytest.mark.parametrize(
    ("on_gpu", "vllm_installed", "servers", "expected"),
    [
        (True, True, False, "vllm"),
        (True, False, False, "transformers"),
        (False, True, False, "transformers"),
        (False, False, True, "vllm-server"),
        (True, True, True, "vllm-server"),
    ],
)
def test_auto_is_the_servers_else_vllm_on_a_gpu_else_transformers(
    monkeypatch, on_gpu, vllm_installed, servers, expected
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: vllm_installed or None)
    assert best_backend(on_gpu=on_gpu, servers=servers) == expected
