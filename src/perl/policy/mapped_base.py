"""A base in a file that many processes map, so that a machine holds its numbers once.

loaded base -> file -> the same base in another process, its numbers not copied

The numbers lie in the file as they lie in memory once the base is loaded: in its type, each tensor at a multiple of 64
bytes, so that a processor computes with them bit by bit as with its own copy. The pages are private to a process as
soon as it writes to them, which nothing here does.
"""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel

from perl.errors import ModelError
from perl.recipe.sections import ModelSection

_ALIGNED = 64
_HEADER = "tensors.json"
_NUMBERS = "numbers.bin"


@dataclass(frozen=True)
class MappedBase:
    """A base in a folder.

    Attributes:
        folder: Holds its numbers, and what they are.
        section: Which base it is; a recipe with another one loads its own.
    """

    folder: Path
    section: ModelSection


_held: list[MappedBase] = []


def write_mapped_base(model: PreTrainedModel, folder: Path) -> int:
    """Writes a base as it lies in memory.

    Args:
        model: On the CPU, without an adapter.
        folder: To make; one that is there is written anew.

    Returns:
        Bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries, place = {}, 0
    with (folder / _NUMBERS).open("wb") as file:
        for name, tensor in model.state_dict().items():
            if name in getattr(model, "all_tied_weights_keys", {}):
                continue
            plain = tensor.detach().contiguous()
            entries[name] = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": [*plain.shape], "at": place}
            file.write(plain.reshape(-1).view(torch.uint8).numpy())
            end = place + plain.nbytes
            place = -(-end // _ALIGNED) * _ALIGNED
            file.write(bytes(place - end))
    (folder / _HEADER).write_text(json.dumps(entries), encoding="utf-8")
    return place


@contextmanager
def mapped(base: MappedBase | None) -> Iterator[None]:
    """Inside, a recipe with this base maps it instead of loading its own; None: nothing is mapped."""
    if base is None:
        yield
        return
    _held.append(base)
    try:
        yield
    finally:
        _held.remove(base)


def load_mapped(section: ModelSection, source: str, device: torch.device, strategy: str) -> PreTrainedModel | None:
    """The base of a section, mapped.

    Args:
        section: Which base.
        source: What transformers calls it.
        device: Where it shall lie: only on a CPU are its numbers mapped.
        strategy: Of the run; one that cuts the base into parts loads its own.

    Returns:
        None where it is not held in a file.

    Raises:
        ModelError: The file is not what was written.
    """
    held = next((one for one in _held if _same(one.section, section)), None)
    if held is None or device.type != "cpu" or strategy == "fsdp2":
        return None
    config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=False)
    try:
        tensors = _tensors(held.folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the base of the study cannot be mapped: {error}", str(held.folder)) from None
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=_dtype(section),
        attn_implementation=section.attn_implementation,
    )
    model.name_or_path = model.config.name_or_path = source  # which adapters and scores name as their base
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, revision=section.revision)
    except OSError:  # it has none
        model.generation_config = GenerationConfig.from_model_config(config)
    own = {p.data_ptr() for p in model.parameters()} - {t.data_ptr() for t in tensors.values()}
    if own:
        raise ModelError(f"{len(own)} tensors of the base were copied, not mapped", str(held.folder))
    return model


def _same(one: ModelSection, other: ModelSection) -> bool:
    """Whether two sections stand for the same numbers on a CPU, however attention is computed."""
    keys = [(each.name, each.revision, each.quantization, _dtype(each)) for each in (one, other)]
    return keys[0] == keys[1]


def _dtype(section: ModelSection) -> torch.dtype:
    """Of the base's numbers on a CPU."""
    return torch.float32 if section.dtype == "auto" else getattr(torch, section.dtype)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The numbers of a base, in pages that processes share until one writes to them."""
    entries = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
    with (folder / _NUMBERS).open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    numbers = torch.frombuffer(pages, dtype=torch.uint8)
    found = {}
    for name, entry in entries.items():
        dtype = getattr(torch, entry["dtype"])
        count = torch.Size(entry["shape"]).numel() * dtype.itemsize
        found[name] = numbers[entry["at"] : entry["at"] + count].view(dtype).view(entry["shape"])
    return found
