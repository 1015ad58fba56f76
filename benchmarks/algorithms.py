"""What each algorithm achieves on two sandbox tasks, by its name alone.

Run as ``python benchmarks/algorithms.py``. Each recipe is trained with ``algorithm=NAME`` for each seed, and once
without a name; nothing else changes, so a name is measured at the recipe's rate and batch, one update a batch of
rollouts. A name that needs a teacher has the adapter that the recipe trains without a name, with the same seed, and no
reward. The held-out problems are those of the recipe. Prints a table, writes ``results/algorithms.json`` and
``results/algorithms.png``. A run that fails is a row with its error; rows that are not run stay as they were.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

from perl.algorithms.named import ALGORITHMS

# Each with its settings: the second is measured halfway through its 80 steps, where accuracies still differ, on 200 of
# its 500 held-out problems.
RECIPES = {"quickstart": [], "multiplication": ["train.max_steps=40", "eval.limit=200"]}
WITHOUT = "without a name"
RESULTS = Path(__file__).parent / "results"


def run_once(recipe: str, name: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Trains one recipe under one name with one seed; runs in a process of its own."""
    import warnings

    import perl
    from perl.errors import PerlError

    warnings.simplefilter("ignore")
    key = {"recipe": recipe, "algorithm": name, "seed": seed}
    named = [] if name == WITHOUT else [f"algorithm={name}"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = [f"train.seed={seed}", "train.report_to=[]", *RECIPES[recipe], *overrides]
            if name != WITHOUT and ALGORITHMS[name].needs_teacher:
                teacher = perl.train(recipe, settings, Path(folder) / "teacher")
                named += ["rewards.accuracy=null", f"teacher.adapter={teacher.adapter}"]
            run = perl.train(recipe, [*named, *settings], Path(folder) / "run")
        except (PerlError, RuntimeError, ValueError) as error:
            return {**key, "error": f"{type(error).__name__}: {error}"}
        (score,) = run.facts["eval"].values()
        log = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return {
        **key,
        "base": score["base"],
        "accuracy": score["adapter"],
        "stderr": score["stderr"],
        "training_seconds": sum(row["step_time"] for row in log),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over the seeds of each name on each recipe, with the standard error of that mean."""
    lines = []
    for recipe in RECIPES:
        for name in (WITHOUT, *ALGORITHMS):
            own = [row for row in rows if (row["recipe"], row["algorithm"]) == (recipe, name)]
            accuracies = [row["accuracy"] for row in own if "accuracy" in row]
            if accuracies:
                several = len(accuracies) > 1
                lines.append(
                    {
                        "recipe": recipe,
                        "algorithm": name,
                        "mean": statistics.mean(accuracies),
                        "stderr": statistics.stdev(accuracies) / math.sqrt(len(accuracies)) if several else None,
                        "seeds": len(accuracies),
                        "failed": len(own) - len(accuracies),
                        "base": next(row["base"] for row in own if "base" in row),
                        "training_seconds": statistics.median(r["training_seconds"] for r in own if "accuracy" in r),
                    }
                )
    return lines


def earlier_rows(results: Path, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of what was not measured now."""
    if not results.is_file():
        return []
    now = {(row["recipe"], row["algorithm"], row["seed"]) for row in measured}
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if (row["recipe"], row["algorithm"], row["seed"]) not in now]


def write(path: Path, rows: list[dict[str, Any]], jobs: int) -> None:
    """Writes all there is so far, so that nothing is lost if the rest is not measured."""
    from perl.run.folder import installed_versions

    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"summary": summary(rows), "rows": rows, "jobs": jobs, "versions": installed_versions()}
    path.write_text(as_lines(result) + "\n", encoding="utf-8")


def draw(lines: list[dict[str, Any]], rows: list[dict[str, Any]], path: Path) -> None:
    """A panel a recipe: a dot a seed, a bar from the base to the mean with its standard error, sorted by it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    recipes = [recipe for recipe in RECIPES if any(line["recipe"] == recipe for line in lines)]
    longest = max(sum(line["recipe"] == recipe for line in lines) for recipe in recipes)
    size = (5.5 * len(recipes), 0.28 * longest + 1.2)
    figure, panels = pyplot.subplots(1, len(recipes), figsize=size, layout="constrained", squeeze=False)
    for axes, recipe in zip(panels[0], recipes, strict=True):
        ordered = sorted((line for line in lines if line["recipe"] == recipe), key=lambda line: line["mean"])
        base = ordered[0]["base"]
        for place, line in enumerate(ordered):
            whisker = {"xerr": line["stderr"] or 0.0, "ecolor": "#555555"}
            axes.barh(place, line["mean"] - base, left=base, color="#b8d4e8", height=0.65, **whisker)
            key = (recipe, line["algorithm"])
            dots = [r["accuracy"] for r in rows if (r["recipe"], r["algorithm"]) == key and "accuracy" in r]
            axes.plot(dots, [place] * len(dots), "o", color="#1f4e79", markersize=4, alpha=0.8)
        axes.set_yticks(range(len(ordered)), [line["algorithm"] for line in ordered], fontsize=8)
        axes.axvline(base, color="grey", linewidth=1)
        axes.set_title(f"{recipe}, base {base:.3f}", fontsize=9)
        axes.set_xlabel("held-out accuracy; a dot a seed, whisker: standard error of the mean", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [WITHOUT, *ALGORITHMS]
    parser.add_argument("--algorithms", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for algorithms.json and algorithms.png")
    parser.add_argument("--draw", action="store_true", help="only print and draw what was measured before")
    arguments = parser.parse_args()
    kept, measured = arguments.results / "algorithms.json", list[dict[str, Any]]()
    todo = [(r, n, s) for r in arguments.recipes for n in arguments.algorithms for s in arguments.seeds]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        jobs = [] if arguments.draw else [pool.submit(run_once, *what, arguments.set) for what in todo]
        for count, job in enumerate(jobs, start=1):
            row = job.result()
            measured.append(row)
            found = row["error"][:90] if "error" in row else f"{row['accuracy']:.3f}"
            print(f"{count:>3}/{len(jobs)} {row['recipe']:15} {row['algorithm']:22} {row['seed']} {found}", flush=True)
            write(kept, [*measured, *earlier_rows(kept, measured)], arguments.jobs)
    rows = [*measured, *earlier_rows(kept, measured)]
    lines = summary(rows)
    print(f"\n{'recipe':15} {'algorithm':22} {'mean':>6} {'stderr':>7} {'seeds':>5} {'failed':>6} {'seconds':>8}")
    for line in lines:
        print(
            f"{line['recipe']:15} {line['algorithm']:22} {line['mean']:>6.3f} {line['stderr'] or 0:>7.3f} "
            f"{line['seeds']:>5} {line['failed']:>6} {line['training_seconds']:>8.1f}"
        )
    draw(lines, rows, arguments.results / "algorithms.png")


if __name__ == "__main__":
    main()
