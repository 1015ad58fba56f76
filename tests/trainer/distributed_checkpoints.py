"""Run by torchrun or alone: trainings of fixed rollouts, whole or gone on with from a checkpoint of other processes.

``distributed_checkpoints.py FOLDER JOBS`` takes a JSON list; each job is a :class:`Job`'s fields. The final adapter is
``FOLDER/NAME.safetensors``, checkpoints are in ``FOLDER/NAME``, and what else was found is ``FOLDER/NAME-RANK.json``.
"""

import copy
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import PrinterCallback

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from perl.methods.registry import METHODS
from perl.policy.attach import adapter_tensors
from perl.trainer import assembly
from tests.oracles.rollouts import GENERATIONS, LONGEST, ROWS, Kinds, preset_reward, rollout_function, rollout_table
from tests.oracles.two_trainers import QUIET, base, tokenizer

STEPS, STOP = 5, 2
# In the second and fourth step the second of two processes has rows without an advantage only.
KINDS: Kinds = (
    ("live", "half", "tenths", "live"),
    ("live", "cut", "dyadic", "tenths"),
    ("cut", "tenths", "live", "dyadic"),
    ("live", "half", "dyadic", "tenths"),
    ("live", "half", "live", "cut"),
)


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        name: Of its files.
        strategy: As ``strategy`` of the arguments.
        method: As ``peft_method``.
        resume: Checkpoint to go on from.
        options: Further arguments.
        dtype: In which the base is loaded.
        greedy: Whether the policy writes greedy completions beside the fixed ones, and rewards are of the tokens.
    """

    name: str
    strategy: str = "ddp"
    method: str = "lora"
    resume: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    greedy: bool = False


def token_reward(completion_ids, **_):
    """Eighths of the first token alone: the likeliest first token is the same under autocast, later ones are not."""
    return [ids[0] % 8 / 8 for ids in completion_ids]


def trainer_of(folder: Path, job: Job) -> PeftGRPOTrainer:
    if job.greedy:  # fixed rollouts are refused, since as a rule nobody knows their likeliest completions
        assembly.check_greedy = lambda _: None
    table = rollout_table(KINDS)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    dealt: list[list[str]] = []
    deal = rollout_function(table, log_probs=False, tools=False)

    def rollouts(prompts, trainer):
        dealt.append(list(prompts))
        return deal(prompts, trainer)

    # As many micro-batches for one process as for two, so that accumulation differs with the batch's size.
    args = {
        **QUIET,
        "optim": "adamw_torch",
        "learning_rate": 0.02,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.5,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": STOP,
        "num_generations": GENERATIONS,
        "per_device_train_batch_size": ROWS // 4,
        "gradient_accumulation_steps": 4 // processes,
        "max_completion_length": LONGEST,
        "train_tokens_per_microbatch": 60,
        "beta": 0.04,
        "seed": 5,
        "strategy": job.strategy,
        "peft_method": job.method,
        **({"peft_rank": 4} if "rank" in METHODS[job.method].settings else {}),
        **job.options,
    }
    trainer = PeftGRPOTrainer(
        model=copy.deepcopy(base(getattr(torch, job.dtype))),
        reward_funcs=token_reward if job.greedy else preset_reward,
        args=PeftRLConfig(str(folder / job.name), **args),
        train_dataset=Dataset.from_dict({"prompt": list(table)}),
        processing_class=tokenizer(),
        rollout_func=rollouts,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.dealt = dealt
    return trainer


def run(folder: Path, job: Job) -> dict[str, Any]:
    """Trains; what one process found."""
    try:
        trainer = trainer_of(folder, job)
        trainer.train(resume_from_checkpoint=job.resume)
    except PerlError as error:
        return {"refused": str(error)}
    if trainer.args.process_index == 0:
        policy = trainer.policy
        tensors = dict(policy.named_parameters()) if job.method == "full" else adapter_tensors(policy)
        save_file(
            {name: t.detach().clone().contiguous() for name, t in tensors.items()}, folder / f"{job.name}.safetensors"
        )
    return {
        "log": [
            {name: entry[name] for name in ("loss", "kl", "grad_norm", "learning_rate") if name in entry}
            for entry in trainer.state.log_history[:-1]
        ],
        "dealt": trainer.dealt,
        "numbers": [torch.rand(1).item()],
    }


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    for job in jobs:
        found = run(folder, Job(**job))
        (folder / f"{job['name']}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
