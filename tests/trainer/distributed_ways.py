"""Run in each process: a base in shards as scripts come to it, and a guard that fails on one process only.

``python -m tests.trainer.distributed_ways FOLDER`` writes a JSON file a process.
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig

from perl.errors import BrokenPromiseError, PerlError
from perl.policy.guards import Movement
from perl.run.shards import is_sharded
from perl.trainer.step import optimizer_step
from tests.trainer.strategies import found, trainer_of

STRATEGIES = ("ddp", "fsdp2")
TEXT = torch.arange(2, 26).view(2, 12)


def loaded(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, **options)


def trained(folder: Path, model, name: str, strategy: str = "fsdp2", **options) -> dict:
    trainer = trainer_of(model, folder / name, "lora", strategy=strategy, max_steps=3, **options)
    trainer.train()
    return found(trainer) | {"sharded": is_sharded(trainer.policy)}


def twice(folder: Path, strategy: str) -> dict:
    """A second call goes on; log-probabilities are then asked for, and the adapter is saved."""
    trainer = trainer_of(
        str(folder / "base"), folder / f"twice-{strategy}", "lora", strategy=strategy, max_steps=2, reference="initial"
    )
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train()
    trainer.save_adapter(folder / f"saved-{strategy}")
    asked = TEXT, torch.ones_like(TEXT)
    results = found(trainer) | {"policy": trainer.policy_log_probs(*asked).tolist()}
    return results | {"reference": trainer.reference_log_probs(*asked).tolist()}


class Unchosen(TrainerCallback):
    """From the third step on a layer's tensors have no gradient, as an expert's that no token chooses."""

    def on_pre_optimizer_step(self, _, state, __, model=None, **___):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and state.global_step >= 2 and ".0.self_attn.q_proj." in name:
                parameter.grad = None


def without_some_gradients(folder: Path, strategy: str) -> dict:
    """Weight decay and momentum would move a tensor that has no gradient, if it were taken for one of zeros."""
    options = {"strategy": strategy, "max_steps": 5, "weight_decay": 0.1}
    trainer = trainer_of(str(folder / "base"), folder / f"unchosen-{strategy}", "lora", **options)
    trainer.add_callback(Unchosen())
    trainer.train()
    return found(trainer)


class OneNumberMore(TrainerCallback):
    """In the second step one process's tensor gets another number than the others'."""

    def on_optimizer_step(self, _, state, __, model=None, **___):
        if state.global_step == 1 and os.environ["RANK"] == "1":
            last = [p for p in model.parameters() if p.requires_grad][-1]
            last.data.view(-1)[0] += 1e-6


def drifting(folder: Path, strategy: str, missed: bool) -> str:
    """What each process hears of one whose policy is not the others', for a number or since nothing was averaged."""
    options = {"strategy": strategy, "max_steps": 3}
    trainer = trainer_of(str(folder / "base"), folder / f"drifting-{strategy}-{missed}", "lora", **options)
    averaged = optimizer_step.average_gradients
    if missed:
        optimizer_step.average_gradients = lambda _: None
    else:
        trainer.add_callback(OneNumberMore())
    try:
        return refused(trainer.train)
    finally:
        optimizer_step.average_gradients = averaged


def refused(make) -> str:
    try:
        make()
    except PerlError as error:
        return str(error)
    return ""


def broken_on_one(folder: Path) -> str:
    """What the guard of the second process alone finds wrong, as each process hears it."""
    trainer = trainer_of(str(folder / "base"), folder / "broken", "lora", strategy="fsdp2", max_steps=3)
    if trainer.accelerator.process_index == 1:

        def wrong(*_, **__):
            raise BrokenPromiseError("lora_A did not move")

        Movement.after_step = wrong
    return refused(trainer.train)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    whole = trained(folder, str(folder / "base"), "name-ddp", strategy="ddp")
    results = {
        "ddp": whole,
        "name": trained(folder, str(folder / "base"), "name"),
        "model": trained(folder, loaded(folder), "model"),
        "divided": trained(
            folder, loaded(folder, distributed_config=DistributedConfig(fsdp_size=2)), "divided", strategy="ddp"
        ),
        "recomputed": trained(folder, str(folder / "base"), "recomputed", gradient_checkpointing=True),
        "unchosen": {strategy: without_some_gradients(folder, strategy) for strategy in STRATEGIES},
        "twice": {strategy: twice(folder, strategy) for strategy in STRATEGIES},
    }
    adapted = get_peft_model(loaded(folder), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    results["refused"] = {
        "adapted": refused(lambda: trainer_of(adapted, folder / "adapted", "lora", strategy="fsdp2")),
        "pushed": refused(
            lambda: trainer_of(str(folder / "base"), folder / "p", "lora", strategy="fsdp2", push_to_hub=True)
        ),
        "head": refused(
            lambda: trainer_of(
                str(folder / "base"),
                folder / "head",
                "lora",
                strategy="fsdp2",
                peft_kwargs={"modules_to_save": ["lm_head"]},
            ),
        ),
    }
    results["drifting"] = {name: drifting(folder, name, missed=False) for name in STRATEGIES}
    results["missed"] = {name: drifting(folder, name, missed=True) for name in ("ddp", "fsdp2")}
    results["broken"] = broken_on_one(folder)
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
