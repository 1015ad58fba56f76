"""A base that many processes share: on a CPU in a file that they map, on a GPU in a block that one of them holds.

loaded base -> file, or holder -> the same base in another process, its numbers not copied

The numbers lie in the file as they lie in memory once the base is loaded: in its type, each tensor at a multiple of 64
bytes, so that a processor computes with them bit by bit as with its own copy. The pages are private to a process as
soon as it writes to them. A base that a process holds is in ``held_base.py``: all see what one writes there, so that
who trains the base itself loads its own (:func:`own_base`).
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
from perl.policy.held_base import ADDRESS, handed_over, layout, views
from perl.recipe.sections import ModelSection
from perl.run.warned import warn

_ALIGNED = 64
_HEADER = "tensors.json"
_NUMBERS = "numbers.bin"


@dataclass(frozen=True)
class MappedBase:
    """A base in a folder.

    Attributes:
        folder: Holds its numbers, and what they are; or the address of who holds them.
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
    tied = getattr(model, "all_tied_weights_keys", {})
    state = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    entries, size = layout(state, _ALIGNED)
    with (folder / _NUMBERS).open("wb") as file:
        for name, tensor in state.items():
            file.seek(entries[name]["at"])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        file.truncate(size)
    (folder / _HEADER).write_text(json.dumps(entries), encoding="utf-8")
    return size


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


@contextmanager
def own_base(*, wanted: bool) -> Iterator[None]:
    """Inside, nothing is mapped: for who will write to the base, which others would compute with.

    Args:
        wanted: False: this changes nothing.
    """
    held = _held[:]
    if wanted:
        _held.clear()
    try:
        yield
    finally:
        _held[:] = held


def load_mapped(section: ModelSection, source: str, device: torch.device, strategy: str) -> PreTrainedModel | None:
    """The base of a section, shared with other processes.

    Args:
        section: Which base.
        source: What transformers calls it.
        device: Where it shall lie: in a file only for a CPU.
        strategy: Of the run; one that cuts the base into parts loads its own.

    Returns:
        None where it is not shared, or cannot be handed over.

    Raises:
        ModelError: The file is not what was written.
    """
    held = next((one for one in _held if _same(one.section, section, device)), None)
    if held is None or strategy == "fsdp2":
        return None
    if (held.folder / ADDRESS).exists():
        try:
            return _filled(section, source, views(*handed_over(held.folder, device)))
        except ModelError as error:
            warn("PRL346", "the base cannot be shared, this cell loads it: %s", error.mistakes[0].message)
            return None
    if device.type != "cpu":
        return None
    try:
        tensors = _tensors(held.folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the base of the study cannot be mapped: {error}", str(held.folder)) from None
    return _around(section, source, tensors)


def _filled(section: ModelSection, source: str, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A base of tensors of any device; the rest of it, as the tables of its rotary positions, is this process's own."""
    untouched = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    model = _around(section, source, untouched)  # memory that is never written takes none
    places = {tensor.data_ptr(): name for name, tensor in untouched.items()}
    device = next(iter(tensors.values())).device
    for parameter in model.parameters():
        parameter.data = tensors[places[parameter.data_ptr()]]
        parameter.requires_grad_(False)  # an optimizer would write to what others compute with
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            known = places.get(buffer.data_ptr())
            setattr(module, name, tensors[known] if known is not None else buffer.to(device))
    return model


def _around(section: ModelSection, source: str, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A base of tensors of the CPU.

    Raises:
        ModelError: Some were copied.
    """
    config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=False)
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=max(sizes, key=lambda dtype: sizes[dtype]),
        attn_implementation=section.attn_implementation,
    )
    model.name_or_path = model.config.name_or_path = source  # which adapters and scores name as their base
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, revision=section.revision)
    except OSError:  # it has none
        model.generation_config = GenerationConfig.from_model_config(config)
    own = {p.data_ptr() for p in model.parameters()} - {t.data_ptr() for t in tensors.values()}
    if own:
        raise ModelError(f"{len(own)} tensors of the base were copied, not shared", source)
    return model


def _same(one: ModelSection, other: ModelSection, device: torch.device) -> bool:
    """Whether two sections stand for the same numbers on a device, however attention is computed."""
    keys = [(each.name, each.revision, each.quantization, _dtype(each, device)) for each in (one, other)]
    return keys[0] == keys[1]


def _dtype(section: ModelSection, device: torch.device) -> str:
    """Of the base's numbers there."""
    return "float32" if section.dtype == "auto" and device.type == "cpu" else section.dtype


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The numbers of a base, in pages that processes share until one writes to them."""
    entries = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
    with (folder / _NUMBERS).open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return views(entries, torch.frombuffer(pages, dtype=torch.uint8))
