"""Run by torchrun: two steps of a policy whole or in shards (FSDP2 on the CPU), and what is refused in shards.

``distributed_shards.py FOLDER whole|shards`` writes the saved adapter and a JSON file a process.
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError
from tests.oracles.rollouts import GENERATIONS, LONGEST, ROWS, preset_reward, rollout_function, rollout_table
from tests.oracles.two_trainers import QUIET, SHARDED, base, tokenizer

LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
SHARDS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def as_gpus() -> None:
    """Makes accelerate shard over CPUs, which it does over GPUs only."""
    start = PartialState.__init__

    def started(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = started


def trainer_of(folder: Path, model=None, adapter=LORA, **options) -> PeftGRPOTrainer:
    table = rollout_table(SHARDED)
    args = PeftRLConfig(
        str(folder / "run"),
        **{
            **QUIET,
            "optim": "sgd",
            "learning_rate": 0.3,
            "max_steps": 2,
            "num_generations": GENERATIONS,
            "per_device_train_batch_size": ROWS // 4,
            "gradient_accumulation_steps": 2,
            "max_completion_length": LONGEST,
            "train_tokens_per_microbatch": 60,
            "shuffle_dataset": False,
            "beta": 0.04,
            "seed": 5,
            **options,
        },
    )
    return PeftGRPOTrainer(
        model=model or copy.deepcopy(base(torch.float32)),
        reward_funcs=preset_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": list(table)}),
        processing_class=tokenizer(),
        peft_config=copy.deepcopy(adapter),
        rollout_func=rollout_function(table, log_probs=False, tools=False),
    )


def refused(folder: Path, **options) -> str:
    """What is said at construction."""
    try:
        trainer_of(folder, **options)
    except PerlError as error:
        return str(error)
    return ""


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    found = {}
    if how == "shards":
        os.environ.update(SHARDS)
        as_gpus()
        continued = get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(LORA))
        found["refused"] = [
            refused(folder, reference="initial"),
            refused(folder, reference="rolling:1"),
            refused(folder, model=continued, adapter=None),
            refused(folder, adapter=None, peft_method="full"),
            refused(folder, push_to_hub=True),
        ]
    trainer = trainer_of(folder)
    torch.manual_seed(3)
    trainer.train()
    trainer.save_adapter(folder / how)
    found["strategy"] = trainer.strategy
    found["log"] = [
        {name: entry[name] for name in ("loss", "kl", "grad_norm")} for entry in trainer.state.log_history[:2]
    ]
    (folder / f"{how}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
