"""Job folders as ``perl export-verl`` makes them, and checkpoints in them as verl 0.9.1 writes them.

recipe -> JOB/{recipe.yaml, job.json}; adapter -> JOB/checkpoints/global_step_N/actor; rows -> JOB/verl_metrics.jsonl
"""

import json
from pathlib import Path

import torch

from perl.methods.settings import adaptation
from perl.policy.attach import adapter_tensors, attach_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_base
from perl.recipe import Recipe
from perl.recipe.sections import ModelSection
from perl.run.files import sha256_of
from perl.verl.job_folder import JobFacts
from tests.verl.recipes import recipe

TARGETS = ["down_proj", "q_proj", "v_proj"]
RANK, ALPHA = 8, 16.0
PEFT = {"method": "lora", "rank": RANK, "alpha": ALPHA, "target_modules": TARGETS}
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
    "response_length/mean": 24.0,
    "response_length/clip_ratio": 0.125,
    "perf/total_num_tokens": 2000,
    "timing_s/step": 2.0,
    "timing_s/gen": 0.75,
    "timing_s/update_weights": 0.25,
    "timing_s/update_actor": 0.5,
}
"""Names as verl 0.9.1's trainer logs them (verl/trainer/ppo/metric_utils.py, v1/trainer_base.py)."""


def base():
    return load_base(ModelSection(name="sandbox:base"), torch.device("cpu"))


def a_job(folder: Path, strategy: str = "fsdp2", **peft: object) -> Path:
    """A job's folder without checkpoints, of a LoRA on the sandbox's base."""
    folder.mkdir(parents=True, exist_ok=True)
    of = recipe(peft=peft or PEFT, train={"learning_rate": 1e-3, "max_steps": 3})
    (folder / "recipe.yaml").write_text(of.to_yaml(), encoding="utf-8")
    facts = JobFacts(
        perl_version="0.2.0",
        base="sandbox:base",
        base_fingerprint=base_fingerprint(base()),
        strategy=strategy,
        rollout="vllm",
        steps_per_batch=1,
        files={"recipe.yaml": sha256_of(folder / "recipe.yaml")},
    )
    (folder / "job.json").write_text(facts.model_dump_json(indent=2), encoding="utf-8")
    return folder


def log_steps(job: Path, steps: int) -> None:
    """verl's log, a row a step; the reward and the length grow."""
    rows = [{"step": 0, "data": {"val-core/addition/reward/mean@1": 0.5}}]
    for step in range(1, steps + 1):
        grows = {"critic/score/mean": 0.5 + 0.125 * step, "response_length/mean": 24.0 + step}
        rows.append({"step": step, "data": {**VERL_ROW, **grows}})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (job / "verl_metrics.jsonl").write_text(text, encoding="utf-8")


def actor_of(job: Path, step: int) -> Path:
    """The folder of a step's policy."""
    return job / "checkpoints" / f"global_step_{step}" / "actor"


def a_checkpoint(job: Path, step: int, processes: int, seed: int = 0) -> dict:
    """A checkpoint with random factors, its shards written as torch's FSDP2 has them in memory.

    Returns:
        The whole tensors of its adapter, by their names.
    """
    adapter = adapter_tensors(attach_adapter(base(), adaptation(Recipe.of_run(job / "recipe.yaml").peft)))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(tensor.shape, generator=generator) * 0.05 for name, tensor in adapter.items()}
    write_shards(actor_of(job, step), tensors, processes)
    (job / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step), encoding="utf-8")
    return tensors


def write_shards(actor: Path, state: dict[str, torch.Tensor], processes: int, dim: int = 0) -> None:
    """Writes the files of all processes from one, under torch's own classes and its own rule of division.

    Args:
        actor: Folder of the step's policy.
        state: The whole tensors.
        processes: As many files.
        dim: The dimension that is divided.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor.mkdir(parents=True, exist_ok=True)
    for rank in range(processes):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        mesh = DeviceMesh("cpu", torch.arange(processes), mesh_dim_names=("fsdp",))
        held = {}
        for name, tensor in state.items():
            parts = torch.chunk(tensor, processes, dim)
            part = parts[rank] if rank < len(parts) else tensor[:0]
            meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
            held[name] = DTensor(part.clone(), DTensorSpec(mesh, (Shard(dim),), tensor_meta=meta), requires_grad=False)
        torch.save(held, actor / f"model_world_size_{processes}_rank_{rank}.pt")
        torch.distributed.destroy_process_group()
