"""The one file that a process of verl's FSDP writes, read as untrusted data.

model_world_size_W_rank_R.pt -> name -> tensor, of a sharded one this process's part and where it belongs

A checkpoint is a pickle. torch reads it with ``weights_only``, and of what it names beside plain tensors only the few
classes of sharded tensors are allowed. Not even these are made: records without behaviour stand in for them, so no code
of ``torch.distributed`` runs, no process group is needed, and files of other versions of torch are read alike.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
)

from perl.errors import RunFolderError, first_line

Bounds = tuple[tuple[int, int], ...]
"""Of each dimension of a tensor the first index and the one after the last."""

# Larger files are mapped into memory, not read: with the base in them they may be larger than memory.
_LARGEST_READ = 2**30
# What zipfile and torch raise for files that they cannot read.
_REFUSALS = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(zipfile.BadZipFile, zlib.error, UnpicklingError),
)


class _Record:
    """What stands in for a class that a pickle names: it keeps what it is given."""

    given: tuple[Any, ...]

    def __new__(cls, *given: Any) -> "_Record":  # noqa: ANN401 (whatever the file holds)
        made = object.__new__(cls)
        made.given = given
        return made


class _Shard(_Record):
    """A dimension is divided over the processes; ``dim`` says which."""


class _Replicate(_Record):
    """Each process has all of it."""


class _Mesh(_Record):
    """Which processes there are."""


class _Spec(_Record):
    """How a tensor is divided: ``mesh`` and ``placements``."""


class _Sharded(torch.Tensor):
    """A tensor of which the file has a part, ``_local_tensor``; its shape is that of the whole."""

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object, **__: object) -> None:  # type: ignore[override]
        """It cannot be computed with."""
        raise TypeError(f"{func} of a tensor that is in shards")


_PLACEMENTS, _SPECS, _MESHES = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed._mesh_layout",
)
_ALLOWED: Mapping[str, type] = {
    "torch.distributed.tensor.DTensor": _Sharded,
    "torch.distributed.tensor._api.DTensor": _Sharded,
    f"{_SPECS}.DTensorSpec": _Spec,
    f"{_SPECS}.TensorMeta": _Record,
    f"{_SPECS}.ShardOrderEntry": _Record,
    f"{_PLACEMENTS}.Shard": _Shard,
    f"{_PLACEMENTS}.Replicate": _Replicate,
    "torch.distributed.device_mesh.DeviceMesh": _Mesh,
    f"{_MESHES}._MeshLayout": _Record,
    f"{_MESHES}._FlatLayout": _Record,
}
"""Every name, beside those of plain tensors, that a checkpoint may hold -> what stands in for it."""


@dataclass(frozen=True)
class Part:
    """What a process has of a tensor.

    Attributes:
        shape: Of the whole tensor.
        bounds: Which part of it this is.
        values: The part.
    """

    shape: tuple[int, ...]
    bounds: Bounds
    values: torch.Tensor


def read_stored(path: Path, rank: int, processes: int) -> Iterator[tuple[str, Part]]:
    """The tensors of a file, in its order.

    Args:
        path: A regular file.
        rank: Of the process that wrote it.
        processes: How many wrote the checkpoint.

    Raises:
        RunFolderError: It is cut, unreadable, names code, or divides a tensor in a way that verl's FSDP does not.
    """
    for name, tensor in _loaded(path).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise RunFolderError(f"holds {name!r:.80}, which is no tensor with a name", str(path))
        try:
            yield name, _part(tensor, rank, processes)
        except (ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise RunFolderError(f"{name}: {first_line(error)}", str(path)) from None


def _loaded(path: Path) -> Mapping[Any, Any]:
    with _only_allowed():
        try:
            with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums that it writes
                if (damaged := archive.testzip()) is not None:
                    raise RunFolderError(f"is damaged: {damaged} has another checksum", str(path))
            if named := get_unsafe_globals_in_checkpoint(path):
                what = f"names {', '.join(sorted(named)[:3])[:200]}"
                raise RunFolderError(f"{what}, which no checkpoint of weights does; nothing of it was run", str(path))
            mapped = path.stat().st_size > _LARGEST_READ
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except _REFUSALS as error:
            raise RunFolderError(f"cannot be read, it may be cut: {first_line(error)[:200]}", str(path)) from None
    if not isinstance(found, Mapping):
        raise RunFolderError("holds no tensors by name", str(path))
    return found


@contextmanager
def _only_allowed() -> Iterator[None]:
    """Nothing but the names above is allowed, whatever was before; afterwards that is again."""
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals([(stand_in, name) for name, stand_in in _ALLOWED.items()])
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _part(tensor: torch.Tensor, rank: int, processes: int) -> Part:
    """Where a file's tensor belongs.

    Raises:
        ValueError: It is no part of a tensor of its shape.
    """
    if not isinstance(tensor, _Sharded):
        shape = tuple(tensor.shape)
        return Part(shape, tuple((0, side) for side in shape), tensor.detach())
    held: Any = tensor
    values, spec, shape = held._local_tensor, held._spec, tuple(held.shape)
    mesh = _shape_of(spec.mesh)
    if math.prod(mesh) != processes:
        raise ValueError(f"is divided over {math.prod(mesh)} processes, the checkpoint is of {processes}")
    bounds = _bounds(shape, spec.placements, mesh, rank)
    expected = tuple(stop - start for start, stop in bounds)
    if tuple(values.shape) != expected and (values.numel() or math.prod(expected)):
        raise ValueError(f"has {list(values.shape)} of {list(shape)}, this process's part has {list(expected)}")
    return Part(shape, bounds, values.detach().reshape(expected))


def _bounds(shape: Sequence[int], placements: Sequence[_Record], mesh: Sequence[int], rank: int) -> Bounds:
    """The part that a process has, as torch divides: like ``torch.chunk``, the last ones have less or nothing.

    Args:
        shape: Of the whole tensor.
        placements: How each dimension of the mesh divides it.
        mesh: Processes along each of these.
        rank: The process, counted row by row.
    """
    if len(placements) != len(mesh):
        raise ValueError(f"has {len(placements)} placements on a mesh of {len(mesh)} dimensions")
    bounds = [(0, side) for side in shape]
    rest = math.prod(mesh)
    for placement, count in zip(placements, mesh, strict=True):
        rest //= count
        index = rank // rest % count
        if isinstance(placement, _Replicate):
            continue
        if not isinstance(placement, _Shard):
            raise ValueError("is placed in another way than as shards or copies")
        dimension = int(placement.dim if "dim" in vars(placement) else placement.given[0])  # type: ignore[attr-defined]
        start, stop = bounds[dimension]
        chunk = -(-(stop - start) // count)
        bounds[dimension] = (min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop))
    return tuple(bounds)


def _shape_of(mesh: _Record) -> tuple[int, ...]:
    """Processes along each dimension of a mesh, which must be numbered row by row.

    Versions of torch keep it as a tensor of ranks, or as the ranks with the sides and strides of each dimension.
    """
    known = vars(mesh)
    if isinstance(ranks := known.get("mesh", known.get("_mesh")), torch.Tensor):
        shape = tuple(ranks.shape)
    else:
        layout, ranks = vars(known["_layout"]), known["_rank_map"]
        axes = [vars(axis) for axis in layout["axes"]] if "axes" in layout else None
        sides = [axis["shape"] for axis in axes] if axes is not None else _sequence(layout["shape"])
        strides = [axis["stride"] for axis in axes] if axes is not None else _sequence(layout["stride"])
        shape = tuple(math.prod(_sequence(side)) for side in sides)  # of a single process a side may be empty
        for place, stride in enumerate(strides):
            if shape[place] > 1 and _sequence(stride)[-1] != math.prod(shape[place + 1 :]):
                raise ValueError("lies on a mesh whose processes are not numbered row by row")
    if ranks.flatten().tolist() != list(range(math.prod(shape))):
        raise ValueError("lies on a mesh of some of the processes")
    return shape


def _sequence(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 (a number or a sequence of them)
    return (value,) if isinstance(value, int) else tuple(value)
