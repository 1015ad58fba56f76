"""How well the live line's time left holds from the tenth step: what it says, against what it took.

``python benchmarks/time_left.py``

runs of the quickstart with and without evaluations between steps -> table, results/time_left.json
"""

import json
import logging
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import perl
from perl.run.folder import installed_versions
from perl.run.tables import plain_table
from perl.run.time_left import TimeLeft

RESULTS = Path(__file__).parent / "results" / "time_left.json"
STEPS = 60
RUNS = {
    "no evaluation": [],
    "an evaluation each 10th step": ["eval.every=10", "eval.tasks=[sandbox:chain]"],
    "an evaluation each 25th step": ["eval.every=25", "eval.tasks=[sandbox:chain]"],
}


def measure(overrides: list[str]) -> dict[str, float]:
    """Errors of the time left at each step from the tenth to the last but five, in percent of what was left."""
    said: list[tuple[int, float, float]] = []
    true_left = TimeLeft.left

    def noted(self: TimeLeft, step: int, last: int) -> float | None:
        found = true_left(self, step, last)
        if found is not None:
            said.append((step, time.monotonic(), found))
        return found

    ended: list[float] = []

    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.match(rf"step {STEPS}/{STEPS} ", record.getMessage()):
                ended.append(time.monotonic())

    logger, handler = logging.getLogger("perl"), Ends()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    TimeLeft.left = noted  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"train.max_steps={STEPS}", "eval.limit=8", "eval.k=1", "engine.threads=1", *overrides]
            perl.train("quickstart", settings, output_dir=Path(folder) / "run")
    finally:
        TimeLeft.left = true_left  # type: ignore[method-assign]
        logger.removeHandler(handler)
    at = {step: (when, left) for step, when, left in said}
    errors = {
        step: 100 * abs(left - (ended[0] - when)) / (ended[0] - when)
        for step, (when, left) in at.items()
        if 10 <= step <= STEPS - 5
    }
    return {
        "at step 10": errors[10],
        "median from step 10": statistics.median(errors.values()),
        "largest from step 10": max(errors.values()),
        "seconds left at step 10": ended[0] - at[10][0],
    }


def main() -> None:
    """Measures, prints, keeps."""
    torch.set_num_threads(1)
    found = {name: measure(overrides) for name, overrides in RUNS.items()}
    names = list(next(iter(found.values())))
    rows = [["run", *names], *([name, *(f"{row[n]:.1f}" for n in names)] for name, row in found.items())]
    print("\n".join(plain_table(rows)))
    print("errors in percent of the time that was left")
    RESULTS.write_text(json.dumps({"steps": STEPS, "runs": found, "versions": installed_versions()}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
