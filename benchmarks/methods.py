"""What each PEFT method achieves on the quickstart task with its default settings.

Run as ``python benchmarks/methods.py``. Every method of the table is trained for each seed on the quickstart recipe
with its own rank, alpha and targets and its usual learning rate (the recipe's rate for LoRA times the method's rate);
the held-out problems are those of the recipe. Prints a table, writes ``results/methods.json`` and
``results/methods.png``. A run that fails is a row with its error; rows of methods that are not run stay as they were.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

from perl.methods.registry import METHODS

TASK = "sandbox:addition"
# The quickstart's learning rate, which its recipe gives for LoRA.
LORA_RATE = 1e-3
RESULTS = Path(__file__).parent / "results"


def run_once(method: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Trains one method with one seed; runs in a process of its own."""
    import warnings

    import perl
    from perl.errors import PerlError

    warnings.simplefilter("ignore")
    settings = [
        f"peft.method={method}",
        "peft.rank=null",
        "peft.alpha=null",
        f"train.seed={seed}",
        "train.report_to=[]",
    ]
    rate = f"train.learning_rate={LORA_RATE * METHODS[method].rate}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = perl.train("quickstart", [*settings, rate, "train.report_to=[]", *overrides], Path(folder) / "run")
        except (PerlError, RuntimeError, ValueError) as error:
            return {"method": method, "seed": seed, "error": f"{type(error).__name__}: {error}"}
        score = run.facts["eval"][TASK]
        log = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return {
        "method": method,
        "seed": seed,
        "base": score["base"],
        "accuracy": score["adapter"],
        "stderr": score["stderr"],
        "length": score["adapter_length"],
        "learning_rate": LORA_RATE * METHODS[method].rate,
        "trainable_parameters": run.facts["trainable_parameters"],
        "kl": log[-1].get("kl"),
        "training_seconds": sum(row["step_time"] for row in log),
        "reload_difference": run.facts["reload_difference"],
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over the seeds of each method, in the table's order."""
    lines = []
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        good = [row for row in own if "accuracy" in row]
        if good:
            accuracies = [row["accuracy"] for row in good]
            lines.append(
                {
                    "method": method,
                    "mean": statistics.mean(accuracies),
                    "lowest": min(accuracies),
                    "highest": max(accuracies),
                    "seeds": len(good),
                    "failed": len(own) - len(good),
                    "trainable_parameters": good[0]["trainable_parameters"],
                    "learning_rate": good[0]["learning_rate"],
                    "training_seconds": statistics.median(row["training_seconds"] for row in good),
                }
            )
    return lines


def earlier_rows(results: Path, measured: list[str]) -> list[dict[str, Any]]:
    """The rows of methods that were not measured now."""
    if not results.is_file():
        return []
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["method"] not in measured and row["method"] in METHODS]


def draw(lines: list[dict[str, Any]], rows: list[dict[str, Any]], path: Path) -> None:
    """A dot a seed, a bar from the base to the mean, methods sorted by it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    ordered = sorted(lines, key=lambda line: line["mean"])
    base = next(row["base"] for row in rows if "base" in row)
    figure, axes = pyplot.subplots(figsize=(8, 0.28 * len(ordered) + 1.2), layout="constrained")
    for place, line in enumerate(ordered):
        axes.barh(place, line["mean"] - base, left=base, color="#b8d4e8", height=0.65)
        dots = [row["accuracy"] for row in rows if row["method"] == line["method"] and "accuracy" in row]
        axes.plot(dots, [place] * len(dots), "o", color="#1f4e79", markersize=4, alpha=0.8)
    names = [f"{line['method']}  ({line['trainable_parameters']:,})" for line in ordered]
    axes.set_yticks(range(len(ordered)), names, fontsize=8)
    axes.axvline(base, color="grey", linewidth=1)
    axes.text(base, len(ordered) - 0.2, f" base {base:.3f}", fontsize=8, color="grey")
    axes.set_xlim(min(base, *(line["lowest"] for line in lines)) - 0.02, 1.0)
    axes.set_xlabel("held-out accuracy (avg@4, 256 problems), default settings, 50 steps; a dot a seed")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for methods.json and methods.png")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'method':12} {'seed':>4} {'accuracy':>9} {'kl':>8} {'length':>7} {'rate':>8} {'trained':>9} {'seconds':>8}"
    )
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        jobs = [pool.submit(run_once, m, seed, arguments.set) for m in arguments.methods for seed in arguments.seeds]
        for job in jobs:
            row = job.result()
            rows.append(row)
            if "error" in row:
                print(f"{row['method']:12} {row['seed']:>4} {row['error'][:120]}", flush=True)
                continue
            print(
                f"{row['method']:12} {row['seed']:>4} {row['accuracy']:>9.3f} {row['length']:>7.1f} "
                f"{row['learning_rate']:>8.0e} {row['trainable_parameters']:>9,} {row['training_seconds']:>8.1f}",
                flush=True,
            )
    rows += earlier_rows(arguments.results / "methods.json", arguments.methods)
    lines = summary(rows)
    print(f"\n{'method':12} {'mean':>6} {'lowest':>7} {'highest':>8} {'trained':>9} {'seconds':>8}")
    for line in lines:
        print(
            f"{line['method']:12} {line['mean']:>6.3f} {line['lowest']:>7.3f} {line['highest']:>8.3f} "
            f"{line['trainable_parameters']:>9,} {line['training_seconds']:>8.1f}"
        )
    from perl.run.folder import installed_versions

    arguments.results.mkdir(parents=True, exist_ok=True)
    result = {"task": TASK, "summary": lines, "rows": rows, "jobs": arguments.jobs, "versions": installed_versions()}
    (arguments.results / "methods.json").write_text(as_lines(result) + "\n", encoding="utf-8")
    draw(lines, rows, arguments.results / "methods.png")


if __name__ == "__main__":
    main()
