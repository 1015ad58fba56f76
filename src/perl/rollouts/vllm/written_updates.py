"""The files of an update, by which servers read it: in a folder that they share with the run, or in memory of theirs.

Update -> folder, whole or not there; or -> file names and contents
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save, save_file

from perl.errors import PerlError
from perl.rollouts.engine import Update
from perl.rollouts.vllm.http import PROBE
from perl.run.files import replace_folder

_ADAPTER, _ADAPTER_CONFIG, _WEIGHTS = "adapter_model.safetensors", "adapter_config.json", "model.safetensors"
_METADATA = {"format": "pt"}


def update_files(update: Update) -> dict[str, bytes]:
    """The files of an update, by their place in its folder."""
    tensors = {name: _alone(tensor) for name, tensor in update.tensors.items()}
    if update.form == "adapter":
        return {_ADAPTER: save(tensors, _METADATA), _ADAPTER_CONFIG: _config(update).encode()}
    return {_WEIGHTS: save(tensors, _METADATA), f"{PROBE}/{_WEIGHTS}": save({}, _METADATA)}


def _config(update: Update) -> str:
    return json.dumps(dict(update.config), indent=2) + "\n"


def write_update(update: Update, folder: Path) -> Path:
    """The update's folder, moved into place whole: a server may look at any time, through any file system.

    Raises:
        PerlError: The folder cannot be written.
    """
    staged, target = folder / f".{update.name}.tmp", folder / update.name
    tensors = {name: _alone(tensor) for name, tensor in update.tensors.items()}
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        if update.form == "adapter":
            save_file(tensors, staged / _ADAPTER, _METADATA)
            (staged / _ADAPTER_CONFIG).write_text(_config(update))
        else:
            save_file(tensors, staged / _WEIGHTS, _METADATA)
            (staged / PROBE).mkdir()
            save_file({}, staged / PROBE / _WEIGHTS, _METADATA)
        for path in [*staged.rglob("*"), staged]:
            _flush(path)
        replace_folder(staged, target)
        _flush(folder)
    except OSError as error:
        raise PerlError(f"cannot write updates: {error}", str(folder)) from error
    return target


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in memory that no other tensor shares, which safetensors would refuse."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _flush(path: Path) -> None:
    """Returns when a file or the names in a folder are on the disk, where the file system reports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
