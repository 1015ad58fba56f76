"""Makes the files of a version, with the code of that version: run folders, adapters, a script's checkpoint.

version -> NEW_FOLDER/{finished,interrupted,adalora,pissa,script}

Run it in an empty folder, with that version's ``src`` as PYTHONPATH: ``python make.py NEW_FOLDER``. Afterwards, to keep
the files small, locks, the finished run's checkpoints, all but the newest of the others', and the pictures and
samples of the runs of two steps were deleted.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset

import perl
from perl.rewards import accuracy_reward
from perl.sandbox import load_problems

RECIPE = """\
extends: quickstart
peft: {method: lora, rank: 2, alpha: 4, target_modules: [v_proj]}
data: {train: {name: sandbox:addition, limit: 64}}
rewards: {accuracy: 1.0, format: 0.2}
train:
  prompts_per_step: 2
  num_generations: 4
  per_device_train_batch_size: 8
  max_steps: 4
  save_steps: 2
  beta: 0.01
rollout: {max_completion_length: 40}
eval: {limit: 4, k: 2}
"""
SHORT = ["train.max_steps=2", "eval.enabled=false"]


def interrupted(folder: Path) -> None:
    """A run that is asked to stop after its second step."""
    command = [sys.executable, "-m", "perl", "train", "recipe.yaml", "--output", str(folder), "--quiet"]
    process = subprocess.Popen(command)
    log = folder / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130


def script(folder: Path, steps: int) -> perl.PeftGRPOTrainer:
    """A trainer as a script makes it; the tests hold the same arguments."""
    problems = load_problems("sandbox:addition", "train")[:32]
    arguments = perl.PeftRLConfig(
        str(folder),
        peft_method="lora",
        peft_rank=2,
        peft_target_modules=["v_proj"],
        prompts_per_step=2,
        num_generations=4,
        max_completion_length=40,
        max_steps=steps,
        save_steps=2,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        beta=0.01,
        use_cpu=True,
        report_to=[],
    )
    data = Dataset.from_list([{"prompt": p.question, "solution": p.answer} for p in problems])
    return perl.PeftGRPOTrainer("sandbox:base", accuracy_reward, arguments, data)


def machine() -> dict[str, str | None]:
    """What decides in which order numbers are added up here."""
    cpu = Path("/proc/cpuinfo")
    vendor = re.search(r"vendor_id\s*: (\w+)", cpu.read_text()) if cpu.is_file() else None
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "instructions": instructions, "vendor": vendor[1] if vendor else None}


def main() -> None:
    """Writes everything below the folder that the command names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    Path("recipe.yaml").write_text(RECIPE)
    (folder / "machine.json").write_text(json.dumps(machine(), indent=1))
    perl.train("recipe.yaml", output_dir=folder / "finished")
    interrupted(folder / "interrupted")
    for method in ("adalora", "pissa"):
        run = perl.train("recipe.yaml", [f"peft.method={method}", *SHORT], folder / method)
        shutil.rmtree(run.checkpoints)
    straight = script(folder / "script", 4)
    straight.train()
    straight.save_adapter(folder / "script" / "adapter")


if __name__ == "__main__":
    main()
