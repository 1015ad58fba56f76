"""Job folders as ``perl export-verl`` makes them, and checkpoints in them as verl 0.9.1 writes them.

recipe -> JOB/{recipe.yaml, job.json}; adapter -> JOB/checkpoints/global_step_N/actor; rows -> JOB/verl_metrics.jsonl
"""

import hashlib
import json
import math
from pathlib import Path

import torch

from perl.methods.settings import adaptation
from perl.policy.attach import adapter_tensors, attach_adapter
from perl.policy.model import base_fingerprint, load_base
from perl.recipe import Recipe
from perl.recipe.sections import ModelSection

TARGETS = ["down_proj", "q_proj", "v_proj"]
RANK, ALPHA = 8, 16.0
VERL_ROW = {
    "actor/loss": -0.011,
    "actor/pg_loss": -0.012,
    "actor/grad_norm": 0.25,
    "actor/ppo_kl": 0.0003,
    "actor/lr": 1e-3,
    "actor/kl_loss": 0.002,
    "actor/entropy": 0.4,
    "actor/pg_clipfrac": 0.02,
    "critic/score/mean": 0.5,
    "critic/rewards/mean": 0.5,
    "response_length/mean": 24.0,
    "response_length/max": 40.0,
    "response_length/min": 12.0,
    "response_length/clip_ratio": 0.125,
    "perf/total_num_tokens": 2000,
    "perf/throughput": 512.5,
    "timing_s/step": 2.0,
    "timing_s/gen": 0.75,
    "timing_s/update_weights": 0.25,
    "timing_s/update_actor": 0.5,
}
"""Names as verl 0.9.1's trainer logs them (verl/trainer/ppo/metric_utils.py, v1/trainer_base.py)."""


def a_recipe(method: str = "lora", **more: dict) -> Recipe:
    """A recipe on the sandbox's base whose adapter is as small as that of the tests' checkpoints."""
    sections = {
        "model": {"name": "sandbox:base"},
        "peft": {"method": method, "rank": RANK, "alpha": ALPHA, "target_modules": TARGETS},
        "data": {"train": "sandbox:addition"},
        "rewards": {"accuracy": 1.0},
        "train": {"prompts_per_step": 8, "num_generations": 8, "max_steps": 2, "learning_rate": 1e-3, "beta": 0.01},
        "rollout": {"max_completion_length": 64},
        "eval": {"enabled": False},
    }
    return Recipe.load({**sections, **more})


def a_job(folder: Path, recipe: Recipe | None = None, **changed: object) -> Path:
    """A job's folder without checkpoints.

    Args:
        folder: Where.
        recipe: Of the job; None: :func:`a_recipe`.
        changed: Keys of ``job.json`` that are otherwise than they should be.
    """
    recipe = recipe or a_recipe()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    scaled = math.sqrt(RANK) if recipe.peft.method == "rslora" else 1.0
    base = load_base(ModelSection(name="sandbox:base"), torch.device("cpu"))
    job = {
        "format": 1,
        "perl_version": "0.2.0",
        "verl_version": "0.9.1",
        "base": "sandbox:base",
        "revision": None,
        "base_fingerprint": base_fingerprint(base),
        "base_dtype": "float32",
        "method": recipe.peft.method,
        "rank": RANK,
        "alpha": ALPHA,
        "verl_alpha": ALPHA * scaled,
        "use_rslora": False,
        "target_modules": TARGETS,
        "strategy": "fsdp2",
        "rollout": "vllm",
        "algorithm": "grpo",
        "seed": 42,
        "steps": 2,
        "steps_per_batch": 1,
        "checkpoints": "checkpoints",
        "log": "verl_metrics.jsonl",
        "earlier_log": "verl_metrics.earlier.jsonl",
        "files": {"recipe.yaml": hashlib.sha256((folder / "recipe.yaml").read_bytes()).hexdigest()},
    }
    (folder / "job.json").write_text(json.dumps(job | changed, indent=2), encoding="utf-8")
    return folder


def log_steps(job: Path, steps: int, **changed: float) -> None:
    """verl's log, a row a step; the reward and the length grow."""
    rows = [{"step": 0, "data": {"val-core/addition/reward/mean@1": 0.5}}]
    for step in range(1, steps + 1):
        grows = {"critic/score/mean": 0.5 + 0.125 * step, "response_length/mean": 24.0 + step}
        rows.append({"step": step, "data": {**VERL_ROW, **grows, **changed}})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (job / "verl_metrics.jsonl").write_text(text, encoding="utf-8")


def actor_of(job: Path, step: int) -> Path:
    """The folder of a step's policy."""
    return job / "checkpoints" / f"global_step_{step}" / "actor"


def a_checkpoint(job: Path, step: int, processes: int, *, lora_only: bool = True, seed: int = 0) -> dict:
    """A checkpoint with random factors, its shards written as torch's FSDP2 has them in memory.

    Returns:
        The whole tensors of its adapter, by their names.
    """
    recipe = Recipe.of_run(job / "recipe.yaml")
    policy = attach_adapter(load_base(recipe.model, torch.device("cpu")), adaptation(recipe.peft))
    generator = torch.Generator().manual_seed(seed)
    adapter = adapter_tensors(policy)
    for tensor in adapter.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    state = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    kept = {name: tensor for name, tensor in state.items() if not lora_only or "lora_" in name}
    write_shards(actor_of(job, step), kept, processes)
    (job / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step), encoding="utf-8")
    return {name: tensor.clone() for name, tensor in adapter.items()}


def write_shards(actor: Path, state: dict[str, torch.Tensor], processes: int, shape: tuple[int, ...] = ()) -> None:
    """Writes the files of all processes from one, under torch's own classes and its own rule of division.

    Args:
        actor: Folder of the step's policy.
        state: The whole tensors.
        processes: As many files.
        shape: Of the mesh: (copies, shards); empty: shards alone.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor.mkdir(parents=True, exist_ok=True)
    shape = shape or (processes,)
    for rank in range(processes):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        mesh = DeviceMesh("cpu", torch.arange(processes).view(shape), mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        placements = (*[Replicate()] * (len(shape) - 1), Shard(0))
        held = {}
        for name, tensor in state.items():
            parts = torch.chunk(tensor, shape[-1]) if tensor.ndim else ()
            index = rank % shape[-1]
            part = parts[index] if index < len(parts) else tensor[:0]
            meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
            held[name] = DTensor(part.clone(), DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
        torch.save(held, actor / f"model_world_size_{processes}_rank_{rank}.pt")
        torch.distributed.destroy_process_group()
    facts = {"FSDP_version": 2, "world_size": processes}
    (actor / "fsdp_config.json").write_text(json.dumps(facts), encoding="utf-8")
