"""The training half of a GRPO step beside TRL's trainer: seconds, FLOPs, memory, and whether the gradient is the same.

Run as ``python benchmarks/training_step.py`` on a CPU: random Qwen3-shaped models in float32, LoRA of rank 16 on all
linear layers, SGD, no gradient checkpointing. Completions are random tokens, drawn once with a fixed seed and handed to
both trainers through TRL's ``rollout_func``; 8 prompts with 8 completions a step, micro-batches of 8 rows for TRL.
``--gpu`` runs one case with the shape of Qwen2.5-1.5B in bfloat16 on CUDA, where both trainers checkpoint gradients as
they do by default; without CUDA it runs a toy of it to its end and writes nothing. ``--quick`` runs everything tiny.

* seconds: from the first micro-batch to the optimizer's step, all callbacks included, on the wall's clock. The look-up
  of completions and rewards and their decoding by TRL lie within, alike for both: under one per cent. In one process
  the trainers take turns of ``--steps`` different steps, ``--repeats`` times, each turn from the same adapter. Of each
  step the fastest repeat counts; a second ratio is that of the medians.
* efficiency: the FLOPs that the gradient needs over those executed (``step_flops.py``), counted in a first turn, which
  is not timed.
* memory: how far a step's peak lies above what was there before it: resident memory of a process in which one trainer
  alone has taken a tiny step before, and in which freed tensors go back to the system at once; on CUDA what PyTorch's
  allocator has given out.
* difference: between the updates of the adapter in the first turn, relative to TRL's (Frobenius norms).

Seconds want idle cores: threads that spin while they wait are many times slower beside other work. Prints a table;
writes ``results/training_step.json`` and ``.png`` (``training_step_gpu.json`` on CUDA), where cases that are not run
stay as they were.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from peft import LoraConfig
from step_cases import (
    CASES,
    GENERATIONS,
    GPU_CASE,
    Case,
    Rollout,
    Scale,
    cpu_scale,
    draw_rollouts,
    gpu_scale,
    make_base,
    make_tokenizer,
)
from step_flops import Group, counter, ideal_flops, model_size
from torch.utils.flop_counter import FlopCounterMode
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.run import installed_versions

RANK = 16
M_MMAP_THRESHOLD = -3  # of malloc.h
TRAINERS = {"TRL": (GRPOTrainer, GRPOConfig), "perl": (PeftGRPOTrainer, PeftRLConfig)}
RESULTS = Path(__file__).parent / "results"
PEAK_BF16 = 989e12  # of an H100 or H200, dense, as NVIDIA states it
PUBLISHED = "6.2k tok/s: Qwen3-4B LoRA r16 at 16k tokens on one H100, prime-rl benchmarks 2026-02"


class Meter:
    """Takes the time, the FLOPs and the peak memory of each step of a trainer.

    Attributes:
        on_cuda: Whether the trainer's model is there.
        counter: What counts FLOPs, if something does.
        seconds: Of each step since ``clear``.
        flops: Of each step.
        peaks: Bytes by which the peak of each step lay above what was in use before it; None if they are not told.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        """Nothing taken yet."""
        self.on_cuda = on_cuda
        self.counter: FlopCounterMode | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets the steps taken."""
        self.seconds: list[float] = []
        self.flops: list[int] = []
        self.peaks: list[int | None] = []

    def begin(self) -> None:
        """Called before the first micro-batch of a step."""
        self._in_use = self._start_peak()
        self._flops = self.counter.get_total_flops() if self.counter else 0
        self._started = time.perf_counter()

    def end(self) -> None:
        """Called after the optimizer's step."""
        if self.on_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)
        self.flops.append(self.counter.get_total_flops() - self._flops if self.counter else 0)
        peak = torch.cuda.max_memory_allocated() if self.on_cuda else _resident("VmHWM")
        self.peaks.append(None if self._in_use is None else peak - self._in_use)

    def _start_peak(self) -> int | None:
        """Bytes in use now; the peak is counted from here on."""
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM to VmRSS
        except OSError:
            return None
        return _resident("VmRSS")


def _resident(field: str) -> int:
    """Bytes of this process, on Linux."""
    if not Path("/proc/self/status").is_file():
        return 0
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


class Begin(TrainerCallback):
    """The first of the callbacks, so that what others do at the beginning of a step is measured."""

    def __init__(self, meter: Meter) -> None:
        """Starts this meter."""
        self.on_step_begin = lambda *_, **__: meter.begin()


class End(TrainerCallback):
    """The last of the callbacks."""

    def __init__(self, meter: Meter) -> None:
        """Stops this meter."""
        self.on_step_end = lambda *_, **__: meter.end()


def make_trainer(
    name: str, case: Case, scale: Scale, rollouts: list[Rollout], folder: str
) -> tuple[GRPOTrainer, Meter]:
    """A trainer whose ``train()`` goes through the rollouts once, and what measures its steps."""
    kind, arguments = TRAINERS[name]
    by_prompt = {f"p{place}": rollout for place, rollout in enumerate(rollouts)}

    def rollout_func(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        chosen = [(by_prompt[prompt], place % GENERATIONS) for place, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [rollout.prompt for rollout, _ in chosen],
            "completion_ids": [rollout.completions[place] for rollout, place in chosen],
            "logprobs": None,
            "rewards": [rollout.rewards[place] for rollout, place in chosen],
        }

    def reward(rewards: list[float], **_: object) -> list[float]:
        return list(rewards)

    meter = Meter(on_cuda=not scale.arguments["use_cpu"])
    trainer = kind(
        model=make_base(case, scale),
        reward_funcs=reward,
        args=arguments(
            output_dir=folder,
            per_device_train_batch_size=scale.rows,
            gradient_accumulation_steps=scale.groups * GENERATIONS // scale.rows,
            num_generations=GENERATIONS,
            max_completion_length=case.completions[1],
            max_steps=len(rollouts) // scale.groups,
            beta=case.beta,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **scale.arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(by_prompt)}),
        processing_class=make_tokenizer(case.vocabulary),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        rollout_func=rollout_func,
        callbacks=[Begin(meter)],
    )
    trainer.add_callback(End(meter))
    trainer.remove_callback(PrinterCallback)
    return trainer, meter


def adapter_of(trainer: GRPOTrainer) -> dict[str, torch.nn.Parameter]:
    """What is trained, by name."""
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def take_turn(trainer: GRPOTrainer, meter: Meter, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trains from the given adapter and returns its update; the meter holds the numbers."""
    with torch.no_grad():
        for name, parameter in adapter_of(trainer).items():
            parameter.copy_(start[name])
    meter.clear()
    trainer.train()
    return {
        name: parameter.detach() - start[name].to(parameter.device) for name, parameter in adapter_of(trainer).items()
    }


def count_turn(trainer: GRPOTrainer, meter: Meter, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same under the FLOP counter, which takes time of its own."""
    with counter() as meter.counter:
        update = take_turn(trainer, meter, start)
    meter.counter = None
    return update


def difference(update: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    squares = [((update[name] - p).double().square().sum(), p.double().square().sum()) for name, p in expected.items()]
    return float(sum(s[0] for s in squares) / sum(s[1] for s in squares)) ** 0.5


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


def measure(case: Case, scale: Scale, names: list[str], steps: int, repeats: int) -> dict[str, Any]:
    """A row of the table, without the memory on a CPU."""
    rollouts = draw_rollouts(case, steps * scale.groups)
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: make_trainer(name, case, scale, rollouts, folder) for name in names}
        start = {name: p.detach().clone() for name, p in adapter_of(pairs[names[0]][0]).items()}
        updates = {name: count_turn(*pair, start) for name, pair in pairs.items()}
        executed = {name: sum(meter.flops) for name, (_, meter) in pairs.items()}
        turns: dict[str, list[list[float]]] = {name: [] for name in names}
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
        "difference": difference(updates["perl"], updates["TRL"]) if "TRL" in names else None,
        "trainers": {
            name: {
                # Of each step the fastest or the median repeat, averaged over the steps.
                "seconds": statistics.mean(min(times) for times in zip(*turns[name], strict=True)),
                "median_seconds": statistics.mean(statistics.median(times) for times in zip(*turns[name], strict=True)),
                "turns": turns[name],
                "executed": executed[name] / steps,
                "efficiency": ideal / executed[name],
                "memory": max(pair[1].peaks) if pair[1].on_cuda else None,
            }
            for name, pair in pairs.items()
        },
    }


def tokens_of(groups: list[Group], groups_in_step: int, *, with_reference: bool) -> dict[str, float]:
    """Tokens of a step on average: of TRL's rectangle, of all rows, of rows with a gradient, distinct ones of these."""
    steps = [groups[first : first + groups_in_step] for first in range(0, len(groups), groups_in_step)]
    live = [group for group in groups if group.live or with_reference]
    numbers = {
        "padded": sum(
            GENERATIONS * len(step) * (max(g.prompt for g in step) + max(max(g.completions) for g in step))
            for step in steps
        ),
        "real": sum(GENERATIONS * group.prompt + sum(group.completions) for group in groups),
        "live": sum(GENERATIONS * group.prompt + sum(group.completions) for group in live),
        "distinct": sum(group.prompt + sum(group.completions) for group in live),
    }
    return {name: number / len(steps) for name, number in numbers.items()}


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


def gpu_lines(row: dict[str, Any]) -> Iterator[str]:
    """Throughputs of both trainers."""
    tokens = row["tokens"]
    yield f"{'trainer':8} {'s/step':>9} {'tokens/s':>10} {'live/s':>10} {'MFU':>7} {'efficiency':>10} {'peak GiB':>9}"
    for name, numbers in row["trainers"].items():
        seconds = numbers["seconds"]
        memory = f"{numbers['memory'] / 2**30:>9.1f}" if numbers["memory"] else f"{'-':>9}"
        yield (
            f"{name:8} {seconds:>9.2f} {tokens['real'] / seconds:>10,.0f} {tokens['live'] / seconds:>10,.0f} "
            f"{row['ideal'] / seconds / PEAK_BF16:>7.2%} {numbers['efficiency']:>10.1%} {memory}"
        )
    if "TRL" in row["trainers"]:
        ratio = row["trainers"]["TRL"]["seconds"] / row["trainers"]["perl"]["seconds"]
        yield f"TRL's seconds over ours: {ratio:.2f}; difference of the updates: {row['difference']:.1e}"
    yield "MFU: ideal FLOPs over seconds and 989 TFLOP/s; peak: above the weights and what lay there before the step"
    yield f"for comparison, published: {PUBLISHED}"


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
    path.write_text(json.dumps({**result, **facts}, indent=1) + "\n", encoding="utf-8")


def on_gpu(arguments: argparse.Namespace) -> None:
    """The case of a reasoning model; a toy without CUDA."""
    toy = not torch.cuda.is_available()
    case = GPU_CASE.shorter(256) if toy else GPU_CASE
    if toy:
        print("No CUDA here: this is a TOY of the GPU benchmark, to show that it runs. Its numbers mean nothing.")
    names = ["perl"] if arguments.no_trl else ["TRL", "perl"]
    row = measure(case, gpu_scale(), names, arguments.steps or 1, arguments.repeats or 1)
    print("\n".join(gpu_lines(row)))
    if not toy:
        write(arguments.results / "training_step_gpu.json", row=row, gpu=torch.cuda.get_device_name())


def on_cpu(arguments: argparse.Namespace) -> None:
    """Every case asked for, at every width asked for."""
    widths = [arguments.width] if arguments.width else [64] if arguments.quick else [256, 512]
    cases = [case for case in CASES if arguments.case in (None, case.name)]
    steps, repeats = arguments.steps or 2, arguments.repeats or (1 if arguments.quick else 2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl.trainer.grpo_trainer", "perl.trainer", "datasets", "tokenizers"])
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
                row = measure(shown, scale, list(TRAINERS), steps, repeats)
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
    parser.add_argument("--gpu", action="store_true", help="the shape of Qwen2.5-1.5B in bfloat16 on CUDA")
    parser.add_argument("--quick", action="store_true", help="every case tiny, to see that all runs; writes nothing")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--width", type=int, help="only this one; 256 and 512 else")
    parser.add_argument("--steps", type=int, help="different steps in a turn; 2, with --gpu 1")
    parser.add_argument("--repeats", type=int, help="timed turns of each trainer; 2, with --gpu or --quick 1")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    parser.add_argument("--no-trl", action="store_true", help="with --gpu: our trainer alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for what is written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    (on_gpu if arguments.gpu else on_cpu)(arguments)


if __name__ == "__main__":
    main()
