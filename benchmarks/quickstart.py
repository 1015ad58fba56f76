"""What the quickstart achieves and costs, beside TRL's own trainer with the same settings in the same process.

Run as ``python benchmarks/quickstart.py``. For each seed the recipe is trained with ``perl.train`` and then with
``trl.GRPOTrainer``, and both adapters are scored alike. Prints a table and writes ``results/quickstart.json``.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from transformers import PrinterCallback
from trl import GRPOTrainer

import perl
from perl.data import render_prompts
from perl.evaluation.tasks.heldout import evaluate_policy
from perl.methods.settings import adaptation
from perl.policy.model import load_base
from perl.run.folder import installed_versions
from perl.training.prepare import prepare, read_recipe


def with_perl(overrides: list[str], folder: Path) -> dict[str, float]:
    """Trains the quickstart as a user does; the base's score is part of it."""
    run = perl.train("quickstart", overrides, folder)
    score = run.facts["eval"]["sandbox:addition"]
    log = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return {
        "base": score["base"],
        "accuracy": score["adapter"],
        "length before": score["base_length"],
        "length after": score["adapter_length"],
        "training seconds": sum(row["step_time"] for row in log),
        "run seconds": run.facts["seconds"],
    }


def with_trl(overrides: list[str], folder: Path) -> dict[str, float]:
    """The same recipe through TRL's trainer, scored by the same evaluation."""
    recipe = read_recipe("quickstart", overrides, folder)
    plan = prepare(recipe)
    trainer = GRPOTrainer(
        model=load_base(recipe.model, plan.arguments.device),
        reward_funcs=[reward.function for reward in plan.rewards],
        args=plan.arguments,
        train_dataset=plan.problems.train,
        processing_class=plan.tokenizer,
        peft_config=adaptation(recipe.peft).config,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    heldout: Any = plan.problems.heldout
    prompts = render_prompts(list(heldout.select(range(recipe.eval.limit or len(heldout)))), plan.tokenizer)
    score = evaluate_policy(trainer.model, plan.tokenizer, prompts, plan.protocol)
    log = [row for row in trainer.state.log_history if "step_time" in row and "train_runtime" not in row]
    return {
        "accuracy": score.accuracy,
        "length after": score.mean_tokens,
        "training seconds": sum(row["step_time"] for row in log),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="overrides of the recipe")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'seed':>4} {'trainer':8} {'base':>6} {'adapter':>8} {'length':>14} {'training s':>11} {'whole run s':>12}")
    for seed in arguments.seeds:
        overrides = [f"train.seed={seed}", "train.report_to=[]", *arguments.set]
        with tempfile.TemporaryDirectory() as folder:
            ours = with_perl(overrides, Path(folder) / "perl")
            theirs = with_trl(overrides, Path(folder) / "trl")
        for name, row in (("perl", ours), ("TRL", theirs)):
            rows.append({"seed": seed, "trainer": name, **row})
            before = row.get("length before", ours["length before"])
            print(
                f"{seed:>4} {name:8} {ours['base']:>6.3f} {row['accuracy']:>8.3f} "
                f"{before:>6.1f} -> {row['length after']:>4.1f} {row['training seconds']:>11.1f} "
                f"{row.get('run seconds', float('nan')):>12.1f}",
                flush=True,
            )
    seconds = {name: [r["training seconds"] for r in rows if r["trainer"] == name] for name in ("perl", "TRL")}
    ratio = statistics.median(t / p for p, t in zip(seconds["perl"], seconds["TRL"], strict=True))
    print(f"TRL's training seconds over ours, median of the seeds: {ratio:.2f}")
    result = {"rows": rows, "ratio": ratio, "threads": torch.get_num_threads(), "versions": installed_versions()}
    path = Path(__file__).parent / "results" / "quickstart.json"
    path.write_text(as_lines(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
