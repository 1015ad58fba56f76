"""A base that one process holds on a device and hands to others, so that a device holds its numbers once.

base -> one block of a device's memory, in a process that keeps it -> the same block in the processes that ask for it

Torch hands a tensor to another process without a copy: on a CPU by a file descriptor of shared memory, on a GPU by
CUDA's interprocess handles. Either way all see the same bytes; nothing keeps a process from writing them but that
nothing here writes a base. The holder outlives everybody who may ask, since its memory goes with it.
"""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from transformers import PreTrainedModel

from perl.errors import ModelError, first_line

ADDRESS = "holder"
"""File of a base's folder that says where its holder is asked."""

# As torch's own allocator on GPUs, so that kernels are chosen as for a copy of one's own.
_ALIGNED = 512

Entries = dict[str, dict[str, Any]]
"""Of each tensor its dtype, shape, and place in the block, in bytes."""
Load = Callable[[torch.device], PreTrainedModel]


def hold(load: Load, first: torch.device, folder: Path, alive: int, ready: Callable[[], None]) -> None:
    """Holds a base on each device that it is asked for, until nobody is left who could ask.

    Args:
        load: Loads it on a device.
        first: On which it is held before anybody asks.
        folder: Of the base; its holder's address is written there.
        alive: A pipe whose other end is open in all processes that may ask.
        ready: Called once it can be asked.

    Raises:
        PerlError: It cannot be loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="perl-base-"))  # a socket's name must be short
    over = threading.Event()
    try:
        first = _with_index(first)
        held = _Held({first: _in_a_block(load(first), first)}, load)
        # Who asks proves that it may in a thread of its own, or one that hangs would keep all others waiting.
        with Listener(str(place / "socket"), "AF_UNIX", backlog=128) as listener:
            threading.Thread(target=_serve, args=(listener, held, over), daemon=True).start()
            (folder / ADDRESS).write_text(str(place / "socket"), encoding="utf-8")
            ready()
            os.read(alive, 1)
            over.set()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def handed_over(folder: Path, device: torch.device) -> tuple[Entries, torch.Tensor]:
    """The block of a base on a device, as its holder has it: the same memory.

    Args:
        folder: Of the base.
        device: Where the block lies.

    Raises:
        ModelError: The holder is gone, or could not hold or hand over the base.
    """
    try:
        address = (folder / ADDRESS).read_text(encoding="utf-8")
        with Client(address, "AF_UNIX", authkey=current_process().authkey) as asked:
            asked.send(str(_with_index(device)))
            answer = asked.recv()
    except (OSError, EOFError, AuthenticationError, RuntimeError) as error:
        raise ModelError(f"the base was not handed over: {first_line(error)}", str(folder)) from error
    if isinstance(answer, str):
        raise ModelError(answer, str(folder))
    entries, block = answer
    return entries, block


class _Held:
    """A base on each device that it was asked for."""

    def __init__(self, blocks: dict[torch.device, tuple[Entries, torch.Tensor]], load: Load) -> None:
        self._blocks, self._load, self._lock = blocks, load, threading.Lock()

    def on(self, device: torch.device) -> tuple[Entries, torch.Tensor]:
        with self._lock:
            if device not in self._blocks:
                self._blocks[device] = _in_a_block(self._load(device), device)
            return self._blocks[device]


def _serve(listener: Listener, held: _Held, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError, EOFError):
            threading.Thread(target=_answer, args=(listener.accept(), held), daemon=True).start()


def _answer(asking: Connection, held: _Held) -> None:
    key = current_process().authkey
    with contextlib.suppress(OSError, EOFError, AuthenticationError), asking:
        deliver_challenge(asking, key)
        answer_challenge(asking, key)
        device = torch.device(asking.recv())
        try:
            asking.send(held.on(device))
        except Exception as error:  # noqa: BLE001 (a process boundary: who asked is told)
            asking.send(f"the base could not be held on {device}: {first_line(error)}")
        asking.recv()  # until it has it, and closes


def _in_a_block(model: PreTrainedModel, device: torch.device) -> tuple[Entries, torch.Tensor]:
    """All numbers of a base in one block of a device's memory, tied ones once."""
    state = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name not in getattr(model, "all_tied_weights_keys", {})
    }
    entries, place = layout(state, _ALIGNED)
    block = torch.empty(place, dtype=torch.uint8, device=device)
    for name, entry in entries.items():
        tensor = state.pop(name).contiguous()
        block[entry["at"] : entry["at"] + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    return entries, block.share_memory_() if device.type == "cpu" else block


def layout(state: dict[str, torch.Tensor], aligned: int) -> tuple[Entries, int]:
    """Where each tensor lies in a block, and the block's bytes.

    Args:
        state: By name.
        aligned: Bytes, a multiple of which each begins at.
    """
    entries: Entries = {}
    place = 0
    for name, tensor in state.items():
        entries[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape], "at": place}
        place = -(-(place + tensor.nbytes) // aligned) * aligned
    return entries, place


def views(entries: Entries, block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a base, each a part of a block of bytes."""
    found = {}
    for name, entry in entries.items():
        dtype = getattr(torch, entry["dtype"])
        count = torch.Size(entry["shape"]).numel() * dtype.itemsize
        found[name] = block[entry["at"] : entry["at"] + count].view(dtype).view(entry["shape"])
    return found


def _with_index(device: torch.device) -> torch.device:
    """A device with its number, by which two processes mean the same one."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
