"""Who started this process, and what was asked for: what launchers leave in the environment, read in one place.

environment of srun or accelerate -> torch's variables (RANK, WORLD_SIZE, ...), strategy

torchrun and accelerate set torch's variables themselves; a process that has them is told nothing else here.
"""

import logging
import os
import re
from functools import cache
from typing import cast

from perl.errors import RecipeError, warn
from perl.recipe.recipe import is_first_process, launched, world_size
from perl.recipe.sections import Strategy

logger = logging.getLogger("perl")

HUB = "PERL_RL_HUB"
"""Set by a launcher of ours: address, port and token of its hub; after the token ``/`` and which start this is."""

# Ports of srun's runs: below those that Linux gives to outgoing connections.
_FIRST_PORT, _PORTS = 15_000, 15_000
_TORCHRUN = "torchrun --nproc-per-node N -m perl train RECIPE"
_TYPE_THIS = f"perl train RECIPE --processes N, or {_TORCHRUN}"
# What only a process that srun started has; the script of a batch job has all the other variables too.
_OF_A_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_SRUN_COMM_PORT")
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def adopt_launcher() -> None:
    """Gives a process of srun the variables of torch, before anything reads them.

    Raises:
        RecipeError: srun's variables are incomplete, or a launcher that is not known here, or that has lost processes,
            started this one.
    """
    if launched():
        if world_size() > 1 and "RANK" not in os.environ:
            raise RecipeError(f"WORLD_SIZE is {world_size()} and RANK is not set", "launcher", _TYPE_THIS)
        return
    if _size_of_step() > 1:
        os.environ.update(_of_slurm())
    elif any(_number(name, 1) > 1 for name in _OF_MPI):
        raise RecipeError("mpirun started this process, without the variables of torch", "launcher", _TYPE_THIS)
    elif {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "SLURM_JOB_ID" not in os.environ:
        # accelerate's launcher of one process sets the address only if it was asked for more; a job's script may too.
        what = "accelerate was asked for several processes and has started one, as it does on CPUs"
        raise RecipeError(what, "launcher", _TYPE_THIS)


def started_by_us() -> bool:
    """Whether ``perl train`` started this process, here or on a cluster; it then says what becomes of it."""
    return HUB in os.environ


def started_by_srun() -> bool:
    """Whether srun itself started this process as one of several, with no torchrun in between."""
    if any(name in os.environ for name in (HUB, "TORCHELASTIC_RUN_ID")) or "RANK" not in os.environ:
        return False
    return _size_of_step() == world_size() > 1 and os.environ["RANK"] == os.environ["SLURM_PROCID"]


def taken_over(strategy: str, *, written: bool = False) -> Strategy:
    """The strategy, where accelerate's launcher asks for FSDP2: that one.

    accelerate's own sharding is then switched off, before accelerate or transformers read that it was asked for.

    Args:
        strategy: As the recipe or the arguments have it.
        written: Whether somebody wrote it; ``ddp`` is also what is meant where nobody did.

    Raises:
        RecipeError: The launcher asks for what is not supported, or for another strategy than the recipe.
    """
    asked = _asked_of_accelerate()
    if asked is None:
        return cast("Strategy", strategy)
    if strategy != asked and (written or strategy != "ddp"):
        raise RecipeError(f"{strategy}, but accelerate's configuration asks for {asked}", "strategy", "ask once")
    _say_taken_over()
    return asked


@cache
def _say_taken_over() -> None:
    if is_first_process():
        logger.info("accelerate's configuration asks for FSDP2: strategy fsdp2, its other settings are not used")


@cache
def _asked_of_accelerate() -> Strategy | None:
    """What the configuration of ``accelerate launch`` asks for; once, since asking switches accelerate's own off."""
    others = {"MEGATRON_LM": "Megatron-LM", "PARALLELISM_CONFIG": "a parallelism_config", "DEEPSPEED": "DeepSpeed"}
    for name, what in others.items():
        if _is_on(f"ACCELERATE_USE_{name}"):
            hint = "fsdp2 where the base is too large for a GPU (shards: its copies), or ddp"
            raise RecipeError(f"accelerate's configuration asks for {what}", "strategy", hint)
    if not _is_on("ACCELERATE_USE_FSDP"):
        return None
    if os.environ.get("FSDP_VERSION", "1") != "2":
        what = "accelerate's configuration asks for FSDP1"
        raise RecipeError(what, "strategy", "use fsdp2: fsdp_version: 2 in accelerate's configuration")
    del os.environ["ACCELERATE_USE_FSDP"]
    return "fsdp2"


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _size_of_step() -> int:
    """Processes that srun started together with this one; 1 where it did not start it.

    In the script of a batch job, which is one process, the number of the job's tasks is set too.
    """
    if "SLURM_PROCID" not in os.environ:
        return 1
    tasks = _number("SLURM_STEP_NUM_TASKS", _number("SLURM_NTASKS", 1))
    if any(name in os.environ for name in _OF_A_STEP) or os.environ.get("ENVIRONMENT") != "BATCH":
        return tasks
    if tasks > 1:
        warn("PRL342", "one process, in a job of %d tasks: srun perl train starts all of them", tasks)
    return 1


def _of_slurm() -> dict[str, str]:
    """The variables of torch for this process of srun; an address or a port that someone has set is kept."""
    size, rank = _size_of_step(), _number("SLURM_PROCID", -1)
    local, here = _number("SLURM_LOCALID", -1), _tasks_here(size)
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next(filter(None, map(os.environ.get, lists)), "")
    if not 0 <= rank < size or local < 0 or here < 1 or not (nodes or here == size):
        what = "srun started this process, and SLURM_PROCID, SLURM_LOCALID, SLURM_TASKS_PER_NODE or SLURM_NODELIST"
        raise RecipeError(f"{what} is not as srun sets it", "launcher", f"srun --ntasks-per-node 1 {_TORCHRUN}")
    # The first host of ``a[07-09,11]b[1-2]-ib,c``, ``a07b1-ib``: up to the first comma that is in no brackets.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    first_node = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes
    port = _FIRST_PORT + (7 * _number("SLURM_JOB_ID", 0) + _number("SLURM_STEP_ID", 0)) % _PORTS
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or ("127.0.0.1" if here == size else first_node),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port),
    }


def _tasks_here(size: int) -> int:
    """Tasks on this node, of ``2(x3),1`` those of its place among the nodes."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return size if _number("SLURM_NNODES", 1) == 1 else _number("SLURM_NTASKS_PER_NODE", 0)
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return 0
        tasks += [int(found[1])] * int(found[2] or 1)
    node = _number("SLURM_NODEID", 0)
    return tasks[node] if node < len(tasks) else 0


def _number(name: str, otherwise: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return otherwise


def own_share(count: int) -> int:
    """This process's part of what its node has, so that all of its processes together take no more.

    At least one: more processes than there are take one each, and so more than there are.

    Args:
        count: How many there are for the node: worker processes, CPU threads.
    """
    processes, number = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return max(1, count // processes + (number < count % processes))
