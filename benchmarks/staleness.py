"""Rollouts that are 0, 1, 2 and 4 optimizer steps old: seconds and accuracy of the same training on a vLLM server.

Run as ``python benchmarks/staleness.py``; ``--quick`` for a small run that writes nothing. Starts its own vLLM server
on the CPU, one thread, with the command that ``perl rollout command`` prints; its environment is ``.venv-vllm`` or what
PERL_VLLM_ENV names. Trains the quickstart, in steps of 4 prompts with 8 completions, with ``rollout.prefetch`` and
``rollout.max_staleness`` of each of these numbers, and with 4 once more where requests under way continue
(``rollout.in_flight: continue``), in turns for each seed. A seed has the same prompts in all of them.

Trainer and server share the machine's cores, so seconds say how much of the time they take at once here, not what
servers of their own would gain. Writes ``results/staleness.json`` and ``results/staleness.png``.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

from rollout_servers import Server, servers, trainer_of
from transformers.utils import logging as transformers_logging

from perl.data import render_prompts
from perl.rewards import check
from perl.rollouts.engine import Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.run.folder import installed_versions
from perl.trainer.trainer import PeftGRPOTrainer
from perl.training.plan import Plan
from perl.training.stages import prepare, read_recipe

RESULTS, PROBLEMS = Path(__file__).parent / "results", 200
ARMS = {
    "0": (0, "finish"),
    "1": (1, "finish"),
    "2": (2, "finish"),
    "4": (4, "finish"),
    "4, continue": (4, "continue"),
}
COLOURS = {"0": "#1f4e79", "1": "#548235", "2": "#bf9000", "4": "#c55a11", "4, continue": "#7030a0"}
MEANS = (
    *("rollout/steps_behind", "sampling/staleness/mean"),
    *("sampling/effective_sample_size", "sampling/corrected_fraction"),
)


def train_once(arm: str, seed: int, steps: int, server: Server) -> dict[str, Any]:
    """Trains the quickstart with small steps, and scores it."""
    staleness, in_flight = ARMS[arm]
    settings = [
        f"train.seed={seed}",
        f"train.max_steps={steps}",
        *("train.prompts_per_step=4", "train.num_generations=8", "train.report_to=[]", "eval.enabled=false"),
        "rollout.backend=vllm-server",
        f"rollout.servers=[{server.url}]",
        f"rollout.prefetch={staleness}",
        f"rollout.max_staleness={staleness}",
        f"rollout.in_flight={in_flight}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        plan = prepare(read_recipe("quickstart", settings, folder))
        trainer = trainer_of(plan)
        trainer.train()
    log = [line for line in trainer.state.log_history if "reward" in line and "train_runtime" not in line]
    return {
        "arm": arm,
        "seed": seed,
        "rewards": [line["reward"] for line in log],
        "accuracy": accuracy(trainer, plan),
        "training_seconds": sum(line["step_time"] for line in log),
        "waiting_seconds": sum(line["rollout/seconds"] for line in log),
        "largest_staleness": max(line["sampling/staleness/max"] for line in log),
        "smallest_sample_size": min(line["sampling/effective_sample_size"] for line in log),
        "continued": log[-1].get("rollout/requests_continued", 0.0),
        **{name: statistics.mean(line[name] for line in log) for name in MEANS},
    }


def accuracy(trainer: PeftGRPOTrainer, plan: Plan) -> float:
    """Share of held-out problems that the policy answers rightly with its likeliest tokens, by transformers."""
    problems = list(plan.problems.heldout.select(range(PROBLEMS)))
    requests = [Request(tuple(prompt.token_ids), 1) for prompt in render_prompts(problems, plan.tokenizer)]
    sampling = replace(trainer.rollout_source.sampling, temperature=0.0)
    groups = TransformersEngine(trainer.policy, plan.tokenizer, PROBLEMS).start(requests, sampling).result()
    texts = plan.tokenizer.batch_decode([list(group[0].token_ids) for group in groups], skip_special_tokens=True)
    golds = [problem["solution"] for problem in problems]
    return statistics.mean(verdict.right for verdict in map(check, golds, texts))


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    print(
        f"{row['arm']:12} {row['seed']:>4} {statistics.mean(row['rewards'][-10:]):>9.3f} {row['accuracy']:>9.3f} "
        f"{row['training_seconds']:>11.1f} {row['waiting_seconds']:>10.1f} {row['sampling/staleness/mean']:>10.2f} "
        f"{row['largest_staleness']:>5.0f} {row['sampling/effective_sample_size']:>6.3f} "
        f"{row['smallest_sample_size']:>6.3f} {row['sampling/corrected_fraction']:>10.4f}",
        flush=True,
    )


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward curves, the mean of five steps and of the seeds; beside them each run's seconds and last rewards."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for arm, colour in COLOURS.items():
        own = [row for row in rows if row["arm"] == arm]
        at_step = [statistics.mean(rewards) for rewards in zip(*(row["rewards"] for row in own), strict=True)]
        smooth = [statistics.mean(at_step[max(0, step - 4) : step + 1]) for step in range(len(at_step))]
        left.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=1.5, label=arm)
        seconds = [row["training_seconds"] for row in own]
        right.plot(seconds, [statistics.mean(row["rewards"][-10:]) for row in own], "o", color=colour, markersize=5)
    left.set_xlabel("step")
    left.set_ylabel(f"reward, mean of {len(own)} seeds and five steps")
    left.legend(title="staleness", loc="lower right", frameon=False)
    right.set_xlabel("seconds of training, a dot a run")
    right.set_ylabel("reward, mean of the last ten steps")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="everything small, to see that it runs; writes nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the training")
    parser.add_argument("--steps", type=int, default=30, help="of the training")
    parser.add_argument("--port", type=int, default=8310, help="of the server")
    arguments = parser.parse_args()
    seeds, steps = (arguments.seeds[:1], 6) if arguments.quick else (arguments.seeds, arguments.steps)
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows = []
    most = max(staleness for staleness, _ in ARMS.values())
    with tempfile.TemporaryDirectory() as folder, servers([arguments.port], Path(folder), prefetch=most) as (server,):
        print(
            f"{'staleness':12} {'seed':>4} {'last ten':>9} {'accuracy':>9} {'training s':>11} {'waiting s':>10} "
            f"{'mean steps':>10} {'most':>5} {'ESS':>6} {'least':>6} {'corrected':>10}"
        )
        for seed, arm in itertools.product(seeds, ARMS):
            rows.append(train_once(arm, seed, steps, server))
            show(rows[-1])
    if arguments.quick:
        return
    result = {"rows": rows, "steps": steps, "cores": os.cpu_count(), "load": os.getloadavg()[2]}
    result["versions"] = installed_versions()
    (RESULTS / "staleness.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw(rows, RESULTS / "staleness.png")


if __name__ == "__main__":
    main()
