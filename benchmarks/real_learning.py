"""What a real model learns: `perl train real-sums` with five seeds, and two controls that must not learn.

Run as ``python benchmarks/real_learning.py --model SmolLM2-135M-Instruct --runs FOLDER``; the folder of the model is
what ``python -m perl.sandbox.smollm2`` makes. Each row is a process of its own, as a user starts it, and a run that is
done is not run again. Prints a table; writes ``results/real_learning.json`` and a picture of the runs on the sums.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from result_lines import as_lines

from perl.rewards import accuracy_reward

RESULTS = Path(__file__).parent / "results" / "real_learning.json"
SHUFFLED = "real_learning:shuffled_accuracy"
NO_RATE = 1e-12  # a rate of 0 is refused
PARTS = {"train": "train", "eval": "test"}
NOT_TRAINED = "nothing was trained: there was no gradient"
KEYS = ("n", "accuracy", "stderr", "low", "high", "mean_tokens", "truncated")


def shuffled_accuracy(completions: list[Any], solution: list[str], **_: object) -> list[float | None]:
    """The rewards of a batch, each given to a completion by chance: as many are right, and none says which."""
    rewards = accuracy_reward(completions, solution)
    random.Random(repr(completions)).shuffle(rewards)  # noqa: S311 (the same batch, the same order)
    return rewards


@dataclass(frozen=True)
class Row:
    """A run to be made.

    Attributes:
        name: Of its folder.
        kind: ``adapter`` or what the control is.
        recipe: A packaged one.
        overrides: Of the recipe.
    """

    name: str
    kind: str
    recipe: str
    overrides: dict[str, Any]


def rows_of(arguments: argparse.Namespace) -> Iterator[Row]:
    """The runs of the chosen tasks."""
    for task in arguments.tasks:
        recipe, own = (f"real-{task}", {}) if task != "gsm8k" else ("real-sums", gsm8k(arguments.gsm8k))
        for seed in arguments.seeds:
            yield Row(f"{task}-{seed}", "adapter", recipe, {**own, "train": {**own.get("train", {}), "seed": seed}})
        if task == "sums":
            shuffled = {"train": {"seed": 1}, "rewards": {"accuracy": None, SHUFFLED: 1.0}}
            yield Row("sums-shuffled", "shuffled rewards", recipe, shuffled)
            still = {"train": {"seed": 1, "learning_rate": NO_RATE}}
            yield Row("sums-still", f"rate {NO_RATE:g}", recipe, still)


def gsm8k(folder: Path) -> dict[str, Any]:
    """What differs from the sums: data, no examples, completions long enough for 9 of 10 to end, fewer of them."""
    columns = {"prompt": "problem", "answer": "answer"}
    sets = {part: {"name": str(folder / f"gsm8k_{name}.jsonl"), "columns": columns} for part, name in PARTS.items()}
    template = "{prompt}\n\nReason briefly, step by step, and put the final number in \\boxed{{}}."
    return {
        "data": {**sets, "examples": [], "prompt_template": template},
        "train": {"prompts_per_step": 8, "max_steps": 15, "save_steps": 5},
        "rollout": {"max_completion_length": 256},
        "eval": {"limit": 128},
    }


def carried_out(row: Row, model: str, runs: Path) -> dict[str, Any]:
    """Trains and scores in a process of its own; what it found."""
    folder, recipe = runs / row.name, runs / f"{row.name}.yaml"
    usage = runs / f"{row.name}.usage.json"
    if not usage.is_file():
        recipe.write_text(json.dumps({"extends": row.recipe, "model": {"name": model}, **row.overrides}))
        with (runs / f"{row.name}.log").open("w") as log:
            command = [sys.executable, "-m", "perl", "train", str(recipe), "--output", str(folder)]
            paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # of the control
            environment = {**os.environ, "PYTHONPATH": paths.strip(os.pathsep)}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)  # noqa: S603
            _, code, used = os.wait4(process.pid, 0)
        if code and NOT_TRAINED not in Path(log.name).read_text():
            sys.exit(f"{row.name} ended with {os.waitstatus_to_exitcode(code)}: see {log.name}")
        usage.write_text(json.dumps({"cpu seconds": used.ru_utime + used.ru_stime, "peak MB": used.ru_maxrss / 1024}))
    rewards = [json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = json.loads((folder / "run.json").read_text())["seconds"]
    found = {**asdict(row), "rewards": rewards, "seconds": seconds, **json.loads(usage.read_text())}
    results = folder / "eval" / "results.json"
    if not results.is_file():  # it was refused: what of the base's completions was right is in its samples
        right = [json.loads(line)["status"] == "right" for line in (folder / "eval" / "samples.jsonl").open()]
        return {**found, "base": {"n": len(right), "accuracy": sum(right) / len(right)}, "refused": NOT_TRAINED}
    ((task, scores),) = json.loads(results.read_text())["perl"]["tasks"].items()
    return {**found, "task": task} | {kind: {key: scores[kind][key] for key in KEYS} for kind in ("base", "adapter")}


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--runs", type=Path, required=True, help="where the runs are written")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--tasks", nargs="+", default=["sums"], choices=["sums", "stories", "gsm8k"])
    parser.add_argument("--gsm8k", type=Path, help="folder of gsm8k_train.jsonl and gsm8k_test.jsonl (problem, answer)")
    arguments = parser.parse_args()
    if "gsm8k" in arguments.tasks and arguments.gsm8k is None:
        parser.error("--tasks gsm8k needs --gsm8k")
    arguments.runs.mkdir(parents=True, exist_ok=True)
    print(f"{'run':15} {'kind':18} {'base':>13} {'adapter':>13} {'minutes':>8} {'CPU min':>8} {'peak GB':>8}")
    for row in rows_of(arguments):
        found = carried_out(row, arguments.model, arguments.runs)
        scores = [shown(found.get(kind)) for kind in ("base", "adapter")]
        minutes = [found["seconds"] / 60, found["cpu seconds"] / 60, found["peak MB"] / 1024]
        print(
            f"{row.name:15} {row.kind:18} {scores[0]:>13} {scores[1]:>13}", *(f"{m:8.1f}" for m in minutes), flush=True
        )
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        known[row.name] = found
        RESULTS.write_text(as_lines(known))
    draw({name: found for name, found in known.items() if name.startswith("sums")}, RESULTS.with_suffix(".png"))


def shown(score: dict[str, float] | None) -> str:
    """In percent, with its standard error."""
    if score is None:
        return "not trained"
    return f"{100 * score['accuracy']:.1f}" + (f" ± {100 * score['stderr']:.1f}" if "stderr" in score else "")


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Rewards by step, and held-out scores of base and adapter with their 95 % intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2), layout="constrained")
    colours = {"adapter": "tab:blue", "shuffled rewards": "tab:orange"}
    for place, (_, found) in enumerate(sorted(runs.items())):
        colour, rewards = colours.get(found["kind"], "tab:gray"), found["rewards"]
        smooth = [
            sum(rewards[max(i - 4, 0) : i + 1]) / len(rewards[max(i - 4, 0) : i + 1]) for i in range(len(rewards))
        ]
        known = found["kind"] in left.get_legend_handles_labels()[1]
        left.plot(range(1, len(smooth) + 1), smooth, color=colour, label=None if known else found["kind"])
        for kind, shape, shade in (("base", "o", "lightgray"), ("adapter", "s", colour)):
            score = found[kind]
            ends = [[100 * (score["accuracy"] - score["low"])], [100 * (score["high"] - score["accuracy"])]]
            right.errorbar(100 * score["accuracy"], place, xerr=ends, fmt=shape, color=shade)
    left.set(xlabel="step", ylabel="mean reward of a step (mean of 5)", ylim=(0, 1))
    left.legend(loc="upper left")
    right.set(xlabel="right of 256 held-out sums, % (circle: base)", xlim=(0, 100))
    right.set_yticks(range(len(runs)), sorted(runs))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
