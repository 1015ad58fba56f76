"""What models learn of their tools, beside tools that lie; and seconds of a step beside TRL's trainer.

Run as ``python benchmarks/agents.py --runs FOLDER`` for the tiny model and five seeds, and with ``--model
SmolLM2-135M-Instruct --seeds 0 1`` for a real one, which ``python -m perl.sandbox.smollm2`` makes. A run that is done
is not run again. Prints tables and writes ``results/agents.json``, of which the other model's part stays. The control's
tools answer wrongly, so that calling them cannot pay.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from result_lines import as_lines
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.rollouts.agents.conversations import words_of
from perl.sandbox import CALLER_NAME, load_problems, model_folder
from perl.sandbox.tools import Book, number_in

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "agents.json"
LIES = {"books": {"agent": {"environment": "agents:LyingBook"}}, "products": {"agent": {"tools": ["agents:multiply"]}}}
STEPS, PROMPTS, GENERATIONS, TOKENS = 4, 8, 8, 160

# A real model is shown two conversations: it was trained on no tools. What it calls in a third turn is not called.
_FIND, _MULTIPLY = ('find(name="{}")', "multiply(a={}, b={})")
SHOWN = {
    "books": (
        ("Number of Lia in book 312?", _FIND.format("Lia"), "4821"),
        ("Number of Tom in book 745?", _FIND.format("Tom"), "1936"),
    ),
    "products": (("31*42=", _MULTIPLY.format(31, 42), "1302"), ("64*29=", _MULTIPLY.format(64, 29), "1856")),
}
REAL = {
    "agent": {"max_turns": 3, "max_turn_length": 24},
    "rollout": {"max_completion_length": 80, "temperature": 0.8},
    "train": {"prompts_per_step": 4, "per_device_train_batch_size": 8, "max_steps": 12, "learning_rate": 3e-4},
    "eval": {"limit": 100, "k": 1, "temperature": 0.8},
}


class LyingBook(Book):
    """A book whose numbers are those of another one."""

    def find(self, name: str) -> str:
        """Finds the number of a name.

        Args:
            name: The name.
        """
        return number_in(f"not {self.book}", name)


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b + 1


class Calculator:
    """Multiplies, and is told the answer."""

    def reset(self, answer: str, **_: object) -> None:
        """Another problem."""
        self.gold, self.given = answer, ""

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a * b

    def answer(self, number: int) -> str:
        """Answers the question.

        Args:
            number: The answer.
        """
        self.given = str(number)
        return "noted"

    def get_reward(self) -> float:
        """1 for the right number, 0 for another or none."""
        return float(self.given == self.gold)


class LyingCalculator(Calculator):
    """A calculator whose products are too large by one."""

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a * b + 1


def of_real(model: str, task: str, environment: str) -> dict[str, Any]:
    """What is changed of the recipe ``books`` for a real model."""
    examples = []
    for asked, call, found in SHOWN[task]:
        examples.append({"prompt": asked, "answer": f"<call>{call}</call>"})
        examples.append({"prompt": f"<result>{found}</result>", "answer": f"<call>answer(number={found})</call>"})
    data = {"train": f"sandbox:{task}", "examples": examples}
    return {**REAL, "model": {"name": model}, "data": data, "agent": {**REAL["agent"], "environment": environment}}


def learned(recipe: str, seed: int, overrides: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run ended with, of a process of its own."""
    if not (folder / "run.json").exists() or json.loads((folder / "run.json").read_text())["status"] != "done":
        train = {**overrides.get("train", {}), "seed": seed, "output_dir": str(folder)}
        own = {"extends": recipe, **overrides, "train": train}
        file = folder.parent / f"{folder.name}.yaml"
        file.write_text(json.dumps(own), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "perl", "train", str(file), "--quiet"]
        began = time.monotonic()
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        print(f"{folder.name}: exit code {made.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    facts = json.loads((folder / "run.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "tools/turns" in row]
    [score] = facts.get("eval", {}).values() or [{}]
    kept = {name: score.get(name) for name in ("base", "base_stderr", "adapter", "stderr", "n")}
    used = {"calls_first": steps[0]["tools/call_frequency"], "calls_last": steps[-1]["tools/call_frequency"]}
    seconds = sum(row["step_time"] for row in steps)
    return {
        "status": facts["status"],
        **kept,
        **used,
        "seconds": round(seconds),
        "rewards": [round(row["reward"], 4) for row in steps],
    }


def one_environment() -> Dataset:
    """Rows as a script has them."""
    problems = load_problems("sandbox:books", "train")[: STEPS * PROMPTS]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": problem.question}]} for problem in problems])


def step_seconds(kind: type[GRPOTrainer], folder: Path) -> list[float]:
    """CPU seconds of each step of a trainer, with the same model, environment and batch."""
    config, own = (PeftRLConfig, {"peft_method": "full"}) if kind is not GRPOTrainer else (GRPOConfig, {})
    args = config(
        str(folder),
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        max_tool_calling_iterations=3,
        learning_rate=1e-5,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=3,
        **own,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder(CALLER_NAME))
    words_of(tokenizer, {})  # TRL refuses a template without tools
    model = AutoModelForCausalLM.from_pretrained(model_folder(CALLER_NAME), dtype=torch.float32)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=one_environment(),
        processing_class=tokenizer,
        environment_factory=Book,
        reward_funcs=lambda completions, **_: [0.1 * len(messages) for messages in completions],
    )
    seconds = [time.process_time()]
    step = trainer.training_step

    def timed(*given: Any, **named: Any) -> Any:  # noqa: ANN401 (TRL's)
        result = step(*given, **named)
        seconds.append(time.process_time())
        return result

    trainer.training_step = timed
    trainer.train()
    return [after - before for before, after in itertools.pairwise(seconds)]


def shown(name: str, kind: str, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """A row of the results, which it prints."""
    score = "  ".join(
        "none" if found[who] is None else f"{100 * found[who]:.1f} ± {196 * found[error]:.1f}"
        for who, error in (("base", "base_stderr"), ("adapter", "stderr"))
    )
    calls = f"{found['calls_first']:.2f} -> {found['calls_last']:.2f}"
    print(f"{name:9} {kind:17} seed {seed}  {score}  calls {calls}  {found['status']}", flush=True)
    return {"recipe": name, "kind": kind, "seed": seed, **found}


def sandbox_rows(runs: Path, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """The tiny model with both recipes, and with tools that lie."""
    for recipe, seed in itertools.product(("books", "products"), seeds):
        yield shown(recipe, "adapter", seed, learned(recipe, seed, {}, runs / f"{recipe}-{seed}"))
        if seed == seeds[0]:
            lies = learned(recipe, seed, LIES[recipe], runs / f"{recipe}-{seed}-lies")
            yield shown(recipe, "a tool that lies", seed, lies)


def real_rows(runs: Path, model: str, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """A real model with both environments, and with one that lies."""
    kinds = [(seed, "adapter") for seed in seeds] + [(seeds[0], "a tool that lies")]
    environments = {
        "products": {"adapter": "agents:Calculator", "a tool that lies": "agents:LyingCalculator"},
        "books": {"adapter": "perl.sandbox.tools:Book", "a tool that lies": "agents:LyingBook"},
    }
    for (seed, kind), task in itertools.product(kinds, environments):
        folder = runs / f"real-{task}-{seed}{'' if kind == 'adapter' else '-lies'}"
        yield shown(task, kind, seed, learned("books", seed, of_real(model, task, environments[task][kind]), folder))


def seconds_of_both(runs: Path) -> dict[str, list[float]]:
    """CPU seconds of steps of our trainer and TRL's, in turns, so that other load meets both."""
    seconds: dict[str, list[float]] = {"perl": [], "trl": []}
    for turn in range(2):
        for name, kind in (("perl", PeftGRPOTrainer), ("trl", GRPOTrainer)):
            seconds[name] += step_seconds(kind, runs / f"step-{name}-{turn}")[1:]
    means = {name: sum(values) / len(values) for name, values in seconds.items()}
    print(f"CPU seconds a step: {means['perl']:.2f}, TRL {means['trl']:.2f}: {means['trl'] / means['perl']:.1f} times")
    return seconds


def main() -> None:
    """Trains, times, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--model", help="folder of a real model; without it: the tiny one")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result["versions"] = {"torch": torch.__version__}
    if arguments.model:
        result["real"] = list(real_rows(arguments.runs, arguments.model, arguments.seeds))
    else:
        result["step_cpu_seconds"] = seconds_of_both(arguments.runs)
        result["runs"] = list(sandbox_rows(arguments.runs, arguments.seeds))
    RESULTS.write_text(as_lines(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
