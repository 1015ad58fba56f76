"""Rollouts from vLLM servers: the same training, how fast, and what is left of it when servers die.

Run as ``python benchmarks/rollouts.py``; ``--quick`` for a small run that writes nothing. Starts its own servers of
vLLM on the CPU, one thread each, with the command that ``perl rollout command`` prints; their environment is
``.venv-vllm`` or what PERL_VLLM_ENV names. Three parts:

* training: the quickstart with rollouts from transformers, from one server, and from one server a step ahead
  (``rollout.prefetch: 1``), in turns, for each seed. A seed has the same prompts in all three.
* speed: the same requests to one server and to two, in turns; completions have no end token, so each has its full
  length. The best round counts.
* kills: the quickstart with two servers, undisturbed, and again while one of them is killed in the middle of its
  answers and started again, twice. What was trained on is recorded where the gradient is computed.

Writes ``results/rollouts.json`` and ``results/rollouts.png``; parts that are not run stay as they were.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

from rollout_servers import Killer, RecordingTrainer, Server, servers, trainer_of
from transformers.utils import logging as transformers_logging

import perl
from perl.data import render_prompts
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.vllm.servers import ServerPool
from perl.run.folder import installed_versions
from perl.training.prepare import prepare, read_recipe

RESULTS, PARTS = Path(__file__).parent / "results", ("training", "speed", "kills")
ARMS = {"transformers": None, "server": 0, "server, 1 ahead": 1}
PAIRS = (("transformers", "server"), ("server", "server, 1 ahead"))
COLOURS = {"transformers": "#c55a11", "server": "#1f4e79", "server, 1 ahead": "#548235"}
# Seconds of a unit of work beside nothing else on two cores; they only weigh the estimate.
EXPECTED = {"transformers": 50, "server": 110, "server, 1 ahead": 110, "round": 15, "undisturbed": 110, "killed": 150}
TASK = "sandbox:addition"


class Progress:
    """Says what comes next and about how long all the rest takes."""

    def __init__(self, units: Sequence[str]) -> None:
        """Knows the units of work, in their order."""
        self._left, self._done, self._started = [EXPECTED[unit] for unit in units], 0, time.monotonic()

    def next(self, what: str) -> None:
        """A unit begins."""
        speed = (time.monotonic() - self._started) / self._done if self._done else 1.0
        print(f"[about {sum(self._left) * speed / 60:.0f} min left] {what}", flush=True)
        self._done += self._left.pop(0)


def rollout_settings(found: Sequence[Server], prefetch: int | None) -> list[str]:
    """Overrides of the recipe; ``prefetch`` None: transformers."""
    if prefetch is None:
        return ["rollout.backend=transformers"]
    urls = ",".join(server.url for server in found)
    return ["rollout.backend=vllm-server", f"rollout.servers=[{urls}]", f"rollout.prefetch={prefetch}"]


def train_once(arm: str, seed: int, steps: int, server: Server) -> dict[str, Any]:
    """Trains and scores the quickstart as a user does."""
    settings = [f"train.seed={seed}", f"train.max_steps={steps}", "train.report_to=[]"]
    with tempfile.TemporaryDirectory() as folder:
        run = perl.train("quickstart", [*settings, *rollout_settings([server], ARMS[arm])], Path(folder) / "run")
        log = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    row = {
        "arm": arm,
        "seed": seed,
        "rewards": [line["reward"] for line in log],
        "accuracy": run.facts["eval"][TASK]["adapter"],
        "stderr": run.facts["eval"][TASK]["stderr"],
        "training_seconds": sum(line["step_time"] for line in log),
        "run_seconds": run.facts["seconds"],
    }
    if ARMS[arm] is not None:
        for name in ("rollout/seconds", "sync/seconds"):
            row[name] = sum(line[name] for line in log)
        for name in ("rollout/steps_behind", "sampling/corrected_fraction"):
            row[name] = statistics.mean(line[name] for line in log)
        row["largest_difference"] = max(line["sampling/sampling_logp_difference/max"] for line in log)
    return row


def training(seeds: Sequence[int], steps: int, server: Server, progress: Progress) -> dict[str, Any]:
    """All arms for each seed, in turns, and how they compare with each other."""
    rows = []
    print(f"\n{'rollouts':16} {'seed':>4} {'last ten':>9} {'accuracy':>9} {'training s':>11} {'run s':>6}")
    for seed, arm in itertools.product(seeds, ARMS):
        progress.next(f"training with {arm}, seed {seed}")
        rows.append(row := train_once(arm, seed, steps, server))
        print(
            f"{arm:16} {seed:>4} {statistics.mean(row['rewards'][-10:]):>9.3f} {row['accuracy']:>9.3f} "
            f"{row['training_seconds']:>11.1f} {row['run_seconds']:>6.1f}"
        )
    pairs = [compare(rows, *names) for names in PAIRS]
    for pair in pairs:
        reward, accuracy = (f"{pair[n]:+.4f} ± {pair[f'{n}_stderr'] or math.nan:.4f}" for n in ("reward", "accuracy"))
        ratios = f"{pair['seconds_ratio']:.2f} ({', '.join(f'{ratio:.2f}' for ratio in pair['seconds_ratios'])})"
        print(f"{pair['second']} - {pair['first']}: reward {reward}, accuracy {accuracy}; training seconds x {ratios}")
    return {"rows": rows, "pairs": pairs, "steps": steps}


def compare(rows: list[dict[str, Any]], first: str, second: str) -> dict[str, Any]:
    """Differences between two arms, each the mean of the seeds' with its standard error.

    The difference of a seed is between the mean rewards of all steps, or between accuracies; the seeds are independent,
    the steps of one are not.
    """
    a, b = ([row for row in rows if row["arm"] == arm] for arm in (first, second))
    rewards = [statistics.mean(y["rewards"]) - statistics.mean(x["rewards"]) for x, y in zip(a, b, strict=True)]
    accuracies = [y["accuracy"] - x["accuracy"] for x, y in zip(a, b, strict=True)]
    ratios = [y["training_seconds"] / x["training_seconds"] for x, y in zip(a, b, strict=True)]
    return {
        "first": first,
        "second": second,
        "reward": statistics.mean(rewards),
        "reward_stderr": standard_error(rewards),
        "accuracy": statistics.mean(accuracies),
        "accuracy_stderr": standard_error(accuracies),
        "seconds_ratio": statistics.median(ratios),
        "seconds_ratios": ratios,
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; not known from a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def speed(found: Sequence[Server], rounds: int, tokens: int, progress: Progress) -> dict[str, Any]:
    """Tokens a second from one server and from two, and the processor time that they took."""
    plan = prepare(read_recipe("quickstart"))
    problems = list(plan.problems.train.select(range(32)))
    requests = [Request(tuple(prompt.token_ids), 8) for prompt in render_prompts(problems, plan.tokenizer)]
    sampling = EngineSampling(temperature=1.0, max_completion_length=tokens, end_token_ids=())
    rows = []
    for round_number in range(rounds):
        for count in (1, 2):
            progress.next(f"round {round_number + 1}, servers: {count}")
            used, pool = found[:count], ServerPool([server.url for server in found[:count]], None)
            pool.start(requests[:4], sampling).result()
            cpu, started = sum(server.cpu_seconds() for server in used), time.perf_counter()
            groups = pool.start(requests, sampling).result()
            seconds = time.perf_counter() - started
            cpu = sum(server.cpu_seconds() for server in used) - cpu
            pool.close()
            written = sum(len(sampled.token_ids) for group in groups for sampled in group)
            rows.append({"servers": count, "tokens": written, "seconds": seconds, "cpu_seconds": cpu})
    best = {count: min((r for r in rows if r["servers"] == count), key=lambda r: r["seconds"]) for count in (1, 2)}
    print(f"\n{'servers':>7} {'tokens/s':>9} {'tokens / CPU s':>15} {'cores used':>11}   best of {rounds}")
    for count, row in best.items():
        tokens, seconds, cpu = row["tokens"], row["seconds"], row["cpu_seconds"]
        print(f"{count:>7} {tokens / seconds:>9.0f} {tokens / cpu:>15.0f} {cpu / seconds:>11.2f}")
    ratio = best[1]["seconds"] / best[2]["seconds"]
    print(f"two servers over one: {ratio:.2f}, on {os.cpu_count()} cores for all of it")
    return {"rows": rows, "best": list(best.values()), "ratio": ratio, "cores": os.cpu_count()}


def train_recorded(found: Sequence[Server], steps: int, kill_in: Sequence[int]) -> dict[str, Any]:
    """A run with seed 0 whose first server is killed in the given steps."""
    settings = ["train.seed=0", f"train.max_steps={steps}", "train.report_to=[]", "eval.enabled=false"]
    with tempfile.TemporaryDirectory() as folder:
        plan = prepare(read_recipe("quickstart", [*settings, *rollout_settings(found, 0)], folder))
        trainer = trainer_of(plan, RecordingTrainer)
        killer = Killer(trainer, found[0], kill_in)
        trainer.add_callback(killer)
        started = time.perf_counter()
        trainer.train()
    log = [line for line in trainer.state.log_history if "reward" in line and "train_runtime" not in line]
    return {
        "steps": trainer.state.global_step,
        "prompts": trainer.trained_on,
        "rewards": [line["reward"] for line in log],
        "largest_difference": max(line["sampling/sampling_logp_difference/max"] for line in log),
        "seconds": time.perf_counter() - started,
        "kills": killer.kills,
        **killer.counts,
    }


def kills(found: Sequence[Server], steps: int, kill_in: Sequence[int], progress: Progress) -> dict[str, Any]:
    """A run with kills beside one without: the same steps, the same prompts in the same order, whole groups."""
    for server in found:
        server.wait()
    progress.next("two servers, undisturbed")
    calm = train_recorded(found, steps, ())
    progress.next(f"two servers, one of them killed in the steps {' and '.join(map(str, kill_in))}")
    killed = train_recorded(found, steps, kill_in)
    asked, trained = calm.pop("prompts"), killed.pop("prompts")
    result = {
        "undisturbed": calm,
        "killed": killed,
        "same_prompts_in_the_same_order": sum(a == b for a, b in zip(asked, trained, strict=False)),
        "completions_of_a_step": sorted({len(step) for step in trained}),
        "completions_of_a_prompt": sorted({count for step in trained for count in Counter(step).values()}),
    }
    print(f"\n{'':12} {'steps':>5} {'seconds':>8} {'kills':>6} {'lost':>5} {'asked again':>12}")
    for name in ("undisturbed", "killed"):
        row = result[name]
        print(
            f"{name:12} {row['steps']:>5} {row['seconds']:>8.1f} {len(row['kills']):>6} {row['servers_lost']:>5} "
            f"{row['requests_retried']:>12}"
        )
    print(
        f"killed: {killed['kills']}\n"
        f"trained on the same prompts in the same order: {result['same_prompts_in_the_same_order']} of {steps} steps; "
        f"completions of a step {result['completions_of_a_step']}, of a prompt {result['completions_of_a_prompt']}; "
        f"log-probabilities differ by at most {killed['largest_difference']:.1e}"
    )
    return result


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Reward curves: the seeds' mean in their range; at the right end the held-out accuracies."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axes, arms in zip(panels, PAIRS, strict=True):
        for place, arm in enumerate(arms):
            own = [row for row in rows if row["arm"] == arm]
            steps = range(1, len(own[0]["rewards"]) + 1)
            at_step = list(zip(*(row["rewards"] for row in own), strict=True))
            axes.fill_between(steps, [*map(min, at_step)], [*map(max, at_step)], color=COLOURS[arm], alpha=0.2, lw=0)
            axes.plot(steps, [statistics.mean(s) for s in at_step], color=COLOURS[arm], linewidth=1.5, label=arm)
            for row in own:
                axes.plot(len(steps) * 1.04 + place, row["accuracy"], "o", color=COLOURS[arm], markersize=4)
        axes.set_xlabel("step; at the right the held-out accuracy, a dot a seed")
        axes.legend(loc="lower right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"reward, mean and range of {len(own)} seeds")
    figure.savefig(path, dpi=130)


def keep(part: str, result: dict[str, Any]) -> None:
    """Writes a part's numbers; the other parts stay as they were."""
    path = RESULTS / "rollouts.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    earlier |= {part: result, "versions": installed_versions()}
    path.write_text(as_lines(earlier) + "\n", encoding="utf-8")
    if part == "training":
        draw(result["rows"], RESULTS / "rollouts.png")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--quick", action="store_true", help="everything small, to see that it runs; writes nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the training")
    parser.add_argument("--port", type=int, default=8300, help="of the first server; the second has the next one")
    arguments = parser.parse_args()
    quick, parts = arguments.quick, [arguments.only] if arguments.only else list(PARTS)
    seeds, steps, rounds = (arguments.seeds[:2], 3, 1) if quick else (arguments.seeds, 50, 4)
    units = {"training": list(ARMS) * len(seeds), "speed": ["round"] * 2 * rounds, "kills": ["undisturbed", "killed"]}
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    ports = [arguments.port, arguments.port + 1][: 1 if parts == ["training"] else 2]
    with tempfile.TemporaryDirectory() as folder, servers(ports, Path(folder)) as found:
        progress = Progress([unit for part in parts for unit in units[part]])
        for part in parts:
            if part == "training":
                result = training(seeds, steps, found[0], progress)
            elif part == "speed":
                result = speed(found, rounds, 16 if quick else 64, progress)
            else:
                result = kills(found, 8 if quick else 50, (2, 5) if quick else (10, 25), progress)
            if not quick:
                keep(part, result)


if __name__ == "__main__":
    main()
