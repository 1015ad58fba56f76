"""Which files a checkpoint of one process has; it goes on as transformers means it."""

from pathlib import Path

import pytest
import torch

from perl.errors import ModelError
from perl.policy.attach import adapter_tensors
from perl.policy.checkpoint import drop_other_ranks
from tests.trainer.distributed_checkpoints import Job, trainer_of

PICKLES = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


def trained(folder: Path, job: Job) -> dict[str, torch.Tensor]:
    trainer = trainer_of(folder, job)
    trainer.train(resume_from_checkpoint=job.resume)
    policy = trainer.policy
    tensors = dict(policy.named_parameters()) if job.method == "full" else adapter_tensors(policy)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def names(checkpoint: Path) -> set[str]:
    return {path.name for path in checkpoint.iterdir()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_model_without_an_adapter_is_gone_on_with_and_nothing_of_it_is_a_pickle(tmp_path):
    options = {"learning_rate": 1e-3}
    whole = trained(tmp_path, Job("whole", method="full", options=options))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert "model.safetensors" in names(checkpoint)
    assert not names(checkpoint) & {*PICKLES, "training_args.bin"}
    again = trained(tmp_path, Job("again", method="full", resume=str(checkpoint), options=options))
    assert equal(again, whole)


def test_only_the_model_is_saved_where_that_is_asked_for_and_the_newest_checkpoints_are_kept(tmp_path):
    options = {"save_only_model": True, "save_steps": 1, "save_total_limit": 2}
    trained(tmp_path, Job("small", options=options))
    kept = sorted(path.name for path in (tmp_path / "small").glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-5"]
    found = names(tmp_path / "small" / "checkpoint-5")
    assert "adapter_model.safetensors" in found
    assert not [name for name in found if name.startswith(("optimizer", "scheduler", "random"))]


def test_what_more_processes_have_left_of_a_checkpoint_goes(tmp_path):
    for rank in (0, 1, 2, 10):
        for kind in ("random", "rollouts"):
            (tmp_path / f"{kind}-rank{rank}.safetensors").touch()
    (tmp_path / "policy.safetensors").touch()
    drop_other_ranks(tmp_path, 2)
    kept = {f"{kind}-rank{rank}.safetensors" for kind in ("random", "rollouts") for rank in (0, 1)}
    assert names(tmp_path) == {*kept, "policy.safetensors"}


def test_a_damaged_file_is_named(tmp_path):
    trained(tmp_path, Job("whole"))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    (checkpoint / "policy.safetensors").write_bytes(b"\xff" * 200)
    with pytest.raises(ModelError, match=r"policy\.safetensors: cannot be read.*delete its folder"):
        trained(tmp_path, Job("damaged", resume=str(checkpoint)))
