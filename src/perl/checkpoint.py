"""Files another process can go on from: complete checkpoints, and the adapter by itself.

trainer state -> checkpoints/checkpoint-N; policy -> adapter/

A checkpoint counts once it lists its own files; one that a kill cut short is thrown away. The adapter is written
beside its place, read back and compared, and only then moved there. Weights are safetensors.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from perl.logprobs import token_log_probs
from perl.run import replace_folder, write_text

_MANIFEST = "complete.json"
_ROLLOUTS = "rollouts-rank{rank}.safetensors"
_COUNTERS = "perl_state.json"


def seal(checkpoint: Path) -> None:
    """Declares a checkpoint complete by writing down its files and their sizes."""
    unseal(checkpoint)
    sizes = {str(p.relative_to(checkpoint)): p.stat().st_size for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    write_text(checkpoint / _MANIFEST, json.dumps(sizes, indent=1) + "\n")


def unseal(checkpoint: Path) -> None:
    """Takes the declaration back, before files of an older checkpoint are written over."""
    (checkpoint / _MANIFEST).unlink(missing_ok=True)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed and still has all of its files."""
    try:
        sizes = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == s for name, s in sizes.items())


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    complete = [path for path in _checkpoints(folder) if is_complete(path)]
    return max(complete, key=step_of, default=None)


def discard_incomplete(folder: Path) -> None:
    """Deletes checkpoints that a kill cut short."""
    for path in _checkpoints(folder):
        if path.is_dir() and not is_complete(path):
            shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]


def save_trainer_state(
    checkpoint: Path, counters: Mapping[str, int], window: Sequence[Mapping[str, torch.Tensor]] | None, rank: int
) -> None:
    """What TRL forgets at a checkpoint: its micro-batch counter, and rollouts that are not used up yet.

    Args:
        checkpoint: The folder, written by Trainer already.
        counters: By name.
        window: The micro-batches of the current generation batch, if later steps still train on them.
        rank: This process's number; each keeps its own rollouts.
    """
    if rank == 0:
        write_text(checkpoint / _COUNTERS, json.dumps(dict(counters)) + "\n")
    if window is not None:
        # Micro-batches are views of one tensor; safetensors refuses those.
        tensors = {
            f"{i}/{name}": tensor.clone(memory_format=torch.contiguous_format)
            for i, batch in enumerate(window)
            for name, tensor in batch.items()
        }
        save_file(tensors, checkpoint / _ROLLOUTS.format(rank=rank))


def load_trainer_state(
    checkpoint: Path, rank: int, device: torch.device
) -> tuple[dict[str, int], list[dict[str, torch.Tensor]] | None]:
    """What :func:`save_trainer_state` wrote: counters and unused rollouts; empty and None if it wrote nothing."""
    try:
        counters = json.loads((checkpoint / _COUNTERS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # written by plain TRL
        return {}, None
    path = checkpoint / _ROLLOUTS.format(rank=rank)
    if not path.is_file():
        return counters, None
    window: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path, device=str(device)).items():
        index, _, name = key.partition("/")
        window.setdefault(int(index), {})[name] = tensor
    return counters, [window[i] for i in sorted(window)]


def write_adapter(policy: PeftModel, destination: Path, base: str, revision: str | None) -> None:
    """Saves the active adapter so that plain PEFT loads it on the base.

    Args:
        policy: The model; only its active adapter is written, as safetensors, without pickles or other adapters.
        destination: The folder; an older one there is replaced once the new one is whole.
        base: Public name of the base, written into the config instead of the path it was loaded from.
        revision: Commit of the base, or None.
    """
    name = policy.active_adapter
    config = policy.peft_config[name]
    loaded_from = config.base_model_name_or_path, config.revision
    staged = destination.with_name(f".{destination.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    config.base_model_name_or_path, config.revision = base, revision
    try:
        # The base's embeddings never change, so they are never part of the adapter.
        policy.save_pretrained(staged, selected_adapters=[name], save_embedding_layers=False)
    finally:
        config.base_model_name_or_path, config.revision = loaded_from
    (staged / "README.md").unlink(missing_ok=True)  # PEFT's blank card
    # PEFT puts an adapter that is not called default into a folder of its own.
    written = staged if name == "default" else staged / name
    _sort_lists(written / "adapter_config.json")
    replace_folder(written, destination)
    shutil.rmtree(staged, ignore_errors=True)


def _sort_lists(config_file: Path) -> None:
    """PEFT writes sets in any order; the same adapter should give the same file."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    write_text(config_file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def reload_difference(policy: PeftModel, adapter: Path, input_ids_BT: torch.Tensor) -> float:
    """How far a saved adapter is from the one in memory.

    The saved one is loaded beside it on the same base, so this costs an adapter, not a model.

    Args:
        policy: The trained model.
        adapter: Folder of the saved adapter.
        input_ids_BT: (B, T) int64 probe without padding.

    Returns:
        Largest difference of any token's log-probability, in nats; infinity if either is not a number.
    """
    trained = policy.active_adapter
    probe = "reloaded"
    was_training = policy.training
    policy.eval()
    mask_BT = torch.ones_like(input_ids_BT)
    try:
        with torch.no_grad():
            expected = token_log_probs(policy, input_ids_BT, mask_BT)
            policy.load_adapter(str(adapter), probe)
            policy.set_adapter(probe)
            difference = (token_log_probs(policy, input_ids_BT, mask_BT) - expected).abs().max().item()
    finally:
        policy.set_adapter(trained)
        if probe in policy.peft_config:
            policy.delete_adapter(probe)
        policy.train(was_training)
    return math.inf if math.isnan(difference) else difference
