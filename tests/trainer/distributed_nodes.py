"""Run in each of four processes, two a node: one training by each way to share a base, and what crosses nodes.

``python -m tests.trainer.distributed_nodes FOLDER`` writes a JSON file a process. Bytes are counted where torch's
collectives are called, in the last step; a ring takes of n processes (n - 1) / n of what is gathered into a node, of
a sum twice as much. What is smaller than a kilobyte are flags and metrics.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tests.trainer.strategies import found, trainer_of

WAYS = {"ddp": {"strategy": "ddp"}, "node": {"strategy": "fsdp2"}, "all": {"strategy": "fsdp2", "shards": "all"}}
OF_NODE = 2
counted = {"into_node": 0.0, "training": 0, "scoring": 0}


def count(name: str, rounds: int) -> None:
    called = getattr(distributed, name)

    def counting(*args, **given):
        group = given.get("group") or distributed.group.WORLD
        ranks = distributed.get_process_group_ranks(group)
        written = args[0] if args else given["output_tensor"]
        if written.nbytes >= 1024 and len({rank // OF_NODE for rank in ranks}) > 1:
            counted["into_node"] += rounds * (len(ranks) - 1) / len(ranks) * written.nbytes
        return called(*args, **given)

    setattr(distributed, name, counting)


def count_pass(*_) -> None:
    counted["training" if torch.is_grad_enabled() else "scoring"] += 1


class LastStep(TrainerCallback):
    """Counts anew when a step begins."""

    def on_step_begin(self, *_, **__):
        counted.update(dict.fromkeys(counted, 0))


def main() -> None:
    folder, results = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    gathers = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    count(gathers, 1)
    count("all_reduce", 2)
    for name, options in WAYS.items():
        trainer = trainer_of(str(folder / "base"), folder / name, "lora", max_steps=2, **options)
        trainer.policy.get_input_embeddings().register_forward_pre_hook(count_pass)
        trainer.add_callback(LastStep())
        trainer.train()
        meshes = [p.device_mesh.shape[-1] for p in trainer.policy.parameters() if isinstance(p, DTensor)]
        results[name] = found(trainer) | {
            "counted": dict(counted),
            "of_copy": meshes[0] if meshes else 1,
            "trained": sum(p.numel() for p in trainer.policy.parameters() if p.requires_grad),
        }
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
