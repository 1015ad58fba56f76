"""The shards of an adapter that verl's FSDP saved, read as untrusted data and put together.

actor/model_world_size_W_rank_R.pt of all processes -> name -> whole tensor, in the type in which it was trained

A checkpoint is a pickle. torch reads it with ``weights_only``, and of what it names beside plain tensors only the few
classes of sharded tensors are allowed. Not even these are made: records without behaviour stand in for them, so no code
of ``torch.distributed`` runs, no process group is needed, and files of other versions of torch are read alike.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals, get_unsafe_globals_in_checkpoint

from perl.errors import RunFolderError, first_line

_FILE = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
# What zipfile and torch raise for files that they cannot read.
_REFUSALS = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(zipfile.BadZipFile, zlib.error, UnpicklingError),
)


class _Unpickled:
    """What stands in for a class that a pickle names: it keeps what it is given."""

    given: tuple[Any, ...]

    def __new__(cls, *given: Any) -> "_Unpickled":  # noqa: ANN401 (whatever the file holds)
        made = object.__new__(cls)
        made.given = given
        return made


class _Shard(_Unpickled):
    """A dimension is divided over the processes; ``dim`` says which."""


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
    f"{_SPECS}.DTensorSpec": _Unpickled,
    f"{_SPECS}.TensorMeta": _Unpickled,
    f"{_SPECS}.ShardOrderEntry": _Unpickled,
    f"{_PLACEMENTS}.Shard": _Shard,
    f"{_PLACEMENTS}.Replicate": _Unpickled,
    "torch.distributed.device_mesh.DeviceMesh": _Unpickled,
    f"{_MESHES}._MeshLayout": _Unpickled,
    f"{_MESHES}._FlatLayout": _Unpickled,
}
"""Every name, beside those of plain tensors, that a checkpoint may hold -> what stands in for it."""


def files_of(actor: Path) -> list[Path]:
    """The file of each process, in order.

    Args:
        actor: Folder of a step's policy.

    Raises:
        RunFolderError: Some are absent.
    """
    counts = {int(found[1]) for path in actor.glob("*.pt") if (found := _FILE.fullmatch(path.name))}
    if len(counts) != 1:
        what = "files of several numbers of processes" if counts else "no file of a policy's weights"
        raise RunFolderError(f"holds {what}", str(actor), "is it verl's folder of a step's actor?")
    (count,) = counts
    files = [actor / f"model_world_size_{count}_rank_{rank}.pt" for rank in range(count)]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        what = f"of {count} processes' files {len(absent)} are absent, the first is {absent[0]}"
        raise RunFolderError(what, str(actor), "copy the files of all machines into one folder")
    return files


def read_shards(actor: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, whole.

    Args:
        actor: Folder of a step's policy.

    Raises:
        RunFolderError: A file is absent, cut, unreadable or names code; or the parts do not fit.
    """
    loaded: list[tuple[Path, Mapping[Any, Any]]] = []
    for path in files_of(actor):
        with _only_allowed():
            try:
                with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums that it writes
                    if (damaged := archive.testzip()) is not None:
                        raise RunFolderError(f"is damaged: {damaged} has another checksum", str(path))
                if named := get_unsafe_globals_in_checkpoint(path):
                    what = f"names {', '.join(sorted(named)[:3])[:200]}, which no checkpoint of weights does"
                    raise RunFolderError(f"{what}; nothing of it was run", str(path))
                found = torch.load(path, map_location="cpu", weights_only=True)
            except _REFUSALS as error:
                raise RunFolderError(f"cannot be read, it may be cut: {first_line(error)[:200]}", str(path)) from None
        if not isinstance(found, Mapping):
            raise RunFolderError("holds no tensors by name", str(path))
        loaded.append((path, found))
    names = loaded[0][1].keys()
    for path, tensors in loaded:
        if tensors.keys() != names or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise RunFolderError("has other tensors than those of the other processes, or more than tensors", str(path))
    return {name: _joined(name, {path: tensors[name] for path, tensors in loaded}) for name in names}


def _joined(name: str, parts: Mapping[Path, torch.Tensor]) -> torch.Tensor:
    """The whole tensor; verl divides each along its first dimension, as torch.chunk does."""
    first, values = next(iter(parts.values())), []
    for path, tensor in parts.items():
        held: Any = tensor
        try:
            if isinstance(tensor, _Sharded):
                (placement,) = held._spec.placements
                dim = vars(placement).get("dim", placement.given[0] if placement.given else None)
                if not isinstance(placement, _Shard) or int(dim) != 0:
                    what = f"{name} is not divided along its first dimension, as our jobs ask for"
                    raise RunFolderError(what, str(path))
                held = held._local_tensor
        except (ValueError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{name}: {first_line(error)}", str(path)) from None
        values.append(held.detach())
    try:
        whole = torch.cat(values) if isinstance(first, _Sharded) else values[0]
    except RuntimeError as error:
        raise RunFolderError(f"{name}: {first_line(error)}", str(next(iter(parts)).parent)) from None
    if whole.shape != first.shape:
        what = f"{name}: the parts make {list(whole.shape)}, the whole has {list(first.shape)}"
        raise RunFolderError(what, str(next(iter(parts)).parent))
    return whole


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
