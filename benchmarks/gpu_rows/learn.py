"""Whole runs that end: ``perl train`` as a user starts it, base and adapter scored.

recipe -> held-out accuracy before and after, seconds of a step

A run is a process of its own; what it says goes into the log.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from gpu_rows.setting import Numbers, Setting
from perl.run.logs import read_log

# What a run of a toy's size changes.
SHORTER = ("train.max_steps=2", "train.prompts_per_step=2", "train.per_device_train_batch_size=16", "eval.limit=8")
# What a pretrained base is trained with; the rest is the quickstart's. Most of its answers never end at first.
REAL = (
    "data.eval=0.25",
    "rewards.soft_overlong=0.2",
    "rollout.max_completion_length=24",
    "train.learning_rate=2e-4",
    "train.max_steps=60",
    "peft.rank=16",
    "peft.alpha=32",
)
LARGEST = 12  # of the numbers that it adds


def sandbox(setting: Setting) -> Numbers:
    """The quickstart: the sandbox's base, 50 steps."""
    return trained(setting, [])


def real(setting: Setting) -> Numbers:
    """A pretrained base from a folder, on sums of small numbers."""
    if setting.base is None:
        return {"skipped": "no --base FOLDER"}
    base, problems = unpacked(setting.base, setting.folder / "base"), setting.folder / "sums.jsonl"
    pairs = itertools.product(range(1, LARGEST + 1), repeat=2)
    lines = [json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) for a, b in pairs]
    problems.write_text("\n".join(random.Random(0).sample(lines, len(lines))), encoding="utf-8")  # noqa: S311
    return trained(setting, [f"model.name={base}", f"data.train={problems}", *REAL])


def unpacked(folder: Path, target: Path) -> Path:
    """A folder that transformers load: as it is, or made of the parts of a .gguf file in the order of their names."""
    if (folder / "config.json").is_file():
        return folder
    target.mkdir()
    with (target / "base.gguf").open("wb") as whole:
        for part in sorted(folder.iterdir()):
            whole.write(part.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(target, gguf_file="base.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        target, gguf_file="base.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).to(torch.bfloat16)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def trained(setting: Setting, settings: list[str]) -> Numbers:
    """Trains the quickstart with some settings of its own, and reads what the run has written."""
    run = setting.folder / "run"
    device = "auto" if setting.on_cuda else "cpu"
    settings = [*settings, *(SHORTER if setting.tiny else ())]
    settings += ["train.report_to=[]", "rollout.backend=transformers", f"engine.device={device}"]
    command = [sys.executable, "-m", "perl", "train", "quickstart", *settings, "--output", str(run)]
    done = subprocess.run(command, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # noqa: S603 (fixed)
    if done.returncode:
        raise RuntimeError(f"perl train ended with exit code {done.returncode}; the log has its words")
    facts, log = json.loads((run / "run.json").read_text(encoding="utf-8")), read_log(run / "metrics.jsonl")
    (scores,) = facts["eval"].values()
    before, after = scores["base"], scores["adapter"]
    seconds = sum(line["step_time"] for line in log)
    numbers = {"status": facts["status"], "steps": facts["steps"], "score_before": before, "score_after": after}
    numbers |= {"seconds_of_steps": seconds, "reward": [line["reward"] for line in log]}
    says = f"{facts['status']}, {facts['steps']} steps in {seconds:.1f} s, held-out {before:.3f} -> {after:.3f}"
    learned = setting.tiny or after > before
    return {**numbers, "ok": facts["status"] == "done" and learned, "says": says}
