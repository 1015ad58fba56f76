"""How far an adapter is from that of one uninterrupted process, after a checkpoint was gone on with by other processes.

method x {one process, DDP, ZeRO-2, FSDP2 on two} begins x each of them goes on -> relative difference of the adapters

    python benchmarks/resumed_strategies.py [METHOD...]

Five steps of fixed rollouts with Adam, a schedule and weight decay; the checkpoint is the second step's. Prints a table
and adds it to ``results/resumed_strategies.json``. Within a strategy what is resumed must have the same bits; a method
that a strategy refuses is a row with fewer cells.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from perl.methods.registry import METHODS
from perl.run.folder import installed_versions
from perl.run.tables import plain_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "resumed_strategies.json"

sys.path.insert(0, str(ROOT))
from tests.trainer import test_resumed_processes as resumed  # noqa: E402 (of the checkout)


def measured(method: str) -> dict[str, float | str]:
    """The differences by ``BEGIN-END``; of a strategy that refuses the method its words."""
    with TemporaryDirectory() as place:
        folder, methods = Path(place), {method: resumed.pairs_of(method)}
        found = resumed.matrix(folder, methods)
        differences = resumed.check(folder, methods, found)
    refused = {name: result["refused"] for name, result in found.items() if "refused" in result}
    cells = {**differences, **refused}
    return {name.removeprefix(f"{method}-"): cell for name, cell in cells.items()}


def main() -> None:
    """Trains, goes on, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    asked = parser.parse_args()
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else {}
    table = [["method", "pairs", "largest difference", "of", "within a strategy", "refused by"]]
    for method in asked.methods:
        rows[method] = cells = measured(method)
        numbers = {name: cell for name, cell in cells.items() if isinstance(cell, float)}
        pairs = [name for name in numbers if "-" in name]
        worst = max(numbers, key=lambda name: numbers[name])
        refused = [name for name, cell in cells.items() if isinstance(cell, str)]
        table.append([method, str(len(pairs)), f"{numbers[worst]:.1e}", worst, "same bits", ", ".join(refused) or "-"])
        print(f"{method}: {numbers[worst]:.1e} ({worst})", flush=True)
        RESULTS.write_text(json.dumps({"rows": rows, "versions": installed_versions()}, indent=1) + "\n")
    print("\n".join(plain_table(table)))


if __name__ == "__main__":
    main()
