"""Run in each process of a run: the same training of several methods by a strategy, from fixed rollouts.

``python -m tests.trainer.strategies FOLDER STRATEGY DTYPE REFERENCE METHOD...`` trains the base in ``FOLDER/base``. It
writes for each method the adapter that it ends with, and a JSON file a process: what was logged, the adapter's digest,
or why the method was refused. ``METHOD:ppo`` trains a critic beside it.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PrinterCallback

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from perl.methods.registry import METHODS
from perl.policy.attach import adapter_tensors
from tests.oracles.rollouts import GENERATIONS, LONGEST, preset_reward, rollout_function, rollout_table
from tests.oracles.two_trainers import QUIET, SHARDED, tokenizer

STEPS = 5
PPO = {
    "advantage_estimator": "gae",
    "loss_type": "dapo",
    "critic_rank": 4,
    "critic_learning_rate": 0.02,
    "critic_warmup_steps": 1,
    "num_iterations": 2,
    "adam_epsilon": 1e-3,  # or rounding alone moves numbers whose gradient is 0
}
PROMPTS = 4
KINDS = (*SHARDED, *SHARDED[:2])


def trainer_of(model: Any, folder: Path, method: str, *, dtype: str = "float32", **options: Any) -> PeftGRPOTrainer:
    """A trainer of a step of four prompts, whatever the number of processes."""
    table, world = rollout_table(KINDS), int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        **QUIET,
        "learning_rate": 100 * METHODS[method].learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "num_generations": GENERATIONS,
        "per_device_train_batch_size": GENERATIONS,
        "gradient_accumulation_steps": PROMPTS // world,
        "max_completion_length": LONGEST,
        "train_tokens_per_microbatch": 60,
        "shuffle_dataset": False,
        "beta": 0.04,
        "seed": 5,
        "peft_method": method,
        "model_init_kwargs": {"dtype": dtype} if isinstance(model, str) else None,
        **options,
    }
    trainer = PeftGRPOTrainer(
        model=model,
        reward_funcs=preset_reward,
        args=PeftRLConfig(str(folder / "run"), **settings),
        train_dataset=Dataset.from_dict({"prompt": list(table)}),
        processing_class=tokenizer(),
        rollout_func=rollout_function(table, log_probs=False, tools=False),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained_tensors(trainer: PeftGRPOTrainer) -> dict[str, torch.Tensor]:
    """The adapter's, or without one the model's."""
    policy = trainer.policy
    return adapter_tensors(policy) if isinstance(policy, PeftModel) else dict(policy.named_parameters())


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def found(trainer: PeftGRPOTrainer) -> dict[str, Any]:
    """What a process ends with, after training."""
    names, critic = ("loss", "kl", "grad_norm"), trainer.critic_training
    log = [{name: entry.get(name) for name in names} for entry in trainer.state.log_history if "loss" in entry]
    ends = {"digest": digest_of(trained_tensors(trainer)), "critic": critic and digest_of(critic.critic.state())}
    return {**ends, "log": log, "strategy": trainer.strategy, "base": trainer.base_fingerprint}


def main() -> None:
    folder, (strategy, dtype, reference, *methods) = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    rank, results = os.environ.get("RANK", "0"), {}
    for method in methods:
        name, _, with_critic = method.partition(":")
        further = PPO if with_critic else {}
        try:
            trainer = trainer_of(
                str(folder / "base"),
                folder / method,
                name,
                dtype=dtype,
                strategy=strategy,
                reference=reference,
                **further,
            )
        except PerlError as error:
            results[method] = {"refused": str(error)}
            continue
        trainer.train()
        results[method] = found(trainer)
        if rank == "0":
            tensors = {name: t.detach().clone().contiguous() for name, t in trained_tensors(trainer).items()}
            save_file(tensors, folder / f"{method}.safetensors")
            if trainer.critic_training is not None:
                save_file(trainer.critic_training.critic.state(), folder / f"{method}.critic.safetensors")
    (folder / f"found-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
