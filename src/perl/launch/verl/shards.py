"""The shards of a checkpoint of verl's FSDP, put together.

actor/model_world_size_W_rank_R.pt of all processes -> name -> whole tensor, in the type in which it was trained

One file is in memory at a time, and of it only what is wanted stays.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from perl.errors import RunFolderError
from perl.launch.verl.stored import Bounds, Part, read_stored
from perl.run.files import parse_mapping, read_regular

_FILE = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_CONFIG = "fsdp_config.json"
_MOST_PROCESSES = 100_000

Look = Callable[[str, Part], None]
"""Is shown the name and the part of each tensor that is not kept."""


def read_shards(folder: Path, root: Path, wanted: Callable[[str], bool], look: Look) -> dict[str, torch.Tensor]:
    """The wanted tensors of a checkpoint, whole.

    Args:
        folder: Of the checkpoint's policy (``actor``).
        root: Folder that every file must lie in, links followed.
        wanted: Name of a tensor -> whether it is kept.
        look: Is shown the others, before they are dropped.

    Raises:
        RunFolderError: A file is absent, cut, unreadable, names code or lies elsewhere; or the parts do not fit.
    """
    files = files_of(folder, root)
    kept: dict[str, dict[Bounds, Part]] = {}
    for rank, path in enumerate(files):
        names = set()
        for name, part in read_stored(path, rank, len(files)):
            if not wanted(name):
                look(name, part)
                continue
            names.add(name)
            _keep(kept.setdefault(name, {}), name, part, path)
        if rank and names != kept.keys():
            lacking = sorted(names ^ kept.keys())
            raise RunFolderError(f"has other tensors than those of the other processes: {lacking[0]}", str(path))
    return {name: _joined(name, parts, folder) for name, parts in kept.items()}


def inside(path: Path, root: Path) -> Path:
    """A path that lies in a folder, links followed.

    Raises:
        RunFolderError: It leads out of it.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise RunFolderError("leads out of the job's folder", str(path), "copy what it leads to into its place")
    return path


def processes_of(folder: Path, root: Path) -> int:
    """How many processes wrote a checkpoint: what it says itself, else what its files are called.

    Raises:
        RunFolderError: It does not say.
    """
    config = inside(folder / _CONFIG, root)
    if not config.is_file():
        named = {int(match[1]) for path in folder.glob("*.pt") if (match := _FILE.fullmatch(path.name))}
        if len(named) != 1:
            what = "files of several numbers of processes" if named else "no file of a policy's weights"
            raise RunFolderError(f"holds {what}", str(folder), "is it verl's folder of a step's actor?")
        return named.pop()
    try:
        count = parse_mapping(read_regular(config)).get("world_size")
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(config)) from None
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_PROCESSES:
        raise RunFolderError(f"world_size {json.dumps(count)[:40]} is no number of processes", str(config))
    return count


def files_of(folder: Path, root: Path) -> list[Path]:
    """The file of each process, in order; arguments and errors as above."""
    count = processes_of(folder, root)
    files = [inside(folder / f"model_world_size_{count}_rank_{rank}.pt", root) for rank in range(count)]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        what = f"of {count} processes' files {len(absent)} are absent: {', '.join(absent[:3])}{more}"
        raise RunFolderError(what, str(folder), "copy the files of all machines into one folder")
    return files


def _keep(parts: dict[Bounds, Part], name: str, part: Part, path: Path) -> None:
    """Adds a part; what two processes have must be the same."""
    first = next(iter(parts.values()), part)
    if (first.shape, first.values.dtype) != (part.shape, part.values.dtype):
        raise RunFolderError(f"{name} has another shape or type than in the other processes' files", str(path))
    there = parts.get(part.bounds)
    if there is not None and not torch.equal(there.values, part.values):
        raise RunFolderError(f"{name} differs between processes that should have the same", str(path))
    if there is None:
        parts[part.bounds] = Part(part.shape, part.bounds, part.values.clone())


def _joined(name: str, parts: Mapping[Bounds, Part], folder: Path) -> torch.Tensor:
    """The whole tensor, each number of which one part has."""
    first = next(iter(parts.values()))
    if sum(part.values.numel() for part in parts.values()) != math.prod(first.shape):
        raise RunFolderError(f"{name}: the parts do not make a whole of {list(first.shape)}", str(folder))
    whole = torch.empty(first.shape, dtype=first.values.dtype)
    for part in parts.values():
        whole[tuple(slice(*bound) for bound in part.bounds)] = part.values
    return whole
