"""Run where verl 0.9.1 is, by torchrun: trains a LoRA as verl's FSDP engine builds it, and lets verl save it.

base, alpha, strategy -> CHECKPOINTS/global_step_N/actor, and beside it what was trained: whole.safetensors, logits.pt

verl's trainers want a GPU. Its wrapping of a model and its checkpoint manager do not; a loss on random tokens stands in
for the rollouts, so that every factor has moved.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, get_peft_model, set_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

IDS = torch.arange(5, 29).reshape(1, 24)
SAVED_AT = (2, 3)


def policy_of(base: str, rank: int, alpha: float, targets: list[str]):
    """As verl/workers/engine/fsdp/transformer_impl.py makes it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {
        "task_type": TaskType.CAUSAL_LM,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "bias": "none",
    }
    return get_peft_model(model, LoraConfig(**config))


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
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in state.items()}


def main() -> None:
    base, checkpoints, rank, alpha, strategy, lora_only, *targets = sys.argv[1:]
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
        checkpoint_config=CheckpointConfig(save_lora_only=bool(int(lora_only))),
    )
    for step in range(1, max(SAVED_AT) + 1):
        own = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(5, 60, (4, 24), generator=own)
        loss = torch.nn.functional.cross_entropy(policy(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SAVED_AT:
            saver.save_checkpoint(f"{checkpoints}/global_step_{step}/actor", None, step)
            keep(gathered(policy), Path(checkpoints) / f"global_step_{step}", base, float(alpha), targets)
    if dist.get_rank() == 0:
        (Path(checkpoints) / "latest_checkpointed_iteration.txt").write_text(str(step))
    dist.destroy_process_group()


def keep(whole: dict[str, torch.Tensor], folder: Path, base: str, alpha: float, targets: list[str]) -> None:
    """What was trained, and the logits that it gives, for who compares."""
    if dist.get_rank() != 0:
        return
    plain = {name.replace(".default", ""): tensor.contiguous() for name, tensor in whole.items()}
    save_file(plain, folder / "whole.safetensors")
    rank = next(tensor.shape[0] for name, tensor in plain.items() if "lora_A" in name)
    policy = policy_of(base, rank, alpha, targets).eval()
    set_peft_model_state_dict(policy, plain)
    with torch.no_grad():
        torch.save(policy(IDS).logits, folder / "logits.pt")


if __name__ == "__main__":
    main()
