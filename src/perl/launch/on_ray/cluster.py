"""A Ray cluster, reached and looked at before anything of it is reserved.

engine.address -> Cluster, which can hold the run; or one line that says what is wrong with it
"""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file

# Private, as what is done with it.
from ray._private.node import Node
from ray.exceptions import AuthenticationError, RaySystemError

from perl.errors import RecipeError, first_line
from perl.launch.start import ProcessFailedError
from perl.recipe.rollout_section import StartedServers
from perl.recipe.sections import EngineSection

ADDRESS = "engine.address"

RESTARTS = 3
"""Failures after which the processes are started again, unless a recipe says how many."""
logger = logging.getLogger("perl")

_LOCAL = "local"
_LATE = "timed out during startup"
_CONNECT_SECONDS = 5.0
_NOT_HERE = "no Ray cluster answers there"
# Variables of this process that the run's processes get too, by how their names begin; none that may hold a secret,
# since Ray shows them to who looks at the cluster.
_HANDED_ON = ("HF_", "VLLM_", "NCCL_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "TRACKIO_", "OMP_")
_NICENESS = "RAY_worker_niceness"
# Of a job that was submitted, whose own variables count.
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True)
class Cluster:
    """A cluster that was reached.

    Attributes:
        address: As messages name it.
        gpus: Of all nodes.
        cpus: Likewise.
        node_gpus: GPUs of each node.
    """

    address: str
    gpus: int
    cpus: int
    node_gpus: tuple[int, ...] = field(default=())


@contextlib.contextmanager
def connected(engine: EngineSection) -> Iterator[Cluster]:
    """The cluster that a recipe names, for as long as the block runs; what the run starts there ends with it.

    Args:
        engine: Of the recipe.

    Raises:
        RecipeError: It does not answer, or cannot be used from here.
        ProcessFailedError: Ray's processes on this machine do not start in time.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():  # by the script that trains
        yield _seen("this machine's Ray cluster")
        return
    address = _of_this_machine() if engine.address in (None, "auto") else engine.address
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address in (None, _LOCAL):
        how |= {"address": _LOCAL, "include_dashboard": False}
        # Else Ray lowers their priority by 15: they would get what nothing else on this machine wants, which is little.
        os.environ.setdefault(_NICENESS, "0")
    else:
        _reach(address)
        how |= {"address": address}
        if _OF_A_JOB not in os.environ:
            named = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON)}
            secret = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASSWORD")
            plain = {name: value for name, value in named.items() if not secret.search(name) and "@" not in value}
            how |= {"runtime_env": {"env_vars": plain}}
    try:
        _join(how, allowed_restarts(engine))
        yield _seen("this machine's Ray cluster" if how["address"] == _LOCAL else how["address"])
    finally:
        ray.shutdown()


def allowed_restarts(engine: EngineSection) -> int:
    """How many failures end no run."""
    return RESTARTS if engine.restarts is None else engine.restarts


def _join(how: dict[str, Any], restarts: int) -> None:
    """Becomes a part of the cluster, or says in a line why that cannot be; one that starts late is started again."""
    address = how["address"]
    for left in reversed(range(restarts + 1)):
        try:
            ray.init(**how)
            return
        except AuthenticationError as error:
            hint = "export RAY_AUTH_MODE=token, with the token of its head in ~/.ray/auth_token or RAY_AUTH_TOKEN"
            raise RecipeError(
                f"{address}: the cluster there wants a token: {first_line(error)}", ADDRESS, hint
            ) from None
        # RuntimeError: it runs another version of Ray or of Python.
        except (ConnectionError, RaySystemError, RuntimeError, ValueError) as error:
            raise _no_cluster(address, error) from None
        except Exception as error:  # of a node that needs over 30 s Ray raises no class of its own
            if _LATE not in str(error):
                raise
            _end_late_node(error)
            if not left:
                hint = "the machine may have too little memory or too much to do; the same command goes on"
                raise ProcessFailedError("Ray's processes did not start within 30 s", hint=hint) from None
            logger.info("Ray's processes did not start within 30 s; they are started again, %d times at most", left)


def _end_late_node(error: BaseException) -> None:
    """Ends what was started of a node: Ray itself does with this process, and only the frame that gave up knows it."""
    trace = error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        trace = trace.tb_next
    ray.shutdown()


def _seen(name: str) -> Cluster:
    alive, has = [node for node in ray.nodes() if node["Alive"]], ray.cluster_resources()
    node_gpus = tuple(int(node["Resources"].get("GPU", 0)) for node in alive)
    return Cluster(name, int(has.get("GPU", 0)), int(has.get("CPU", 0)), node_gpus)


def _of_this_machine() -> str | None:
    """The cluster that Ray was told of, or that ``ray start`` has noted on this machine; None: none that answers.

    Ray itself would also take a cluster that another run has started for itself, and which ends with that.
    """
    told = os.environ.get("RAY_ADDRESS", "")
    if told not in ("", "auto", _LOCAL) and not told.startswith("http"):  # which is where jobs are submitted
        return told
    with contextlib.suppress(OSError, RecipeError):
        noted = Path(get_ray_address_file(None)).read_text(encoding="utf-8").strip()
        _reach(noted)
        return noted
    return None


def _reach(address: str) -> None:
    """Connects to the head once, since Ray itself tries for minutes.

    Raises:
        RecipeError: Nothing answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise _no_cluster(address, error) from None


def answers(address: str) -> bool:
    """Whether something listens where a cluster's head should be."""
    with contextlib.suppress(RecipeError):
        _reach(address)
        return True
    return False


def _no_cluster(address: str, error: BaseException) -> RecipeError:
    """What is said where nothing answers, something that is no cluster, or one that is not well."""
    reason = getattr(error, "strerror", None) or first_line(error)
    hint = "`ray start --head` on its first node, `ray start --address HOST:PORT` on the others"
    return RecipeError(f"{address}: {_NOT_HERE}: {reason}", ADDRESS, hint)


def check_room(cluster: Cluster, engine: EngineSection, servers: StartedServers | None) -> None:
    """Refuses a run that the cluster cannot hold, if nobody else uses it: Ray would wait for ever.

    A process takes one GPU, or one core where there are none, on whichever node; a server takes its GPUs of one node,
    and without GPUs needs a core, which it shares with others at worst.

    Raises:
        RecipeError: It has fewer GPUs than are asked for, no node for a server, or fewer cores than processes or than
            servers.
    """
    processes, each = engine.processes or 1, gpus_of_server(cluster, servers)
    count = 0 if servers is None else servers.count
    training = processes if uses_gpus(cluster, engine) else 0
    if training + count * each > cluster.gpus:
        parts = [f"{training} for processes"] if training else []
        parts += [f"{count} x {each} for servers"] if count * each else []
        what = f"{training + count * each} GPUs are asked for ({' and '.join(parts)}), and {cluster.address} has"
        where = "engine.processes" if training > cluster.gpus else "rollout.servers"
        raise RecipeError(f"{what} {cluster.gpus}", where, "add nodes, or ask for fewer")
    places = sum(gpus // each for gpus in cluster.node_gpus) if each else max(1, cluster.cpus)
    if count > places and (cluster.node_gpus or not each):
        what = f"{count} servers of {each} GPUs each, and the nodes of {cluster.address} have room for {places}"
        raise RecipeError(what, "rollout.servers.count", "add nodes, or ask for fewer or smaller ones")
    if not training and processes > cluster.cpus:
        what = f"{processes} processes, and {cluster.address} has {cluster.cpus} cores"
        raise RecipeError(what, "engine.processes", f"at most {cluster.cpus}")


def uses_gpus(cluster: Cluster, engine: EngineSection) -> bool:
    """Whether the processes train on GPUs."""
    return cluster.gpus > 0 and engine.device != "cpu"


def gpus_of_server(cluster: Cluster, servers: StartedServers | None) -> int:
    """GPUs of each server that is started."""
    if servers is None:
        return 0
    return servers.gpus_each if servers.gpus_each is not None else int(cluster.gpus > 0)
