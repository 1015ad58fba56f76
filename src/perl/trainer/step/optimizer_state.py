"""The state of a training by names, so that any number of processes, however they share it, goes on from it.

optimizer, scheduler, random numbers -> optimizer.safetensors, scheduler.safetensors, random-rankN.safetensors; and back

An optimizer of torch numbers its parameters; here they have the names that the policy gives them without wrappers.
Files hold tensors and JSON: pickles, which run code when they are read, are neither written nor read.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR

from perl.errors import ModelError, PerlError
from perl.policy.checkpoint import readable

OPTIMIZER = "optimizer.safetensors"
SCHEDULER = "scheduler.safetensors"
SCALER = "scaler.safetensors"
_RANDOM = "random-rank{rank}.safetensors"
# Of torch's wrapper of a compiled module.
_COMPILED = "_orig_mod."


def named_state(optimizer: torch.optim.Optimizer, policy: torch.nn.Module) -> dict[str, Any]:
    """An optimizer's state with names in the place of numbers; every process must ask where they share it.

    Returns:
        ``state``: by a parameter's name what is kept of it; ``groups``: hyperparameters, with the names of their
        parameters as ``params``; ``more``: what else an optimizer keeps.
    """
    packed, names = optimizer.state_dict(), _names(policy, optimizer)
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = {number: names[id(parameter)] for number, parameter in zip(numbers, held, strict=True)}
    return {
        "state": {by_number[number]: kept for number, kept in packed["state"].items()},
        "groups": [{**group, "params": [by_number[n] for n in group["params"]]} for group in packed["param_groups"]],
        "more": {key: value for key, value in packed.items() if key not in ("state", "param_groups")},
    }


def load_named_state(optimizer: torch.optim.Optimizer, policy: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Puts back what :func:`named_state` returned, on the devices and, bit for bit, in the types that it had.

    Raises:
        ModelError: It is of other parameters.
    """
    packed, names = optimizer.state_dict(), _names(policy, optimizer)
    places = group_places(optimizer, policy, saved["groups"])
    state: dict[Any, Any] = {}
    for i, (group, kept) in enumerate(zip(packed["param_groups"], optimizer.param_groups, strict=True)):
        if places[i] is not None:
            packed["param_groups"][i] = {**saved["groups"][places[i]], "params": group["params"]}
        for number, parameter in zip(group["params"], kept["params"], strict=True):
            if names[id(parameter)] in saved["state"]:
                state[number] = saved["state"][names[id(parameter)]]
    optimizer.load_state_dict({**packed, **saved["more"], "state": state})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = saved["state"].get(names[id(parameter)])
            if kept is not None and parameter in optimizer.state:
                optimizer.state[parameter] = _as_saved(optimizer.state[parameter], kept)


def group_places(
    optimizer: torch.optim.Optimizer, policy: torch.nn.Module, saved: Iterable[Mapping[str, Any]]
) -> list[int | None]:
    """Which of the saved groups each group of an optimizer is; None for one without parameters that was not saved.

    Raises:
        ModelError: The saved groups are of other parameters.
    """
    names = _names(policy, optimizer)
    written = [sorted(group["params"]) for group in saved]
    present = [sorted(names[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups]
    unknown = next((group for group in present if group and group not in written), None)
    lost = next((group for group in written if group and group not in present), None)
    if unknown or lost:
        what = (unknown or lost or [""])[0]
        raise ModelError(
            f"the checkpoint's optimizer moves other parameters, or in other groups ({what})",
            "train.optim",
            "the method and the optimizer that the checkpoint was written with, or start anew",
        )
    empty = [i for i, group in enumerate(written) if not group]
    return [written.index(group) if group else (empty.pop(0) if empty else None) for group in present]


def load_scheduler_state(
    scheduler: Any,  # noqa: ANN401 (torch's, or a wrapper of one)
    saved: Mapping[str, Any],
    places: list[int | None],
    groups: int,
) -> None:
    """Puts back a scheduler's state; rates are those of the new schedule, at the step of the saved.

    Args:
        scheduler: New, of an optimizer whose groups may be others than those saved.
        saved: The state.
        places: From :func:`group_places`.
        groups: How many were saved.
    """
    present = scheduler.state_dict()

    def placed(key: str, value: Any) -> Any:  # noqa: ANN401 (any plain value)
        if not isinstance(value, list) or len(value) != groups:
            return value
        own = present.get(key, [])
        return [value[place] if place is not None else own[i] for i, place in enumerate(places)]

    scheduler.load_state_dict({key: placed(key, value) for key, value in saved.items()})
    if isinstance(scheduler, LambdaLR):  # the saved rate is another one where the training is longer now
        of_groups = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [base * factor(scheduler.last_epoch) for base, factor in of_groups]
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate


def save_random_state(checkpoint: Path, rank: int, device: torch.device) -> None:
    """Writes the states of this process's random generators: Python's, NumPy's, torch's, and the device's.

    Args:
        checkpoint: The folder.
        rank: Number of this process; each has its own.
        device: That it computes on.
    """
    version, numbers, spare = random.getstate()
    name, keys, position, has_spare, spare_number = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    states = {
        "python": [version, torch.tensor(numbers), spare],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_spare), float(spare_number)],
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    write_state(checkpoint / _RANDOM.format(rank=rank), states)


def load_random_state(checkpoint: Path, rank: int, device: torch.device) -> bool:
    """Puts back what :func:`save_random_state` wrote; False if the checkpoint has none of this process."""
    file = checkpoint / _RANDOM.format(rank=rank)
    if not file.is_file():
        return False
    states = read_state(file)
    version, numbers, spare = states["python"]
    random.setstate((version, tuple(numbers.tolist()), spare))
    name, keys, *others = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *others))
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    return True


def has_random_state(checkpoint: Path) -> bool:
    """Whether a checkpoint holds random states as :func:`save_random_state` writes them, of any process."""
    return (checkpoint / _RANDOM.format(rank=0)).is_file()


def seed_random_state(seed: int, rank: int, step: int) -> None:
    """Starts this process's random numbers anew, by the seed of the run, its own number and the optimizer step.

    For a process that a checkpoint of fewer of them does not know: another number than any other process's, and the
    same whenever the same checkpoint is resumed.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)  # of every device too


def _names(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Name of each parameter by its identity; those that are not the policy's are counted."""
    names = {id(parameter): name.replace(_COMPILED, "") for name, parameter in policy.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.setdefault(id(parameter), f"parameter {len(names)}")
    return names


def _as_saved(loaded: Any, saved: Any) -> Any:  # noqa: ANN401 (what an optimizer keeps of a parameter)
    """What was loaded, where it lies, in the types that it was saved in: torch gives numbers those of the parameter."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        return {key: _as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if isinstance(saved, list | tuple) and type(loaded) is type(saved):
        return type(saved)(_as_saved(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


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
