"""What ``perl plan`` predicts of a training step beside what is measured: peak memory, FLOPs, seconds.

Run as ``python benchmarks/plan.py`` on a CPU: random Qwen2-shaped models from 1 to 100 million parameters in float32,
rollouts by transformers, then forward and backward passes of ``PeftGRPOTrainer``. Each case is trained in a process of
its own and planned in another one, from a recipe, with ``--run`` (the lengths that were sampled) and ``--measure``.

* memory: the largest resident size of a step, above that of the process after a tiny training and before the model.
  Freed tensors go back to the system at once there, so the peak is of those in use.
* FLOPs: of a step under the counter of ``step_flops.py``, rollouts included.
* seconds: of the processor, of one thread, in the second step; whether the predicted range, from passes that were timed
  in the same way, contains them. On an idle machine they are the wall's; on a shared one the wall's say nothing.

``--quick`` runs the smallest case alone. Prints a table; writes ``results/plan.json``, where
cases that are not run stay as they were.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1", TQDM_DISABLE="1")

import step_turns
import torch
from datasets import Dataset
from step_flops import counter
from step_turns import Begin, End, Meter, Unhashed, resident
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from perl import PeftGRPOTrainer
from perl.run.folder import installed_versions
from perl.sandbox import BASE_FOLDER
from perl.training import forecast
from perl.training.forecast import answer
from perl.training.forecast_text import forecast_values
from perl.training.prepare import read_recipe, training_arguments

RESULTS = Path(__file__).parent / "results"
M_MMAP_THRESHOLD = -3  # of malloc.h
STEPS = 3  # the first warms up, the last is counted


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    Attributes:
        name: As it is printed.
        width: Of the residual stream.
        layers: How many.
        vocabulary: Size of the head.
        prompts: In a step, with ``generations`` completions each.
        prompt: Tokens of a prompt.
        completion: The most tokens of a completion; nearly all have as many.
        method: Of the adapter.
        beta: Weight of the KL term.
    """

    name: str
    width: int
    layers: int
    vocabulary: int
    prompts: int
    generations: int
    prompt: int
    completion: int
    method: str = "lora"
    beta: float = 0.0


MIDDLE = Case("9M", 256, 8, 8192, 4, 8, 32, 96)
CASES = (
    Case("1M", 128, 4, 2048, 4, 8, 16, 64),
    MIDDLE,
    replace(MIDDLE, name="9M, long prompts", prompt=384, completion=48),
    replace(MIDDLE, name="9M, long completions", prompts=2, completion=384),
    replace(MIDDLE, name="9M, KL", beta=0.04),
    *(replace(MIDDLE, name=f"9M, {method}", method=method) for method in ("dora", "pissa", "adalora", "ia3", "vera")),
    Case("34M", 512, 8, 8192, 4, 4, 32, 96),
    Case("106M", 768, 12, 8192, 2, 4, 32, 64),
)


def recipe_of(case: Case, folder: Path) -> dict[str, Any]:
    """What ``perl train`` would be given."""
    return {
        "model": {"name": str(folder / "model")},
        "peft": {"method": case.method},
        "data": {"train": str(folder / "data.jsonl"), "chat": False},
        "train": {
            "prompts_per_step": case.prompts,
            "num_generations": case.generations,
            "max_steps": STEPS,
            "beta": case.beta,
            "save_strategy": "no",
            "logging_steps": 1,
        },
        "rollout": {"backend": "transformers", "max_completion_length": case.completion},
        "eval": {"enabled": False},
        "engine": {"device": "cpu", "threads": torch.get_num_threads()},
    }


def write_inputs(case: Case, folder: Path) -> None:
    """A model of random weights, its tokenizer, and prompts of words that stand for nothing."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=3 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(10, (64, case.prompt), generator=generator).tolist()
    lines = [json.dumps({"prompt": "".join(map(str, row)), "answer": "1"}) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")


def alternating(completions: list[Any], **_: object) -> list[float]:
    """Every other completion is right, so that each group has a gradient."""
    return [float(place % 2) for place in range(len(completions))]


def train(case: Case, folder: Path, threads: int) -> dict[str, Any]:
    """Runs the steps and returns what was measured; in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    set_conditions()
    with tempfile.TemporaryDirectory() as tiny:
        small = replace(case, width=64, layers=1, prompt=4, completion=4, vocabulary=256)
        write_inputs(small, Path(tiny))
        run_steps(small, Path(tiny))
    gc.collect()
    before = resident("VmRSS")
    meter, trainer = run_steps(case, folder)
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in logs), encoding="utf-8")
    return {
        "memory": max(meter.totals[:-1]) - before,
        "seconds": min(meter.seconds[1:-1]),
        "load": os.getloadavg()[0],
        "flops": meter.watch.get_total_flops(),
    }


def set_conditions() -> None:
    """The same for steps and for the passes that rates are from, in this process from now on.

    Freed tensors go back to the system at once, so that the peak of memory is of those in use, which takes time; and
    time is what the processor did.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    clock = SimpleNamespace(perf_counter=time.process_time)
    step_turns.time = forecast.time = clock


def run_steps(case: Case, folder: Path) -> tuple[Meter, PeftGRPOTrainer]:
    """Trains, and counts the last step."""
    recipe = read_recipe(recipe_of(case, folder))
    lines = (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()
    meter = Meter(on_cuda=False)
    meter.watch, meter.watched = counter(), STEPS - 1
    trainer = PeftGRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=alternating,
        args=training_arguments(recipe, str(folder / "out")),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        callbacks=[Begin(meter)],
    )
    trainer.add_callback(End(meter))
    trainer.add_callback(Unhashed(trainer))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return meter, trainer


def plan(case: Case, folder: Path, threads: int) -> dict[str, Any]:
    """What is predicted, with rates measured here; in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    set_conditions()
    recipe = read_recipe(recipe_of(case, folder), ["engine.strategy=ddp"])
    forecast = answer(recipe, run=str(folder / "run"), measured=True)
    measured = forecast_values(forecast)
    column = measured["strategies"]["ddp"]
    # Of tensors: what is measured is neither what the libraries hold nor the gaps of a heap.
    tensors = replace(forecast.strategies["ddp"].memory, on_cpu=False, context=0.0)
    return {
        "memory": tensors.least,
        "parts": column["memory"],
        "flops": sum(column["process_flops"].values()),
        "seconds": column["step_seconds"],
        "rates": measured["measured"],
        "tokens": measured["tokens"] | {"source": measured["tokens"]["source"].replace(f"{folder}{os.sep}", "")},
    }


def alone(function: Any, *arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """In a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return pool.submit(function, *arguments).result()


def measure(case: Case, threads: int) -> dict[str, Any]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(case, folder)
        trained = alone(train, case, folder, threads)
        planned = alone(plan, case, folder, threads)
    low, high = planned["seconds"]
    return {
        "case": asdict(case),
        "measured": trained,
        "planned": planned,
        "memory_error": planned["memory"] / trained["memory"] - 1,
        "flops_error": planned["flops"] / trained["flops"] - 1,
        "seconds_within": low <= trained["seconds"] <= high,
    }


HEADER = (
    f"{'case':22} {'MiB':>7} {'plan':>7} {'error':>7} {'GFLOP':>8} {'plan':>8} {'error':>7} {'s':>7} "
    f"{'plan':>16} {'within':>6}"
)


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    ours, theirs = row["planned"], row["measured"]
    low, high = ours["seconds"]
    return (
        f"{row['case']['name']:22} {theirs['memory'] / 2**20:>7,.0f} {ours['memory'] / 2**20:>7,.0f} "
        f"{row['memory_error']:>+7.1%} {theirs['flops'] / 1e9:>8.1f} {ours['flops'] / 1e9:>8.1f} "
        f"{row['flops_error']:>+7.1%} {theirs['seconds']:>7.2f} "
        f"{f'{low:.2f} to {high:.2f}':>16} {'yes' if row['seconds_within'] else 'no':>6}"
    )


def main() -> None:
    """Measures the cases and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="names; all if none is given")
    parser.add_argument("--quick", action="store_true", help="the smallest case alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "plan.json")
    asked = parser.parse_args()
    chosen = CASES[:1] if asked.quick else [c for c in CASES if not asked.cases or c.name in asked.cases]
    print(HEADER)
    found = json.loads(asked.output.read_text(encoding="utf-8"))["rows"] if asked.output.is_file() else []
    rows = {row["case"]["name"]: row for row in found}
    for case in chosen:
        load = os.getloadavg()
        rows[case.name] = measure(case, asked.threads) | {"threads": asked.threads, "load_before": load}
        print(line(rows[case.name]), flush=True)
        facts = {"cores": os.cpu_count(), "taken": time.strftime("%Y-%m-%d"), "versions": installed_versions()}
        ordered = [rows[name] for name in (known.name for known in CASES) if name in rows]
        asked.output.write_text(as_lines({"rows": ordered, **facts}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
