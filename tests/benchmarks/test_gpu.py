"""``benchmarks/gpu.py``: stages that fail cost themselves only, what is measured stays, and planted defects are found.

The runner is tested with stages that crash and hang, in which a module of no weight stands for torch.
"""

import argparse
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import gpu
import pytest
import torch
from gpu import Stage
from gpu_stages import OF_THE_STAGE, attention_cases

from perl.packing.attention import packed_attention

CPU = torch.device("cpu")
LIMIT = 8.0  # of stages that hang: time enough to begin on a busy machine
TORCH = """
__version__ = "{version}"
class device:
    def __init__(self, name): self.type = name
class version: cuda = None
class cuda: is_available = staticmethod(lambda: False)
"""
FAKES = {
    # Takes three cases, one of which fails until a file is there, and writes down what it takes.
    "good": """
        from pathlib import Path
        HERE = Path(__file__).parent
        def measure(setting):
            def take(case):
                with (HERE / "taken").open("a") as taken: taken.write(case + " ")
                return {"value": case, "ok": True}
            def repaired():
                take("second")
                return {"value": (HERE / "repaired").read_text()}
            cases = {"first": lambda: take("first"), "second": repaired, "third": lambda: take("third")}
            yield from setting.each(cases)
        """,
    "raises": """
        def measure(setting):
            yield {"case": "before", "ok": False}
            raise ValueError("it went\\n wrong")
        """,
    "crashes": """
        import os, signal, sys
        def measure(setting):
            yield {"case": "before"}
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
    "hangs": """
        import time
        def measure(setting):
            yield {"case": "before"}
            time.sleep(600)
        """,
}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A folder of stages, in which torch is a stub."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    table = "def table(rows):\n    return 'TABLE ' + ' '.join(row['case'] for row in rows)\n"
    for name, text in FAKES.items():
        (folder / f"fake_{name}.py").write_text(textwrap.dedent(text) + table)
    (folder / "torch.py").write_text(TORCH.format(version="1"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run(tmp_path: Path, *names: str, again: bool = False) -> int:
    options = {"device": "cpu", "tiny": True, "output": tmp_path / "out", "earlier": None, "minutes": 5.0}
    stages = [Stage(name[0], name, f"fake_{name}", limit=LIMIT, least=1.0) for name in names]
    return gpu.run_stages(stages, argparse.Namespace(**options, again=again))


def found(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "out" / f"{name}.json").read_text())


def test_a_stage_that_fails_keeps_its_rows_and_the_next_one_runs(fakes, tmp_path, capfd):
    (fakes / "repaired").write_text("yes")
    assert run(tmp_path, "raises", "crashes", "hangs", "good") == 1
    ends = {"raises": "ValueError: it went wrong", "crashes": "SIGSEGV", "hangs": "limit"}
    for name, said in ends.items():
        result = found(tmp_path, name)
        assert [row["case"] for row in result["rows"]] == ["before", OF_THE_STAGE]
        assert said in result["rows"][1]["error"]
        assert not result["complete"]
    assert found(tmp_path, "crashes")["rows"][1]["log"][-1] == "last words"
    raised = found(tmp_path, "raises")["rows"][1]["log"]
    assert str(tmp_path) not in "".join(raised)  # results are published
    assert found(tmp_path, "good")["complete"]
    assert "TABLE first second third" in capfd.readouterr().out


def test_the_same_command_goes_on_where_it_was(fakes, tmp_path):
    def taken() -> list[str]:
        known = (fakes / "taken").read_text().split()
        (fakes / "taken").write_text("")
        return known

    assert run(tmp_path, "good") == 1
    assert taken() == ["first", "second", "third"]
    assert "FileNotFoundError" in found(tmp_path, "good")["rows"][1]["error"]
    (fakes / "repaired").write_text("yes")
    assert run(tmp_path, "good") == 0
    assert taken() == ["second"]
    before = found(tmp_path, "good")
    assert run(tmp_path, "good") == 0
    assert (taken(), found(tmp_path, "good")) == ([], before)
    assert run(tmp_path, "good", again=True) == 0
    assert taken() == ["first", "second", "third"]
    (fakes / "torch.py").write_text(TORCH.format(version="2"))
    assert run(tmp_path, "good") == 0
    assert taken() == ["first", "second", "third"]


@pytest.mark.nightly
def test_all_stages_run_small_on_a_cpu_and_all_checks_hold(tmp_path):
    names = ["doctor", "correct", "step", "memory", "train"]
    command = [sys.executable, gpu.__file__, *names, "--tiny", "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "all checks hold" in done.stdout
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == set(names)
    rows = {row["case"]: row for result in results.values() for row in result["rows"]}
    assert [row for row in rows.values() if "error" in row or row.get("ok") is False] == []
    assert rows["pass float32 compiled"]["gradient"] < 1e-5
    assert rows["step beside TRL's, float32"]["difference"] < 1e-5


def wrong_scale(query, key, value, layout, **_):
    return packed_attention(1.05 * query, key, value, layout)


def no_gradient_of_keys(query, key, value, layout, **_):
    return packed_attention(query, key + 0.1 * (key - key.detach()), value, layout)


@pytest.mark.parametrize("wrong", [wrong_scale, no_gradient_of_keys])
def test_attention_that_is_wrong_is_found(wrong, monkeypatch):
    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    assert attention_cases.compare(CPU, layout, "float32", 64, (8, 2))["ok"]
    monkeypatch.setattr(attention_cases, "packed_attention", wrong)
    assert not attention_cases.compare(CPU, layout, "float32", 64, (8, 2))["ok"]
