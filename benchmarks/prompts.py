"""What remembering prompts, replacing groups without variance and a curriculum do for accuracy, per sample and second.

Run as ``python benchmarks/prompts.py``. The policy begins as an adapter that solves additions, so that of the problems
a third is solved, a fifth is out of reach, and the rest lies between; the column ``level`` says which. Every way of
choosing prompts is trained with each seed on the same problems for the same number of steps, all ways of a seed before
the next seed, and scored every few steps on the same held-out problems with the same seeds of their samples, outside of
the time that is counted. Seconds are those of the process's processor, which other programs change less than the
clock's. Prints a table, writes ``results/prompts.json`` and ``results/prompts.png``.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import numpy as np

from perl.sandbox.tasks import Problem, addition, multiplication, split_of

RESULTS = Path(__file__).parent / "results"
PROMPTS, COMPLETIONS = 8, 8
# A third of the quickstart's, with which all ways learn what there is to learn in a dozen steps, within one lap.
RATE = 3e-4
PLAIN = "plain"
CHOICES: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "memory": ("prompts.memory=true",),
    "refill": ("prompts.refill=1.0",),
    "memory + refill": ("prompts.memory=true", "prompts.refill=1.0"),
    "curriculum": ("prompts.curriculum=level",),
}
COLOURS = dict(zip(CHOICES, ("#555555", "#1f77b4", "#d62728", "#9467bd", "#2ca02c"), strict=True))
Task = Callable[[random.Random], Problem]


def long_addition(rng: random.Random) -> Problem:
    """Two numbers of four digits, of which the base has seen none."""
    a, b = rng.randint(1000, 9999), rng.randint(1000, 9999)
    return Problem(f"{a}+{b}=", str(a + b), "")


def long_multiplication(rng: random.Random) -> Problem:
    """Four digits times one, of which the base has seen none."""
    a, b = rng.randint(1000, 9999), rng.randint(2, 9)
    return Problem(f"{a}*{b}=", str(a * b), "")


def chained(least: int, most: int) -> Task:
    """Sums and differences of so many terms beside the first, as the sandbox's own."""

    def problem(rng: random.Random) -> Problem:
        total = rng.randint(1, 40)
        question = str(total)
        for _ in range(rng.randint(least, most)):
            term = rng.randint(1, 19)
            sign = rng.choice([s for s in (1, -1) if 0 <= total + s * term <= 99])
            question, total = f"{question}{'+' if sign > 0 else '-'}{term}", total + sign * term
        return Problem(f"{question}=", str(total), "")

    return problem


# Level, share of the problems, what they are.
LEVELS: tuple[tuple[int, float, Task], ...] = (
    (1, 0.3, addition),
    (2, 0.2, multiplication),
    (2, 0.2, chained(3, 5)),
    (3, 0.1, chained(6, 8)),
    (4, 0.1, long_addition),
    (4, 0.1, long_multiplication),
)


def write_problems(path: Path, split: str, count: int) -> None:
    """Writes different problems of all levels, in a random order, the same at every call."""
    rng = random.Random(split)  # noqa: S311 (problems, not secrets)
    rows = list[dict[str, Any]]()
    for level, share, task in LEVELS:
        found: dict[str, Problem] = {}
        while len(found) < round(share * count):
            problem = task(rng)
            if split_of(problem.question) == split:
                found[problem.question] = problem
        rows += [{"prompt": p.question, "answer": p.answer, "level": level} for p in found.values()]
    rng.shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def overrides_of(data: Path, seed: int, arguments: argparse.Namespace) -> list[str]:
    """Of the quickstart, for all ways of choosing prompts alike."""
    return [
        f"peft.adapter={data / 'start' / 'adapter'}",
        f"data.train={data / 'train.jsonl'}",
        f"data.eval={data / 'heldout.jsonl'}",
        "rollout.max_completion_length=96",
        f"train.prompts_per_step={PROMPTS}",
        f"train.num_generations={COMPLETIONS}",
        f"train.learning_rate={RATE}",
        f"train.max_steps={arguments.steps}",
        f"train.seed={seed}",
        "train.report_to=[]",
        "train.save_strategy=no",
        "eval.enabled=false",
    ]


def run_once(name: str, seed: int, data: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains once and scores on the way; runs in a process of its own."""
    import warnings

    from transformers import PrinterCallback, TrainerCallback, TrainerState

    from perl import PeftGRPOTrainer
    from perl.data import render_prompts
    from perl.errors import PerlError
    from perl.evaluation.scoring.protocol import Protocol
    from perl.evaluation.tasks.heldout import evaluate_policy
    from perl.policy.model import load_base
    from perl.training.prepare import prepare, read_recipe

    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"choice": name, "seed": seed}

    class Scores(TrainerCallback):  # type: ignore[misc]  # of a library without types
        """Held-out accuracy every few steps, and what the steps before it took."""

        def __init__(self) -> None:
            self.curve = list[dict[str, float]]()
            self.cpu = self.wall = 0.0

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.score(0)

        def on_step_end(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
            if state.global_step % arguments.every == 0 or state.global_step == arguments.steps:
                self.cpu, self.wall = self.cpu + time.process_time() - self.since[0], self.wall + self.clock()
                self.score(state.global_step)

        def clock(self) -> float:
            return time.perf_counter() - self.since[1]

        def score(self, step: int) -> None:
            protocol = Protocol(k=1, max_new_tokens=96)
            was_training = trainer.model.training
            trainer.model.eval()
            found = evaluate_policy(trainer.model, plan.tokenizer, prompts, protocol)
            trainer.model.train(was_training)
            self.curve.append({"step": step, "accuracy": found.accuracy, "cpu": self.cpu, "wall": self.wall})
            self.since = time.process_time(), time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = [*overrides_of(data, seed, arguments), *CHOICES[name]]
            plan = prepare(read_recipe("quickstart", settings, Path(folder) / "run"))
            prompts = render_prompts(plan.problems.heldout, plan.tokenizer)
            trainer = PeftGRPOTrainer(
                model=load_base(plan.recipe.model, plan.arguments.device, plan.arguments.strategy),
                reward_funcs=[reward.function for reward in plan.rewards],
                args=plan.arguments,
                train_dataset=plan.problems.train,
                processing_class=plan.tokenizer,
            )
            trainer.remove_callback(PrinterCallback)
            scores = Scores()
            trainer.add_callback(scores)
            trainer.train()
        except (PerlError, RuntimeError, ValueError) as error:
            return {**row, "error": f"{type(error).__name__}: {error}"}
        log = [line for line in trainer.state.log_history if "reward" in line and "train_runtime" not in line]
    return {**row, **measured(scores.curve, log)}


def measured(curve: list[dict[str, float]], log: list[dict[str, float]]) -> dict[str, Any]:
    """What is kept of a run.

    Args:
        curve: Scores on the way.
        log: What the trainer logged of each step.
    """
    own = PROMPTS * COMPLETIONS
    samples = [own + line.get("refill/samples", 0.0) for line in log]
    total = [0.0, *itertools.accumulate(samples)]
    first = [line.get("refill/flat_before", line["frac_reward_zero_std"]) for line in log]
    trained = [line["frac_reward_zero_std"] for line in log]
    return {
        "curve": [{**point, "samples": total[int(point["step"])]} for point in curve],
        "flat_first": first,
        "flat_trained": trained,
        "with_variance": sum(PROMPTS * (1 - share) for share in trained),
        "resting": [
            line["prompts/resting_solved"] + line["prompts/resting_hopeless"]
            for line in log
            if "prompts/resting_solved" in line
        ],
    }


def at(run: dict[str, Any], what: str, amount: float) -> float:
    """Accuracy after so many samples, or seconds, between scores on a straight line; after the last one it stays."""
    curve = run["curve"]
    return float(np.interp(amount, [p[what] for p in curve], [p["accuracy"] for p in curve]))


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Mean over the seeds, with its standard error."""
    several = len(values) > 1
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) if several else None


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each choice: what it reaches, at which cost, and beside plain prompts at the same cost, seed by seed."""
    plain = {row["seed"]: row for row in rows if row["choice"] == PLAIN and "curve" in row}
    lines = []
    for name in CHOICES:
        runs = [row for row in rows if row["choice"] == name and "curve" in row]
        if not runs:
            continue
        line: dict[str, Any] = {"choice": name, "seeds": len(runs)}
        line["failed"] = sum(row["choice"] == name for row in rows) - len(runs)
        last = [run["curve"][-1] for run in runs]
        line["accuracy"], line["accuracy_stderr"] = mean_and_error([point["accuracy"] for point in last])
        for what in ("samples", "cpu", "wall"):
            line[what] = statistics.mean(point[what] for point in last)
        line["flat_at_start"] = statistics.mean(statistics.mean(run["flat_first"][:3]) for run in runs)
        line["flat_first"] = statistics.mean(statistics.mean(run["flat_first"]) for run in runs)
        line["flat_trained"] = statistics.mean(statistics.mean(run["flat_trained"]) for run in runs)
        line["with_variance_per_1000_samples"] = statistics.mean(
            1000 * run["with_variance"] / point["samples"] for run, point in zip(runs, last, strict=True)
        )
        paired = [(run, plain[run["seed"]]) for run in runs if run["seed"] in plain]
        for what in ("samples", "cpu"):
            for share in (0.5, 1.0):
                gains = []
                for run, other in paired:
                    # Of the shorter one: no curve is looked at behind its end.
                    amount = share * min(other["curve"][-1][what], run["curve"][-1][what])
                    gains.append(at(run, what, amount) - at(other, what, amount))
                if gains:
                    key = f"gain_at_{'half' if share < 1 else 'all'}_{what}"
                    line[key], line[f"{key}_stderr"] = mean_and_error(gains)
        lines.append(line)
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy against samples and against seconds: the mean of the seeds, and each of them faintly."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    axis_of = {"samples": "completions sampled", "cpu": "seconds of the processor, without scores"}
    for axes, (what, label) in zip(panels, axis_of.items(), strict=True):
        for name, colour in COLOURS.items():
            runs = [row for row in rows if row["choice"] == name and "curve" in row]
            if not runs:
                continue
            for run in runs:
                points = [[point[key] for point in run["curve"]] for key in (what, "accuracy")]
                axes.plot(*points, color=colour, alpha=0.2, linewidth=0.8)
            steps = zip(*(run["curve"] for run in runs), strict=True)
            means = [[statistics.mean(p[key] for p in points) for key in (what, "accuracy")] for points in steps]
            axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.8, label=name)
        axes.set_xlabel(label, fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy", fontsize=9)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def show(lines: list[dict[str, Any]]) -> None:
    """Prints the table."""
    print(
        f"\n{'choice':16} {'accuracy':>13} {'samples':>8} {'cpu s':>6} {'at start':>8} {'flat first':>10} "
        f"{'flat trained':>12} {'groups/1000':>11}   {'gain at half, at all samples':32} gain at half, at all seconds"
    )
    for line in lines:

        def shown(key: str, line: dict[str, Any] = line) -> str:
            error = line.get(f"{key}_stderr")
            return f"{line[key]:+.3f}" + ("" if error is None else f" ± {error:.3f}") if key in line else "-"

        gains = [
            f"{shown(f'gain_at_half_{what}')}, {shown(f'gain_at_all_{what}')}".ljust(32) for what in ("samples", "cpu")
        ]
        accuracy = f"{line['accuracy']:.3f} ± {line['accuracy_stderr'] or 0:.3f}"
        print(
            f"{line['choice']:16} {accuracy:>13} {line['samples']:>8.0f} {line['cpu']:>6.1f} "
            f"{line['flat_at_start']:>8.2f} {line['flat_first']:>10.2f} {line['flat_trained']:>12.2f} "
            f"{line['with_variance_per_1000_samples']:>11.1f}   {gains[0]} {gains[1]}"
        )


def write(path: Path, rows: list[dict[str, Any]], arguments: argparse.Namespace, load: list[float]) -> None:
    """Writes all there is so far."""
    from perl.run.folder import installed_versions

    settings = {name: getattr(arguments, name) for name in ("steps", "every", "train", "heldout", "jobs")}
    facts = {"settings": settings, "load_at_begin_and_end": [load, list(os.getloadavg())]}
    result = {"summary": summary(rows), **facts, "versions": installed_versions(), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(result) + "\n", encoding="utf-8")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES, metavar="CHOICE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=3, help="steps between scores")
    parser.add_argument("--train", type=int, default=64, help="problems to train on")
    parser.add_argument("--heldout", type=int, default=300, help="problems to score on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for prompts.json and prompts.png")
    parser.add_argument("--draw", action="store_true", help="only print and draw what was measured before")
    arguments = parser.parse_args()
    kept, load = arguments.results / "prompts.json", list(os.getloadavg())
    rows = json.loads(kept.read_text(encoding="utf-8"))["rows"] if arguments.draw else []
    if not arguments.draw:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(Path(folder), arguments, lambda found: write(kept, found, arguments, load))
    show(summary(rows))
    draw(rows, arguments.results / "prompts.png")


def measure(
    data: Path, arguments: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """All runs, as many at a time as there are jobs."""
    write_problems(data / "train.jsonl", "train", arguments.train)
    write_problems(data / "heldout.jsonl", "heldout", arguments.heldout)
    todo = list(itertools.product(arguments.seeds, arguments.choices))
    rows = list[dict[str, Any]]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        pool.submit(solves_additions, data / "start").result()
        jobs = [pool.submit(run_once, name, seed, data, arguments) for seed, name in todo]
        for count, job in enumerate(jobs, start=1):
            row = job.result()
            rows.append(row)
            found = row["error"][:90] if "error" in row else f"{row['curve'][-1]['accuracy']:.3f}"
            print(f"{count:>3}/{len(jobs)} {row['choice']:16} {row['seed']} {found}", flush=True)
            keep(rows)
    return rows


def solves_additions(output: Path) -> None:
    """Trains the adapter that all begin with, so long that about half of the groups have no variance at first."""
    import perl

    settings = ["train.seed=7", "train.max_steps=30", "train.report_to=[]", "eval.enabled=false"]
    perl.train("quickstart", settings, output)


if __name__ == "__main__":
    main()
