"""What users do with a trainer, in every type and way: the full cross of which the tests take a cover of all pairs.

Run as ``python benchmarks/matrix.py``: 360 cells, half of them in two processes. {float32, bfloat16 weights,
bfloat16 autocast} x {recipe, script with a name, script with a model} x {LoRA, DoRA, PiSSA, LN tuning, full} x {plain,
beta 0.04, gradient checkpointing, two iterations} x {1, 2 processes}. Each trains four steps, saves and proves, scores,
resumes from its middle to the same bits, goes on from what was saved, and trains again.

Prints a table and writes ``results/matrix.json``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
SCRIPT = str(Path(__file__).with_name("user_matrix.py"))


def main() -> int:
    """Takes every cell, prints, saves."""
    sys.path.insert(0, str(ROOT))
    from user_matrix import DONE, VALUES

    from perl.run.folder import installed_versions

    started, found = time.perf_counter(), []
    for processes in VALUES[-1]:
        with tempfile.TemporaryDirectory() as place:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command = [sys.executable, "-W", "ignore", *torchrun, SCRIPT, place, "--all"]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT / "src"),
            }
            subprocess.run(command, check=False, env=environment, stderr=subprocess.DEVNULL)  # noqa: S603
            found += [json.loads(line) for line in (Path(place) / "found.jsonl").read_text().splitlines()]
    minutes = (time.perf_counter() - started) / 60
    for i, name in enumerate(("type", "way", "method", "option", "processes")):
        cells: Counter[str] = Counter(str(row[i]) for row in found)
        whole: Counter[str] = Counter(str(row[i]) for row in found if set(row[-1].values()) == {DONE})
        print(f"{name:10}", ", ".join(f"{value} {whole[value]}/{count}" for value, count in cells.items()))
    stopped = [row for row in found if "stopped" in row[-1]]
    for *cell, outcome in stopped:
        print("stopped:", *cell, outcome["stopped"])
    print(f"{len(found) - len(stopped)} of {len(found)} cells whole, {minutes:.0f} minutes")
    results = {"versions": installed_versions(), "minutes": round(minutes, 1), "cells": found}
    (RESULTS / "matrix.json").write_text(json.dumps(results) + "\n")
    return int(bool(stopped))


if __name__ == "__main__":
    sys.exit(main())
