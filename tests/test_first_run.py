"""The notebook of a first run: well formed, without outputs, and its cells run in order."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

NOTEBOOK = CHECKOUT / "examples" / "first_run.ipynb"
SHORT = 'STEPS = 3\nSCORED = 16\nGPU_STEPS = 1\nOUTPUT = "runs/first_run"\n'
# Runs sources that come as JSON, each under its name, in one namespace, as a kernel does.
KERNEL = """
import json, sys

namespace = {"__name__": "__main__"}
for name, source in json.load(sys.stdin):
    print(f"[{name}]", flush=True)
    exec(compile(source, name, "exec"), namespace)
"""


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


def is_parameters(cell: dict) -> bool:
    return "parameters" in cell["metadata"].get("tags", [])


def test_the_notebook_is_one_of_format_4_5_and_keeps_nothing_that_a_run_printed():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        fields = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            fields |= {"execution_count", "outputs"}
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        assert set(cell) == fields
        assert cell["cell_type"] in ("code", "markdown")
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


def ran_here(sources):
    """What its cells print in a namespace of their own."""
    with (
        pytest.MonkeyPatch.context() as changed,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        changed.setattr("torch.cuda.is_available", lambda: False)
        changed.setattr(sys, "stdin", io.StringIO(json.dumps(sources)))
        Path("kernel.py").write_text(KERNEL)
        runpy.run_path("kernel.py")
    return printed.getvalue()


@pytest.mark.nightly
def test_the_cells_run_in_order_without_a_gpu(cells, tmp_path):
    (parameters,) = filter(is_parameters, cells)
    names = re.compile(r"^(\w+) =", re.MULTILINE)
    assert names.findall(source_of(parameters)) == names.findall(SHORT)  # all of them are replaced
    sources = [
        (cell["id"], SHORT if is_parameters(cell) else source_of(cell)) for cell in cells if cell["cell_type"] == "code"
    ]
    stdout = ran_here(sources)
    said = dict(re.findall(r"^\[([\w-]+)\]\n(.*?)(?=^\[|\Z)", stdout, re.MULTILINE | re.DOTALL))
    assert list(said) == [name for name, _ in sources]
    assert said["train"].startswith("done ")
    assert re.findall(r"step +(\d+)  reward", said["curve"]) == ["1", "2", "3"]
    run = json.loads((tmp_path / "runs/first_run/quickstart/run.json").read_text())
    score = run["eval"]["sandbox:addition"]
    drawn: dict[str, list[bool]] = {}
    for line in (tmp_path / "runs/first_run/quickstart/eval/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        drawn.setdefault(sample["policy"], []).append(sample["status"] == "right")
    assert [score["base"], score["adapter"]] == pytest.approx([sum(right) / len(right) for right in drawn.values()])
    assert f"base     {score['base']:.3f} " in said["scores"]
    assert f"adapter  {score['adapter']:.3f} " in said["scores"]
    assert re.search(r"asked +\d+\+\d+=", said["sample"])
    assert re.search(r"verdict +(right|wrong)", said["sample"])
    assert said["gpu"] == "The recipe t4-1.5b-nf4 is not run: there is no CUDA GPU.\n"
