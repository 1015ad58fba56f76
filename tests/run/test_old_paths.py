"""Modules of version 0.1 are still found by their names, and the line says where they are now."""

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

import perl
from perl.run.old_paths import MOVED

PACKAGES = {
    "perl.run": "Run",
    "perl.trainer": "PeftGRPOTrainer",
    "perl.training": "train",
    "perl.policy": "adapted_policy",
    "perl.packing": "Row",
    "perl.hub.card": "render_card",
    "perl.hub.push": "push",
    "perl.hub.gate": "gate_mistakes",
    "perl.rewards.process": "process_reward",
    "perl.evaluation.task": "tables_on_demand",
}


# Whose import costs seconds and is seen in the process for good.
LOAD_LIGHTEVAL = {"perl.evaluation.lighteval_process", "perl.evaluation.lighteval_tasks"}


@pytest.fixture(autouse=True)
def forgotten():
    yield
    for name in MOVED:
        sys.modules.pop(name, None)


def test_no_old_name_is_a_public_name_of_today():
    """The import system would put the module in its place, for the rest of the process."""
    assert {f"perl.{name}" for name in perl.__all__} & set(MOVED) == set()


def test_every_module_and_every_name_of_a_package_is_found_where_it_was():
    for name in sorted(set(MOVED) - LOAD_LIGHTEVAL):
        sys.modules.pop(name, None)  # of a package that moved, by the import of a module in it
        parent, _, last = name.rpartition(".")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            old = importlib.import_module(name)
        lines = [str(warning.message) for warning in caught if warning.category is FutureWarning]
        assert f"{name} is now {MOVED[name]} [PRL301]" in lines
        new = importlib.import_module(MOVED[name])
        public = [attribute for attribute in vars(new) if not attribute.startswith("_")]
        assert public or hasattr(new, "__path__"), name
        assert all(getattr(old, attribute) is getattr(new, attribute) for attribute in public), name
        with warnings.catch_warnings(action="ignore"):
            assert getattr(importlib.import_module(parent), last) is old, name
    for package, name in PACKAGES.items():
        found = importlib.import_module(package)
        with pytest.warns(FutureWarning, match=f"{package}.{name} is now perl"):
            assert getattr(found, name) is not None
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = found.no_such_name
    assert [name for name in LOAD_LIGHTEVAL if importlib.util.find_spec(MOVED[name]) is None] == []
    with pytest.raises(ModuleNotFoundError, match=r"perl\.batchings"):
        importlib.import_module("perl.batchings")  # which never was


def test_a_script_sees_one_line_and_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from perl.losses import objective as f\nfrom perl.run import Run\nprint(f.__name__, Run.__name__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "objective Run\n"
    lines = [line for line in done.stderr.splitlines() if "FutureWarning" in line]
    assert len(lines) == 2
    assert "script.py:1" in lines[0]
    assert "perl.algorithms.losses" in lines[0]
    assert "script.py:2" in lines[1]
