"""A whole training step of a pretrained model of 135M beside TRL's trainer: rollouts, rewards, gradient, update.

Run as ``python benchmarks/real_step.py --model SmolLM2-135M-Instruct --gsm8k FOLDER``; the folder of the model is what
``python -m perl.sandbox.smollm2`` makes, the other holds gsm8k_train.jsonl (problem, answer). The script is one that a
user writes for TRL, with two classes renamed: LoRA of rank 16 on all linear layers, 8 rows in a micro-batch, rollouts
by transformers, one thread. Each trainer has a process of its own, and they take turns: the same prompts and random
numbers for ours, for TRL's as it is, which recomputes activations, and for TRL's without. Rewards are set, so that
each group has a signal or none. A row that is done is not run again (``--again`` ROW does).

* CPU seconds of a step, the mean of the turns, after a step of two tokens; generation: from token ids to token ids;
  rewards; training: all else of the step.
* limit: how many times TRL's speed a step would be whose training costs nothing, at the generation of now.
* memory: the resident peak of the process within a step, base included.

Prints a table; writes ``results/real_step.json``.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")
os.environ.update(OMP_NUM_THREADS="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

from result_lines import as_lines

RESULTS = Path(__file__).parent / "results" / "real_step.json"
RANK, ROWS_IN_MICRO_BATCH = 16, 8
TYPES = ("float32", "bfloat16")
VARIANTS = ("perl", "TRL", "TRL, no recomputation")
SUMS = [(3, 15), (12, 9), (6, 20)]


@dataclass(frozen=True)
class Workload:
    """A step.

    Attributes:
        name: Of its row.
        prompts: In a step.
        generations: Of each prompt.
        longest: Tokens of a completion, at most.
        kind: Of prompts: ``sums`` after three examples, ``gsm8k``, or ``gsm8k`` after other problems (``long``).
        beta: Weight of the KL term.
        dead: Prompts of a step whose completions all have the same reward.
    """

    name: str
    prompts: int
    generations: int
    longest: int
    kind: str = "gsm8k"
    beta: float = 0.0
    dead: int = 0


GSM8K = Workload("GSM8K, 128 tokens", 4, 4, 128)
WORKLOADS = (
    Workload("few-shot sums, 10 tokens", 8, 8, 10, "sums"),
    GSM8K,
    replace(GSM8K, name="GSM8K, 128 tokens, KL", beta=0.04),
    replace(GSM8K, name="GSM8K, 128 tokens, 3 of 4 groups agree", dead=3),
    Workload("GSM8K, 512 tokens", 2, 4, 512),
    Workload("long prompts, 64 tokens", 2, 8, 64, "long"),
)


def prompts_of(workload: Workload, gsm8k: Path, steps: int) -> list[list[dict[str, str]]]:
    """Conversations, all different."""
    count = workload.prompts * steps
    if workload.kind == "sums":
        shown = [turn for a, b in SUMS for turn in turns(f"What is {a} + {b}?", f"{a + b}")]
        return [[*shown, *turns(f"What is {7 * i % 20} + {3 + i // 2 % 17}?")] for i in range(count)]
    rows = [json.loads(line) for line in (gsm8k / "gsm8k_train.jsonl").open(encoding="utf-8")]
    if workload.kind == "gsm8k":
        return [turns(f"{row['problem']}\n\nPut the final number in \\boxed{{}}.") for row in rows[:count]]
    texts = [
        "\n\n".join(f"{row['problem']} ({row['answer']})" for row in rows[8 * i : 8 * i + 8]) for i in range(count)
    ]
    return [turns(f"Problems with their answers:\n\n{text}\n\nMake up one more.") for text in texts]


def turns(question: str, answer: str | None = None) -> list[dict[str, str]]:
    """Of a conversation."""
    asked = [{"role": "user", "content": question}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


def reward_of(workload: Workload) -> Callable[..., list[float]]:
    """Half of a group is right, or all of it."""

    def reward(completions: list[Any], **_: object) -> list[float]:
        groups = [divmod(i, workload.generations) for i in range(len(completions))]
        return [float(group < workload.dead or place % 2) for group, place in groups]

    return reward


class Clock:
    """CPU seconds of parts of a step, by wrapping what does them."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.clear()

    def clear(self) -> None:
        """Begins a step."""
        self.seconds = {"generation": 0.0, "rewards": 0.0}
        self.tokens: list[int] = []

    def watch(self, trainer: Any, method: str, part: str) -> None:  # noqa: ANN401 (either trainer)
        """Counts calls of a method."""
        inner = getattr(trainer, method)

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            began = time.process_time()
            result = inner(*args, **kwargs)
            self.seconds[part] += time.process_time() - began
            if part == "generation":
                self.tokens = [len(ids) for ids in result[0]]
            return result

        setattr(trainer, method, timed)


def work(name: str, workload: Workload, dtype: str, model: str, gsm8k: Path, steps: int, pipe: Connection) -> None:
    """Trains in a process of its own; each step waits for its turn: (seed, whether TRL recomputes)."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from peft import LoraConfig
    from step_turns import TRAINERS, resident, start_resident_peak
    from transformers import PrinterCallback, TrainerCallback

    prompts, times = prompts_of(workload, gsm8k, steps), 1 if name == "perl" else 2
    size = workload.prompts
    # TRL's trainer has each step's prompts twice, for both of its variants; a step to warm up stands before them
    taken = [prompts[size * step : size * step + size] for step in range(steps) for _ in range(times)]
    asked = [[turns("Hi.")] * size, *taken]
    clock = Clock()

    class Turns(TrainerCallback):
        def on_step_begin(self, *given: Any, **_: Any) -> None:  # noqa: ANN401 (arguments, state, control)
            first = given[1].global_step == 0
            seed, recompute = (0, True) if first else pipe.recv()
            if name == "TRL":
                base = trainer.model
                base.gradient_checkpointing_enable() if recompute else base.gradient_checkpointing_disable()
            trainer.generation_config.max_new_tokens = 2 if first else workload.longest
            torch.manual_seed(seed)
            clock.clear()
            ctypes.CDLL(None).malloc_trim(0)  # what earlier steps left free is not of this step
            start_resident_peak()
            self.began = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            total = time.process_time() - self.began
            self.found = {"total": total, **clock.seconds, "peak MB": resident("VmHWM") / 1e6}
            self.found["tokens"] = sum(clock.tokens)

        def on_log(self, *given: Any, logs: dict[str, Any], **_: Any) -> None:  # noqa: ANN401
            if given[1].global_step > 1 and "grad_norm" in logs:
                pipe.send(self.found | {"grad_norm": float(logs["grad_norm"]), "loss": float(logs["loss"])})

    kind, arguments = TRAINERS[name]
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=model,
            reward_funcs=reward_of(workload),
            args=arguments(
                folder,
                per_device_train_batch_size=ROWS_IN_MICRO_BATCH,
                gradient_accumulation_steps=size * workload.generations // ROWS_IN_MICRO_BATCH,
                num_generations=workload.generations,
                max_completion_length=workload.longest,
                max_steps=len(asked),
                beta=workload.beta,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                shuffle_dataset=False,
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": dtype},
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for step in asked for prompt in step]),
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        clock.watch(trainer, "_generate_single_turn", "generation")
        clock.watch(trainer, "_calculate_rewards", "rewards")
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Turns())
        trainer.train()


def measure(workload: Workload, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row: steps of all three, in turns."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in ("perl", "TRL"):
        pipes[name], theirs = context.Pipe()
        given = (name, workload, dtype, arguments.model, arguments.gsm8k, arguments.steps, theirs)
        processes.append(context.Process(target=work, args=given, daemon=True))
        processes[-1].start()
        theirs.close()
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for step in range(arguments.steps):
        for variant in VARIANTS if step % 2 == 0 else VARIANTS[::-1]:
            pipe = pipes["perl" if variant == "perl" else "TRL"]
            pipe.send((1000 + step, variant == "TRL"))
            found[variant].append(pipe.recv())
    for process in processes:
        process.join()
    row = {"workload": asdict(workload), "type": dtype, "steps": found}
    for variant, steps in found.items():
        mean = {key: statistics.mean(step[key] for step in steps) for key in ("total", "generation", "rewards")}
        training = mean["total"] - mean["generation"] - mean["rewards"]
        row[variant] = {**mean, "training": training, "peak MB": max(step["peak MB"] for step in steps)}
    return row


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    ours, theirs, kept = (row[variant] for variant in VARIANTS)
    return (
        f"{row['workload']['name']:40} {row['type']:9} {theirs['total'] / ours['total']:6.1f} "
        f"{kept['total'] / ours['total']:6.1f} {theirs['generation'] / ours['generation']:6.1f} "
        f"{theirs['training'] / ours['training']:6.1f} {ours['generation'] / ours['total']:6.0%} "
        f"{theirs['total'] / ours['generation']:6.1f} {ours['total']:7.1f} {theirs['total']:7.1f} {kept['total']:7.1f} "
        f"{ours['peak MB']:7.0f} {theirs['peak MB']:7.0f} {kept['peak MB']:7.0f}"
    )


HEADER = (
    f"{'times the speed of TRL':50} {'as is':>6} {'no rec':>6} {'gener.':>6} {'train':>6} {'share':>6} {'limit':>6} "
    f"{'CPU s':>7} {'TRL':>7} {'no rec':>7} {'MB':>7} {'TRL':>7} {'no rec':>7}"
)


def main() -> None:
    """Measures what was not measured, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder of gsm8k_train.jsonl")
    parser.add_argument("--steps", type=int, default=2, help="turns of each")
    parser.add_argument("--again", nargs="+", default=[], metavar="ROW", help="rows to measure again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the rows")
    arguments = parser.parse_args()
    rows = {f"{workload.name}, {dtype}": (workload, dtype) for workload in WORKLOADS for dtype in TYPES}
    if not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"--model {arguments.model}: no model is there; python -m perl.sandbox.smollm2 FOLDER makes it")
    if not (arguments.gsm8k / "gsm8k_train.jsonl").is_file():
        parser.error(f"--gsm8k {arguments.gsm8k}: it holds no gsm8k_train.jsonl")
    if unknown := [name for name in arguments.again if name not in rows]:
        parser.error(f"--again {unknown[0]!r} is no row; rows are " + "; ".join(rows))
    if not arguments.results.absolute().parent.is_dir():
        parser.error(f"--results {arguments.results}: its folder does not exist")
    known = json.loads(arguments.results.read_text(encoding="utf-8")) if arguments.results.is_file() else {}
    print(HEADER)
    for name, (workload, dtype) in rows.items():
        if name not in known or name in arguments.again:
            known[name] = measure(workload, dtype, arguments)
            arguments.results.write_text(as_lines(known) + "\n", encoding="utf-8")
        print(line(known[name]), flush=True)
    for variant in VARIANTS[1:]:
        times = sorted(row[variant]["total"] / row["perl"]["total"] for row in known.values())
        print(f"beside {variant}: {times[0]:.1f} to {times[-1]:.1f}, median {statistics.median(times):.1f}")


if __name__ == "__main__":
    main()
