"""States as files without code: tensors as safetensors, all else as JSON; what comes back is what was written.

nested state -> JSON value + tensors by path; and back

Knows nothing of optimizers. Pickles, which run code when they are read, are neither written nor read.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from perl.errors import PerlError
from perl.policy.checkpoint import readable

# Key of the JSON value in a file's header.
_VALUE = "value"
# JSON objects with one of these keys stand for what JSON has no form for.
_TENSOR, _TUPLE, _ITEMS, _NUMBER, _DTYPE = "tensor", "tuple", "items", "number", "dtype"
_MARKS = {_TENSOR, _TUPLE, _ITEMS, _NUMBER, _DTYPE}


def flatten(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:  # noqa: ANN401 (any plain value)
    """A nested value as JSON has it.

    Args:
        value: Of mappings, lists, tuples, tensors, numbers, texts, truth values, types of tensors and None.
        tensors: Receives the tensors by their paths, on the CPU, none of which shares memory with another.
        path: Of the value; empty: it is the outermost.

    Raises:
        PerlError: There is something else in it.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: repr(value)}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        while path in tensors:  # of keys that hold a slash themselves
            path += "+"
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: path}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [flatten(item, tensors, _within(path, i)) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        flat = {key: flatten(item, tensors, _within(path, key)) for key, item in value.items()}
        plain = all(isinstance(key, str) for key in flat) and not _MARKS & flat.keys()
        return flat if plain else {_ITEMS: [[flatten(key, tensors, path), item] for key, item in flat.items()]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise PerlError(
        f"{path} is a {kind}, which a checkpoint without pickles cannot hold",
        "train.optim",
        "an optimizer whose state is tensors and numbers, such as adamw_torch",
    )


def restored(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 (any plain value)
    """What :func:`flatten` was given."""
    if isinstance(value, list):
        return [restored(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not _MARKS & value.keys():
        return {key: restored(item, tensors) for key, item in value.items()}
    ((mark, content),) = value.items()
    match mark:
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(restored(item, tensors) for item in content)
        case "number":
            return float(content)
        case "dtype":
            return getattr(torch, content)
        case _:
            return {restored(key, tensors): restored(item, tensors) for key, item in content}


def write_state(file: Path, value: Any) -> None:  # noqa: ANN401 (any plain value)
    """Writes a nested value as one safetensors file; for what it may hold see :func:`flatten`."""
    tensors: dict[str, torch.Tensor] = {}
    header = json.dumps(flatten(value, tensors), allow_nan=False)
    file.parent.mkdir(parents=True, exist_ok=True)  # of a process that is here before the first one
    save_file(tensors, file, {_VALUE: header})


def read_state(file: Path) -> Any:  # noqa: ANN401 (any plain value)
    """What :func:`write_state` was given, its tensors on the CPU."""
    with readable(file), safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        return restored(json.loads(opened.metadata()[_VALUE]), tensors)


def _within(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
