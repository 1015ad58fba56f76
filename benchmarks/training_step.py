"""The training half of a GRPO step beside TRL's trainer: seconds, FLOPs, memory, and whether the gradient is the same.

Run as ``python benchmarks/training_step.py`` on a CPU: random Qwen3-shaped models in float32, LoRA of rank 16 on all
linear layers, SGD, no gradient checkpointing. Completions are random tokens, drawn once with a fixed seed and handed to
both trainers through TRL's ``rollout_func``; 8 prompts with 8 completions a step, micro-batches of 8 rows for TRL.
``--quick`` runs everything tiny. The same on a GPU: ``gpu.py``.

* seconds: from the first micro-batch to the optimizer's step, all callbacks included, on the wall's clock. The look-up
  of completions and rewards and their decoding by TRL lie within, alike for both: under one per cent. In one process
  the trainers take turns of ``--steps`` different steps, ``--repeats`` times, each turn from the same adapter. Of each
  step the fastest repeat counts; a second ratio is that of the medians.
* efficiency: the FLOPs that the gradient needs over those executed (``step_flops.py``), counted in a first turn, which
  is not timed.
* memory: how far a step's peak lies above what was there before it: resident memory of a process in which one trainer
  alone has taken a tiny step before, and in which freed tensors go back to the system at once.
* difference: between the updates of the adapter in the first turn, relative to TRL's (Frobenius norms).

Seconds want idle cores: threads that spin while they wait are many times slower beside other work. Prints a table;
writes ``results/training_step.json`` and ``.png``, where cases that are not run stay as they were.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from step_cases import CASES, Case, Scale, cpu_scale, draw_rollouts, make_base
from step_flops import ideal_flops, model_size
from step_turns import RANK, TRAINERS, adapter_of, count_turn, difference, make_trainer, take_turn, tokens_of

from perl.run.folder import installed_versions

M_MMAP_THRESHOLD = -3  # of malloc.h
RESULTS = Path(__file__).parent / "results"


def memory_of(name: str, case: Case, scale: Scale, threads: int) -> int | None:
    """Bytes that a step adds to a process in which one trainer has taken a tiny step; runs in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    if platform.libc_ver()[0] == "glibc":
        # Tensors that are freed go back to the system at once: the peak is of those in use, and the same each time.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    tiny = draw_rollouts(replace(case, prompts=(2, 4), completions=(2, 4), lognormal=None), scale.groups)
    with tempfile.TemporaryDirectory() as folder:
        trainer, meter = make_trainer(name, case, scale, tiny + draw_rollouts(case, scale.groups), folder)
        trainer.train()
    return meter.peaks[-1]


def measure(case: Case, scale: Scale, steps: int, repeats: int) -> dict[str, Any]:
    """A row of the table, without the memory on a CPU."""
    rollouts = draw_rollouts(case, steps * scale.groups)
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: make_trainer(name, case, scale, rollouts, folder) for name in TRAINERS}
        start = {name: p.detach().clone() for name, p in adapter_of(pairs["TRL"][0]).items()}
        updates = {name: count_turn(*pair, start) for name, pair in pairs.items()}
        executed = {name: sum(meter.flops) for name, (_, meter) in pairs.items()}
        turns: dict[str, list[list[float]]] = {name: [] for name in TRAINERS}
        for _ in range(repeats):
            for name, pair in pairs.items():
                take_turn(*pair, start)
                turns[name].append(pair[1].seconds)
    size, groups = model_size(make_base(case, scale, empty=True), RANK), [rollout.lengths for rollout in rollouts]
    ideal = ideal_flops(size, groups, with_reference=case.beta > 0)
    return {
        "case": asdict(case),
        "width": scale.width,
        "steps": steps,
        "repeats": repeats,
        "tokens": tokens_of(groups, scale.groups, with_reference=case.beta > 0),
        "ideal": ideal / steps,
        "difference": difference(updates["perl"], updates["TRL"]),
        "trainers": {
            name: {
                # Of each step the fastest or the median repeat, averaged over the steps.
                "seconds": statistics.mean(min(times) for times in zip(*turns[name], strict=True)),
                "median_seconds": statistics.mean(statistics.median(times) for times in zip(*turns[name], strict=True)),
                "turns": turns[name],
                "executed": executed[name] / steps,
                "efficiency": ideal / executed[name],
            }
            for name in pairs
        },
    }


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    theirs, ours = row["trainers"]["TRL"], row["trainers"]["perl"]
    memory = " ".join(f"{t['memory'] / 2**20:>9,.0f}" if t["memory"] else f"{'-':>9}" for t in (theirs, ours))
    return (
        f"{row['case']['name']:20} {row['width']:>5} {theirs['seconds']:>8.2f} {ours['seconds']:>8.2f} "
        f"{theirs['seconds'] / ours['seconds']:>6.2f} {theirs['median_seconds'] / ours['median_seconds']:>7.2f} "
        f"{theirs['efficiency']:>8.1%} {ours['efficiency']:>8.1%} {memory} {row['difference']:>10.1e}"
    )


HEADER = (
    f"{'case':20} {'width':>5} {'TRL s':>8} {'perl s':>8} {'ratio':>6} {'medians':>7} {'TRL eff':>8} {'perl eff':>8} "
    f"{'TRL MiB':>9} {'perl MiB':>9} {'difference':>10}"
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """How many times faster, and how much of what is executed is needed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = rows[::-1]  # the first on top
    places = range(len(rows))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 0.42 * len(rows) + 1.6), sharey=True, layout="constrained"
    )
    ratios = [row["trainers"]["TRL"]["seconds"] / row["trainers"]["perl"]["seconds"] for row in rows]
    bars = left.barh(places, ratios, color="#1f4e79", height=0.6)
    left.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    left.axvline(1, color="grey", linewidth=1)
    left.set_xlim(0, 1.12 * max(ratios))
    left.set_xlabel("TRL's seconds a step over ours")
    left.set_yticks(places, [f"{row['case']['name']}, {row['width']} wide" for row in rows], fontsize=8)
    for name, offset, colour in (("TRL", 0.2, "#b5b5b5"), ("perl", -0.2, "#1f4e79")):
        shares = [100 * row["trainers"][name]["efficiency"] for row in rows]
        bars = right.barh([place + offset for place in places], shares, color=colour, height=0.36, label=name)
        right.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=7)
    right.set_xlim(0, 112)
    right.set_xlabel("FLOPs that the gradient needs, % of those executed")
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.5 / len(rows)), ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def with_earlier_rows(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows measured now and those of other cases that were measured before, in the table's order."""
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    of = {(row["case"]["name"], row["width"]): row for row in [*earlier, *rows]}
    order = [case.name for case in CASES]
    return sorted(of.values(), key=lambda row: (order.index(row["case"]["name"]), row["width"]))


def write(path: Path, **result: Any) -> None:  # noqa: ANN401
    """The numbers and what they were measured with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"threads": torch.get_num_threads(), "machine": platform.machine(), "versions": installed_versions()}
    path.write_text(as_lines({**result, **facts}) + "\n", encoding="utf-8")


def measure_all(arguments: argparse.Namespace) -> None:
    """Every case asked for, at every width asked for."""
    widths = [arguments.width] if arguments.width else [64] if arguments.quick else [256, 512]
    cases = [case for case in CASES if arguments.case in (None, case.name)]
    steps, repeats = arguments.steps or 2, arguments.repeats or (1 if arguments.quick else 2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl.trainer.grpo_trainer", "perl.trainer.trainer", "datasets", "tokenizers"])
    rows = []
    print(HEADER)
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for case in cases:
            for width in widths:
                if case.widths and not arguments.quick and not arguments.width and width not in case.widths:
                    continue
                shown = case.shorter(8) if arguments.quick else case
                scale = cpu_scale(width, quick=arguments.quick)
                memory = {n: processes.submit(memory_of, n, shown, scale, arguments.threads).result() for n in TRAINERS}
                row = measure(shown, scale, steps, repeats)
                for name, numbers in row["trainers"].items():
                    numbers["memory"] = memory[name]
                rows.append(row)
                print(line(row), flush=True)
                if not arguments.quick:
                    path = arguments.results / "training_step.json"
                    known = with_earlier_rows(rows, path)
                    write(path, rows=known)
                    draw(known, path.with_suffix(".png"))


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every case tiny, to see that all runs; writes nothing")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--width", type=int, help="only this one; 256 and 512 else")
    parser.add_argument("--steps", type=int, help="different steps in a turn; 2")
    parser.add_argument("--repeats", type=int, help="timed turns of each trainer; 2, with --quick 1")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for what is written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    measure_all(arguments)


if __name__ == "__main__":
    main()
