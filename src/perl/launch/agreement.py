"""What the processes of a run must agree on, and what was asked for against what there is.

recipe, versions, processes, GPUs -> nothing, or one line that says what differs
"""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perl.errors import MissingExtraError, RecipeError, raise_all
from perl.recipe.optional_packages import SWITCHES, missing_package
from perl.recipe.recipe import launched, world_size
from perl.recipe.sections import EngineSection
from perl.run.devices import accelerator
from perl.run.folder import differences, installed_versions
from perl.run.launched import started_by_srun, who


def check_joined(size: int) -> None:
    """Compares the processes that have joined, as the libraries count them, with those that were started.

    Args:
        size: How many have joined.

    Raises:
        RecipeError: They are not as many.
    """
    if size != world_size():
        what = f"{world_size()} processes were started, and accelerate has joined {size}"
        raise RecipeError(what, "launcher", "perl train RECIPE --processes N, or torchrun")


def check_size(asked: int | None) -> None:
    """Compares the processes that were asked for with those that were started.

    Args:
        asked: How many a recipe asks for; None: whatever there is.

    Raises:
        RecipeError: They are not as many.
    """
    if asked is None or asked == world_size():
        return
    where = "engine.processes"
    if launched():
        what = f"{asked} processes are asked for, and the launcher has started {world_size()}"
        raise RecipeError(what, where, f"perl train RECIPE --processes {asked}, or leave it out")
    line = f"perl train RECIPE --processes {asked}, or torchrun --nproc-per-node {asked} SCRIPT"
    raise RecipeError(f"perl.train runs in one process, but the recipe asks for {asked}", where, line)


def check_machine(engine: EngineSection, processes: int) -> None:
    """Refuses several processes on this machine that it has no GPUs or packages for.

    Args:
        engine: Of the recipe: the device, and the strategy.
        processes: How many there are to be, or are, on this machine.

    Raises:
        RecipeError: They are more than there are GPUs.
        MissingExtraError: Their strategy is not installed.
    """
    if engine.strategy == "zero2":
        raise_all(MissingExtraError, [*missing_package("engine.strategy", SWITCHES["deepspeed"])])
    device = accelerator() if engine.device == "auto" else None
    gpus = torch.accelerator.device_count() if device is not None else processes
    if processes > gpus:
        hint = f"at most {gpus}, a process for each; over several machines: torchrun --nnodes M --nproc-per-node {gpus}"
        raise RecipeError(f"{processes} processes, and this machine has {gpus} GPUs", "engine.processes", hint)


def processes_here() -> int:
    """Processes on this machine that see the same GPUs; ``srun --gpus-per-task 1`` shows each one of its own."""
    if started_by_srun() and torch.accelerator.device_count() == 1:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def statement(settings: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """What must be the same on all processes, and who says so.

    Args:
        settings: Of what the processes do, as JSON has them.
        packages: Whose versions count too.
    """
    versions = {"python": platform.python_version(), **installed_versions(packages)}
    return {"settings": dict(settings), "versions": versions, "pid": os.getpid(), "host": socket.gethostname()}


def difference(number: int, theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str) -> str:
    """What a process has otherwise than the main one.

    Args:
        number: Its rank.
        theirs: Its statement.
        ours: The main process's.
        what: Of what the settings are, as ``recipe``.

    Returns:
        A line that names the process and the first differences; empty if all is the same.
    """
    name = who(number, theirs["pid"], theirs["host"])
    for kind, topic in (("settings", f"another {what}"), ("versions", "other versions")):
        found = differences(ours[kind], theirs[kind])
        if found:
            return f"{name} has {topic} than rank 0: {'; '.join(found[:3])}"
    return ""
