"""Files another process can go on from: complete checkpoints.

policy, trainer state -> checkpoints/checkpoint-N

A checkpoint counts once it lists its own files; one that a kill cut short is thrown away. Weights are safetensors.
"""

import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from perl.errors import ModelError, first_line, warn
from perl.methods.hooks import hooks_of
from perl.policy.attach import adapter_tensors, load_adapter_tensors
from perl.run.files import parse_mapping, write_text

_MANIFEST = "complete.json"
_ROLLOUTS = "rollouts-rank{rank}.safetensors"
_COUNTERS = "perl_state.json"
_POLICY = "policy.safetensors"
# Key in its header.
_REFERENCE = "reference"


def seal(checkpoint: Path) -> None:
    """Declares a checkpoint complete by writing down its files and their sizes."""
    unseal(checkpoint)
    sizes = {str(p.relative_to(checkpoint)): p.stat().st_size for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    write_text(checkpoint / _MANIFEST, json.dumps(sizes, indent=1) + "\n")


def unseal(checkpoint: Path) -> None:
    """Takes the declaration back, before files of an older checkpoint are written over."""
    (checkpoint / _MANIFEST).unlink(missing_ok=True)


def drop_other_ranks(checkpoint: Path, processes: int) -> None:
    """Deletes what an older checkpoint of the same name, of more processes, has left of the others.

    Args:
        checkpoint: The folder, to which every process has written.
        processes: Of this run.
    """
    for file in checkpoint.glob("*-rank*.safetensors"):
        rank = file.stem.rpartition("-rank")[2]
        if rank.isdigit() and int(rank) >= processes:
            file.unlink()


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed and still has all of its files."""
    return _first_wrong(checkpoint) is None


def _first_wrong(checkpoint: Path) -> str | None:
    """The first file that is missing or has another size than the checkpoint lists; None: all are as they were."""
    try:
        sizes = parse_mapping((checkpoint / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return _MANIFEST
    found = ((name, checkpoint / name, size) for name, size in sizes.items())
    return next((name for name, path, size in found if not path.is_file() or path.stat().st_size != size), None)


def step_of(checkpoint: Path) -> int:
    """The optimizer step at which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    return max(complete_checkpoints(folder), key=step_of, default=None)


def latest_step(folder: Path) -> int:
    """The optimizer step of the newest complete checkpoint in a folder; 0: there is none."""
    newest = latest_checkpoint(folder)
    return step_of(newest) if newest else 0


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, in no order."""
    return [path for path in _checkpoints(folder) if is_complete(path)]


def discard_incomplete(folder: Path) -> None:
    """Deletes checkpoints that a kill cut short; warns of those that were changed since they were written."""
    for path in _checkpoints(folder):
        if path.is_dir() and (wrong := _first_wrong(path)) is not None:
            if (path / _MANIFEST).is_file():  # a kill leaves none: something else has changed it
                warn("PRL328", "%s is not used: %s is missing or has another size", path, wrong)
            shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]


def save_trainer_state(
    checkpoint: Path, counters: Mapping[str, Any], window: Sequence[Mapping[str, torch.Tensor]] | None, rank: int
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
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]] | None]:
    """What :func:`save_trainer_state` wrote: counters and unused rollouts; empty and None if it wrote nothing."""
    try:
        counters = json.loads((checkpoint / _COUNTERS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # written by plain TRL
        return {}, None
    path = checkpoint / _ROLLOUTS.format(rank=rank)
    if not path.is_file():
        return counters, None
    window: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path).items():  # which knows no cpu:0, as a process among others on a CPU has it
        index, _, name = key.partition("/")
        window.setdefault(int(index), {})[name] = tensor.to(device)
    return counters, [window[i] for i in sorted(window)]


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """While a file of a checkpoint is read: one that is damaged is named.

    Raises:
        ModelError: Says what to do without it.
    """
    try:
        yield
    except SafetensorError as error:
        hint = "delete its folder: the same command then goes on from the checkpoint before it, or starts anew"
        raise ModelError(f"cannot be read: {first_line(error)}", str(file), hint) from error


def save_policy(
    checkpoint: Path, policy: torch.nn.Module, reference: Mapping[str, torch.Tensor], spec: str = ""
) -> None:
    """Every tensor of the adapter, its method's state, and the reference's snapshot, as they are in memory.

    Beside them the checkpoint holds the adapter as plain PEFT loads it, which may have another shape.

    Args:
        checkpoint: The folder.
        policy: The model; without an adapter nothing is written, transformers saves it whole.
        reference: Snapshot of the reference, empty if it needs none.
        spec: Which reference that is, ``rolling:100``.
    """
    tensors = {f"reference/{name}": t for name, t in reference.items()}
    if isinstance(policy, PeftModel):
        tensors |= {f"adapter/{name}": t for name, t in adapter_tensors(policy).items()}
        hooks = hooks_of(policy)
        tensors |= {f"{hooks.method}/{name}": t for name, t in hooks.state(policy).items()}
    whole = {name: t.detach().clone().contiguous() for name, t in tensors.items()}
    save_file(whole, checkpoint / _POLICY, {_REFERENCE: spec})


def reference_of(checkpoint: Path) -> str | None:
    """Which reference a checkpoint was written with; None if it does not say, as one of plain TRL."""
    if not (checkpoint / _POLICY).is_file():
        return None
    with safe_open(checkpoint / _POLICY, framework="pt") as file:
        return (file.metadata() or {}).get(_REFERENCE)


def load_policy(checkpoint: Path, policy: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Puts back what :func:`save_policy` wrote.

    Returns:
        The reference's snapshot; None if the checkpoint holds no such file, as one of plain TRL.

    Raises:
        BrokenPromiseError: The checkpoint holds another adapter.
    """
    if not (checkpoint / _POLICY).is_file():
        return None
    parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    with readable(checkpoint / _POLICY):
        tensors = load_file(checkpoint / _POLICY)
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    if isinstance(policy, PeftModel):
        load_adapter_tensors(policy, parts["adapter"])
        hooks = hooks_of(policy)
        hooks.load_state(policy, parts[hooks.method])
    return parts["reference"]
