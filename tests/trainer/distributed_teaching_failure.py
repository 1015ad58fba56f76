"""Run by torchrun: the second process has a row of which no prompt of the teacher can be made; what each raises.

With an adapter instead that is the policy's own at its start: what each raises in the first step.
"""

import copy
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from tests.oracles.two_trainers import QUIET, base, tokenizer


def main() -> None:
    """``distributed_teaching_failure.py FOLDER [ADAPTER]`` writes a file a process."""
    folder, *adapter = sys.argv[1:]
    taught = {"teacher_adapter": adapter[0]} if adapter else {"teacher_hint": "t5"}
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    trainer = PeftGRPOTrainer(
        model=copy.deepcopy(base(torch.float32)),
        args=PeftRLConfig(folder, **{**QUIET, "per_device_train_batch_size": 8, "max_completion_length": 8}, **taught),
        train_dataset=Dataset.from_dict({"prompt": ["t3 t4"] * 16}),
        processing_class=tokenizer(),
    )
    row = {"prompt": "t3" if rank == "0" else []}
    try:
        if adapter:
            trainer.train()
        else:
            trainer.optimizer_step.add_prompts([row], {"prompt_ids": torch.zeros(1, 1)})
    except PerlError as error:
        (Path(folder) / f"{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main()
