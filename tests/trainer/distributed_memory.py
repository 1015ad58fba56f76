"""Run in each process: a training by a strategy in which memory runs out, in a pass of one process.

``python -m tests.trainer.distributed_memory FOLDER STRATEGY`` writes a JSON file a process.
"""

import json
import os
import sys
from pathlib import Path

import torch

from perl.policy.attach import adapter_tensors
from perl.policy.model import base_of
from tests.trainer.strategies import PPO, found, trainer_of


class Cramped:
    """Runs out of memory once on the second process: in a layer's forward or backward pass, or as it scores.

    With a critic only its passes are counted, in which nothing of the policy's adapter is on.
    """

    def __init__(self, trainer, where: str, after: int) -> None:
        self.left, self.where, self.failures = after, where, 0
        self.critic = trainer.critic_training and trainer.critic_training.critic
        self.rank = trainer.accelerator.process_index
        base_of(trainer.policy).model.layers[1].mlp.register_forward_hook(self.after_forward)

    def after_forward(self, _module, _inputs, output):
        if self.critic is not None and not self.critic_acts():
            return
        if self.where == "backward":
            if output.requires_grad:
                output.register_hook(lambda gradient: self.count() or gradient)
        elif (self.where == "forward") == torch.is_grad_enabled():
            self.count()

    def critic_acts(self) -> bool:
        return any(layer._forward_hooks for layer in self.critic._layers.values())

    def count(self) -> None:
        self.left -= 1
        if self.left == 0 and self.rank == 1:
            self.failures += 1
            raise torch.OutOfMemoryError("simulated")


def main() -> None:
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    results = {}
    cases = {"none": ("forward", -1), "forward": ("forward", 5), "backward": ("backward", 4), "scoring": ("scoring", 9)}
    cases |= {f"critic {name}": case for name, case in cases.items()}
    for name, (where, after) in cases.items():
        with_critic = name.startswith("critic ")
        further = PPO if with_critic else {}
        trainer = trainer_of(str(folder / "base"), folder / name, "lora", strategy=strategy, max_steps=3, **further)
        cramped = Cramped(trainer, where, after)
        trainer.train()
        log = [entry["critic/loss"] for entry in trainer.state.log_history if with_critic and "critic/loss" in entry]
        results[name] = found(trainer) | {
            "critic/loss": log,
            "failures": cramped.failures,
            "tokens": [trainer.log_prob_passes.tokens, trainer.log_prob_passes.tokens_without_gradient],
            "sum": sum(t.double().abs().sum().item() for t in adapter_tensors(trainer.policy).values()),
        }
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
