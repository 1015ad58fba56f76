"""What a tiny model learns of its tools, five seeds, beside tools that lie; and seconds of a step beside TRL's trainer.

Run as ``python benchmarks/agents.py --runs FOLDER``; a run that is done is not run again. Prints two tables and writes
``results/agents.json``. The control's tools answer wrongly, so that calling them cannot pay.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
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
SEEDS = range(5)
LIES = {"books": {"agent": {"environment": "agents:LyingBook"}}, "products": {"agent": {"tools": ["agents:multiply"]}}}
STEPS, PROMPTS, GENERATIONS, TOKENS = 4, 8, 8, 160


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


def learned(recipe: str, seed: int, overrides: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a run ended with, of a process of its own."""
    if not (folder / "run.json").exists() or json.loads((folder / "run.json").read_text())["status"] != "done":
        own = {"extends": recipe, **overrides, "train": {"seed": seed, "output_dir": str(folder)}}
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
    return {"status": facts["status"], **kept, **used, "rewards": [round(row["reward"], 4) for row in steps]}


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


def main() -> None:
    """Trains, times, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"perl": [], "trl": []}
    for turn in range(2):  # in turns, so that other load meets both
        for name, kind in (("perl", PeftGRPOTrainer), ("trl", GRPOTrainer)):
            seconds[name] += step_seconds(kind, arguments.runs / f"step-{name}-{turn}")[1:]
    rows = []
    for recipe in ("books", "products"):
        for seed in SEEDS:
            for kind, overrides in (("adapter", {}), ("a tool that lies", LIES[recipe]))[: 2 if seed == 0 else 1]:
                folder = arguments.runs / f"{recipe}-{seed}{'' if kind == 'adapter' else '-lies'}"
                found = learned(recipe, seed, overrides, folder)
                rows.append({"recipe": recipe, "kind": kind, "seed": seed, **found})
                score = "  ".join(
                    "none" if found[who] is None else f"{100 * found[who]:.1f} ± {196 * found[error]:.1f}"
                    for who, error in (("base", "base_stderr"), ("adapter", "stderr"))
                )
                calls = f"{found['calls_first']:.2f} -> {found['calls_last']:.2f}"
                print(f"{recipe:9} {kind:17} seed {seed}  {score}  calls {calls}  {found['status']}", flush=True)
    means = {name: sum(values) / len(values) for name, values in seconds.items()}
    print(f"CPU seconds a step: {means['perl']:.2f}, TRL {means['trl']:.2f}: {means['trl'] / means['perl']:.1f} times")
    result = {"versions": {"torch": torch.__version__}, "step_cpu_seconds": seconds, "runs": rows}
    RESULTS.write_text(as_lines(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
