"""How far each strategy's adapter is from that of one process: every method, type and reference, on fixed rollouts.

method x {one process, DDP, FSDP2 on two processes} -> relative difference of the adapters after five steps

    python benchmarks/strategies.py [--dtype float32] [--reference base] [METHOD...]

Prints a table and adds it to ``results/strategies.json``. A method is refused at construction or trained; all processes
must end with the same bits.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import method_properties as properties
import torch
from result_lines import as_lines
from safetensors.torch import load_file

from perl.methods.registry import METHODS
from perl.run.tables import plain_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "strategies.json"
RUNS = {"one process": ("ddp", 1), "ddp": ("ddp", 2), "fsdp2": ("fsdp2", 2)}

sys.path.insert(0, str(ROOT))
from tests import warm  # noqa: E402 (of the checkout)


def trained(folder: Path, strategy: str, processes: int, dtype: str, reference: str, methods: list[str]) -> list[dict]:
    """What each process ends with, by method."""
    folder.mkdir()
    (folder / "base").symlink_to(properties.write_model("biases", folder))
    path = os.pathsep.join([str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["-m", "tests.trainer.strategies", str(folder), strategy, dtype, reference, *methods]
    done = warm.run_distributed(arguments, ROOT, processes, {**os.environ, "PYTHONPATH": path}, timeout=3600)
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(processes)]


def difference(one: Path, other: Path) -> float:
    """Norm of the adapters' difference relative to the second one's."""
    ours, theirs = load_file(one), load_file(other)
    if ours.keys() != theirs.keys():
        raise ValueError("other tensors")
    apart = sum((ours[name].double() - theirs[name].double()).square().sum() for name in ours)
    return float(torch.sqrt(apart / sum(tensor.double().square().sum() for tensor in theirs.values())))


def row(method: str, found: dict[str, list[dict]], folder: Path) -> dict[str, object]:
    """The differences from DDP on two processes, or why the method is refused; the KL divergence of the last step."""
    cells: dict[str, object] = {"method": method}
    for name, processes in found.items():
        results = [process[method] for process in processes]
        if "refused" in results[0]:
            cells[name] = results[0]["refused"]
            continue
        if len({result["digest"] for result in results}) != 1:
            cells[name] = "processes differ"
            continue
        cells[name] = difference(folder / name / f"{method}.safetensors", folder / "ddp" / f"{method}.safetensors")
        cells[f"{name}, KL"] = [entry["kl"] for entry in results[0]["log"]]
    return cells


def main() -> None:
    """Trains, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--reference", default="base")
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    asked = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = Path(place)
        found = {
            name: trained(folder / name, *how, asked.dtype, asked.reference, asked.methods)
            for name, how in RUNS.items()
        }
        rows = [row(method, found, folder) for method in asked.methods]
    shown = [[str(r["method"]), *(_shown(r.get(name)) for name in RUNS)] for r in rows]
    print("\n".join(plain_table([["method", *RUNS], *shown])))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[f"{asked.dtype}, reference {asked.reference}"] = rows
    RESULTS.write_text(as_lines(results) + "\n", encoding="utf-8")


def _shown(cell: object) -> str:
    if isinstance(cell, str):
        return "refused" if cell.startswith("strategy") else cell
    return f"{cell:.1e}" if isinstance(cell, float) and cell else "0"


if __name__ == "__main__":
    main()
