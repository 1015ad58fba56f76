"""Whether each PEFT method trains a pretrained model of 135M and is what was saved, as plain PEFT and merged.

Run as ``python benchmarks/real_methods.py --model SmolLM2-135M-Instruct``; the folder of the model is what
``python -m perl.sandbox.smollm2`` makes. Every method of the table with its own defaults, on a base in float32 and in
bfloat16, each in a process of its own: a script's ``PeftGRPOTrainer``, three steps, ``save_model``. Differences are of
log-probabilities of sums that the model is shown, in nats, the mean and the largest over tokens:

* moved: the policy after the steps, against the base; 0 would be a method that does not train;
* loaded: the adapter that was saved, by plain PEFT on a fresh base of the same type, against the policy;
* merged: what ``perl export --as merged`` wrote, in float32, against the policy (``full``: not exported).

A row that is done is not run again (``--again`` METHOD does). Prints a table; writes ``results/real_methods.json``.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")
os.environ.update(OMP_NUM_THREADS="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

from perl.methods.registry import METHODS

RESULTS = Path(__file__).parent / "results" / "real_methods.json"
TYPES = ("float32", "bfloat16")
STEPS, PROMPTS, GENERATIONS, TOKENS = 3, 2, 4, 8
RATE = 3e-4  # of LoRA, as recipes/real-sums.yaml has it
SHOWN = "What is {} + {}? {} + {} = {}. The answer is {}.\n"


def row_of(method: str, dtype: str, path: str) -> dict[str, Any]:
    """Trains, saves, loads and merges; runs in a process of its own."""
    began = time.process_time()
    try:
        found = measure(method, dtype, path)
    except Exception as error:  # noqa: BLE001 (whatever fails is the row's result)
        found = {"error": f"{type(error).__name__}: {error}"}
    return {"method": method, "type": dtype, "CPU s": time.process_time() - began, **found}


def measure(method: str, dtype: str, path: str) -> dict[str, Any]:
    """The differences."""
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

    from perl import PeftGRPOTrainer, PeftRLConfig
    from perl.policy.export import export
    from perl.policy.save_adapter import log_probs_in_float32

    torch.set_num_threads(1)
    kind, full = getattr(torch, dtype), method == "full"
    text = "".join(SHOWN.format(a, b, a, b, a + b, a + b) for a, b in ((3, 15), (12, 9), (6, 20), (31, 17)))
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"]

    def differences(one: Any, other: Any) -> dict[str, float]:  # noqa: ANN401 (models)
        apart = (log_probs_in_float32(one.eval(), ids) - log_probs_in_float32(other.eval(), ids)).abs()
        return {"mean": apart.mean().item(), "largest": apart.max().item()}

    def reward(completions: list[Any], **_: object) -> list[float]:
        return [float(place % 2) for place in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = PeftGRPOTrainer(
            model=path,
            reward_funcs=reward,
            args=PeftRLConfig(
                f"{folder}/run",
                peft_method=method,
                learning_rate=RATE * METHODS[method].rate,
                lr_scheduler_type="constant",
                per_device_train_batch_size=PROMPTS * GENERATIONS,
                num_generations=GENERATIONS,
                max_completion_length=TOKENS,
                max_steps=STEPS,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": dtype},
            ),
            train_dataset=Dataset.from_list([{"prompt": text + f"What is {i} + 4?"} for i in range(PROMPTS * STEPS)]),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model(f"{folder}/saved")
        policy = trainer.accelerator.unwrap_model(trainer.model)
        base = AutoModelForCausalLM.from_pretrained(f"{folder}/saved" if full else path, dtype=kind)
        loaded = base if full else PeftModel.from_pretrained(base, f"{folder}/saved")
        found = {"loaded": differences(policy, loaded)}
        found["moved"] = differences(policy, AutoModelForCausalLM.from_pretrained(path, dtype=kind))
        if not full:
            export(f"{folder}/saved", "merged", f"{folder}/merged", "float32", path)
            found["merged"] = differences(policy, AutoModelForCausalLM.from_pretrained(f"{folder}/merged"))
    return found


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    if "error" in row:
        return f"{row['method']:12} {row['type']:9} {row['error'][:130]}"
    cells = [row.get(what) for what in ("moved", "loaded", "merged")]
    parts = [f"{cell['mean']:9.1e} {cell['largest']:9.1e}" if cell else f"{'-':>9} {'-':>9}" for cell in cells]
    return f"{row['method']:12} {row['type']:9} {' '.join(parts)} {row['CPU s']:7.1f}"


def main() -> None:
    """Measures what was not measured, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--again", nargs="+", default=[], choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time, one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the rows")
    arguments = parser.parse_args()
    if not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"--model {arguments.model}: no model is there; python -m perl.sandbox.smollm2 FOLDER makes it")
    if not arguments.results.absolute().parent.is_dir():
        parser.error(f"--results {arguments.results}: its folder does not exist")
    known = json.loads(arguments.results.read_text(encoding="utf-8")) if arguments.results.is_file() else {}
    print(f"{'method':12} {'base':9}" + "".join(f" {what:>9} {'largest':>9}" for what in ("moved", "loaded", "merged")))
    wanted = [(method, dtype) for method in arguments.methods for dtype in TYPES]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        jobs = {
            (method, dtype): pool.submit(row_of, method, dtype, arguments.model)
            for method, dtype in wanted
            if f"{method}, {dtype}" not in known or method in arguments.again
        }
        for method, dtype in wanted:
            if (method, dtype) in jobs:
                known[f"{method}, {dtype}"] = jobs[method, dtype].result()
                arguments.results.write_text(as_lines(known) + "\n", encoding="utf-8")
            print(line(known[f"{method}, {dtype}"]), flush=True)


if __name__ == "__main__":
    main()
