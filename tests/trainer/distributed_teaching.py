"""Run by torchrun: two steps with a teacher, by an adapter and by a hint; the adapter before and after, and the log."""

import os
import sys
from pathlib import Path

import torch

from perl import PeftGRPOTrainer
from tests.oracles.two_trainers import train


def main() -> None:
    """``distributed_teaching.py FOLDER TEACHER STRATEGY`` writes a file a process."""
    folder, teacher, strategy = sys.argv[1:]
    torch.set_num_threads(1)
    options = {"reward_weights": [0.0], "gradient_accumulation_steps": 2, "learning_rate": 0.02, "max_steps": 2}
    options |= {"train_tokens_per_microbatch": 60, "strategy": strategy, "optim": "adamw_torch", "adam_epsilon": 1e-4}
    found = {}
    for name, settings in (("adapter", {"teacher_adapter": teacher}), ("hint", {"teacher_hint": "t5 t9 t17"})):
        ours = train(PeftGRPOTrainer, **options, **settings)
        logged = [entry["teacher/kl"] for entry in ours.history if "teacher/kl" in entry]
        found[name] = ((ours.pages[0], ours.pages[-1]), logged)
    torch.save(found, Path(folder) / f"{strategy}-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
