"""Run where verl 0.9.1 is, by torchrun: trains a LoRA as verl's FSDP engine builds it, and lets verl save it.

base, alpha, strategy -> CHECKPOINTS/global_step_N/actor, and beside it what was trained: whole.safetensors

verl's trainers want a GPU. Its wrapping of a model and its checkpoint manager do not; a loss on random tokens stands in
for the rollouts, so that every factor has moved.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

STEPS = 3


def policy_of(base: str, rank: int, alpha: float, targets: list[str]):
    """As verl/workers/engine/fsdp/transformer_impl.py makes it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    task = TaskType.CAUSAL_LM
    return get_peft_model(
        model, LoraConfig(task_type=task, r=rank, lora_alpha=alpha, target_modules=targets, bias="none")
    )


def wrapped(policy, strategy: str):
    """Divided over the processes, as verl does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if strategy == "fsdp2":
        apply_fsdp2(policy, {"mesh": mesh}, {})
        return policy
    wrapping = get_fsdp_wrap_policy(module=policy, is_lora=True)
    whole = FullyShardedDataParallel(
        policy, auto_wrap_policy=wrapping, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=False
    )
    FullyShardedDataParallel.set_state_dict_type(whole, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    return whole


def gathered(policy) -> dict[str, torch.Tensor]:
    """The whole adapter on every process, by torch's own collectives."""
    state = {name: tensor for name, tensor in policy.state_dict().items() if "lora_" in name}
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    return {name.replace(".default", ""): t.detach().clone().contiguous() for name, t in whole.items()}


def main() -> None:
    base, checkpoints, rank, alpha, strategy, *targets = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = wrapped(policy_of(base, int(rank), float(alpha), targets), strategy)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    saver = FSDPCheckpointManager(
        model=policy,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        processing_class=AutoTokenizer.from_pretrained(base),
        checkpoint_config=CheckpointConfig(save_lora_only=True),
    )
    for step in range(1, STEPS + 1):
        own = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(5, 60, (4, 24), generator=own)
        loss = torch.nn.functional.cross_entropy(policy(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saver.save_checkpoint(f"{checkpoints}/global_step_{STEPS}/actor", None, STEPS)
    whole = gathered(policy)
    if dist.get_rank() == 0:
        save_file(whole, Path(checkpoints) / f"global_step_{STEPS}" / "whole.safetensors")
        (Path(checkpoints) / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
