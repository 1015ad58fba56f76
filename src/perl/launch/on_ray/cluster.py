"""A Ray cluster, reached and looked at before anything of it is reserved.

address -> Cluster, or one line that says what is wrong with it
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RaySystemError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from perl.errors import PerlError, RecipeError, did_you_mean, first_line
from perl.launch.agreement import statement
from perl.launch.start import ProcessFailedError
from perl.recipe.rollout_section import StartedServers
from perl.recipe.sections import EngineSection
from perl.run.folder import differences

_ADDRESS, _STORAGE = "engine.address", "engine.storage"
_LOCAL = "local"
_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Those of pyarrow's file systems."""
_NOTED = Path("/tmp/ray/ray_current_cluster")  # noqa: S108 (Ray's)
_CONNECT_SECONDS = 5.0
# For a node to start a Python that imports this package.
_LOOK_SECONDS = 600.0
_NOT_HERE = "no Ray cluster answers there"
# Variables of this process that the run's processes get too, by how their names begin; none that may hold a secret,
# since Ray shows them to who looks at the cluster.
_HANDED_ON = ("HF_", "VLLM_", "NCCL_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "TRACKIO_", "OMP_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
# Of a job that was submitted, whose own variables count.
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True)
class Cluster:
    """A cluster that was reached.

    Attributes:
        address: As messages name it.
        nodes: Ids of those that are alive, by their address; two may have one address.
        gpus: Of all nodes.
        cpus: Likewise.
        logs: Folder in which each node has what Ray and the processes print.
    """

    address: str
    nodes: Mapping[str, str]
    gpus: int
    cpus: int
    logs: str = "/tmp/ray/session_latest/logs"  # noqa: S108 (where Ray puts them)


@contextlib.contextmanager
def connected(engine: EngineSection) -> Iterator[Cluster]:
    """The cluster that a recipe names, for as long as the block runs; what the run starts there ends with it.

    Args:
        engine: Of the recipe.

    Raises:
        RecipeError: It does not answer, or cannot be used from here.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():  # by the script that trains
        yield replace(_seen(None, None), logs="the session folder of its Ray, under logs,")
        return
    address = _of_this_machine() if engine.address in (None, "auto") else engine.address
    if address not in (None, _LOCAL):
        _reach(address)
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    own = None
    with contextlib.ExitStack() as opened:
        if address in (None, _LOCAL):
            # In a folder of its own, so that no other program takes it for the cluster of this machine.
            own = tempfile.mkdtemp(prefix="perl-ray-")
            opened.push(partial(_clear, own))
            how |= {"address": _LOCAL, "include_dashboard": False, "_temp_dir": own}
        else:
            how |= {"address": address}
            how |= {} if _OF_A_JOB in os.environ else {"runtime_env": {"env_vars": _handed_on()}}
        opened.callback(ray.shutdown)
        try:
            ray.init(**how)
        except (ConnectionError, RuntimeError, ValueError, RaySystemError) as error:
            hint = "`ray start --head` on its first node, `ray start --address HOST:PORT` on the others"
            raise RecipeError(f"{address or 'auto'}: {_NOT_HERE}: {first_line(error)}", _ADDRESS, hint) from None
        yield _seen(None if own is not None else address, own)


def _of_this_machine() -> str | None:
    """The cluster that Ray was told of, or that ``ray start`` has noted on this machine; None: none that answers.

    Ray itself would also take a cluster that another run has started for itself, and which ends with that.
    """
    told = os.environ.get("RAY_ADDRESS", "")
    if told not in ("", "auto") and not told.startswith("http"):  # which is where jobs are submitted
        return told
    with contextlib.suppress(OSError, RecipeError):
        noted = _NOTED.read_text().strip()
        _reach(noted)
        return noted
    return None


def _clear(own: str, kind: type[BaseException] | None, *_: object) -> None:
    """Deletes Ray's folder, unless the run's message names the logs in it."""
    if kind is None or not issubclass(kind, ProcessFailedError):
        shutil.rmtree(own, ignore_errors=True)


def _handed_on() -> dict[str, str]:
    named = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON) and "@" not in value}
    words = {name: name.removeprefix("TOKENIZERS_") for name in named}
    return {name: value for name, value in named.items() if not any(word in words[name] for word in _SECRET)}


def _seen(address: str | None, own: str | None) -> Cluster:
    alive = [node for node in ray.nodes() if node["Alive"]]
    has = ray.cluster_resources()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    name = address or "this machine's Ray cluster"
    found = Cluster(name, nodes, int(has.get("GPU", 0)), int(has.get("CPU", 0)))
    return found if own is None else replace(found, logs=f"{own}/session_latest/logs")


def _reach(address: str) -> None:
    """Connects to the head once, since Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        hint = "HOST:PORT from a machine of the cluster; from outside: `ray job submit -- perl train RECIPE`"
        raise RecipeError(f"{address!r} is a way in from outside", _ADDRESS, hint)
    if not host or not port.isdecimal():
        raise RecipeError(f"{address!r} is not an address", _ADDRESS, "HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "is `ray start --head` running there, and can this machine reach it?"
        raise RecipeError(f"{address}: {_NOT_HERE}: {reason}", _ADDRESS, hint) from None


def check_room(cluster: Cluster, engine: EngineSection, servers: StartedServers | None) -> None:
    """Refuses a run that the cluster cannot hold.

    Raises:
        RecipeError: It has fewer GPUs than are asked for, or fewer cores than processes.
    """
    processes = engine.processes or 1
    each = gpus_of_server(cluster, servers)
    count = 0 if servers is None else servers.count
    training = processes if uses_gpus(cluster, engine) else 0
    if training + count * each > cluster.gpus:
        parts = [f"{training} for processes"] if training else []
        parts += [f"{count} x {each} for servers"] if count * each else []
        what = f"{training + count * each} GPUs are asked for ({' and '.join(parts)}), and {cluster.address} has"
        where = "engine.processes" if training > cluster.gpus else "rollout.servers"
        raise RecipeError(f"{what} {cluster.gpus}", where, "add nodes, or ask for fewer")
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


def check_nodes(
    cluster: Cluster, seen: Sequence[Path], *, storage: str | None, python: str | None, shared: Path | None
) -> None:
    """Refuses nodes that differ from this process, or do not see what the run needs.

    Args:
        cluster: Whose nodes are asked, each at once.
        seen: Files and folders that each must have.
        storage: Folder for checkpoints that each must be able to read; None, or a URI: nothing is looked for.
        python: Which runs servers; None: there are none, or it is the one that trains.
        shared: The run folder, if it must be the same on all nodes; None: it need not be.

    Raises:
        RecipeError: A node does not; the line names it.
    """
    if storage is not None and "://" in storage:
        _check_uri(storage)
    common = shared if storage is None else Path(storage) if "://" not in storage else None
    token = None if common is None else _token(common, _STORAGE if storage is not None else "train.output_dir")
    try:
        asked = {node: _asked(node, seen, python, token) for node in cluster.nodes}
        ours = statement({})
        for node, question in asked.items():
            name = f"node {cluster.nodes[node]}"
            theirs = _answer(question, name)
            different = differences(ours["versions"], theirs["versions"])
            if different:
                hint = "install the same versions on every node"
                raise RecipeError(f"{name} has other versions than this one: {'; '.join(different[:3])}", "", hint)
            _refuse_blind(theirs["absent"], name, token, storage)
    finally:
        if token is not None:
            token.unlink(missing_ok=True)


def _check_uri(storage: str) -> None:
    """Refuses a URI of a kind that Ray's storage is not; whether it can be written is found out by Ray."""
    scheme, _, place = storage.partition("://")
    if scheme not in _STORES or not place:
        hint = did_you_mean(scheme, _STORES) if place else "s3://BUCKET/FOLDER"
        raise RecipeError(f"{storage!r} is no place that Ray can keep files in", _STORAGE, hint)


def _refuse_blind(absent: Sequence[str], name: str, token: Path | None, storage: str | None) -> None:
    if token is not None and str(token) in absent:
        where = "train.output_dir" if storage is None else _STORAGE
        hint = "a folder that all nodes share" + (", or engine.storage: s3://..." if storage is None else "")
        raise RecipeError(f"{name} does not see {token.parent} as this one does", where, hint)
    if absent:
        hint = "a folder that all nodes share, or `ray job submit --working-dir . -- perl train RECIPE`"
        raise RecipeError(f"{name} does not have {absent[0]}", "", hint)


def _token(folder: Path, where: str) -> Path:
    token = folder / f".seen-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written: {error.strerror}", where) from None
    return token


def _asked(node: str, seen: Sequence[Path], python: str | None, token: Path | None) -> Any:  # noqa: ANN401 (Ray's)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    paths = [*map(str, seen), *([python] if python else []), *([str(token)] if token else [])]
    task = ray.remote(_look_around).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    return task.remote(paths)


def _look_around(paths: list[str]) -> dict[str, Any]:
    """What a node has; run there."""
    return {**statement({}), "absent": [path for path in paths if not Path(path).exists()]}


def _answer(question: Any, name: str) -> dict[str, Any]:  # noqa: ANN401 (Ray's)
    try:
        answer: dict[str, Any] = ray.get(question, timeout=_LOOK_SECONDS)
    except (RayError, PerlError) as error:
        missing = re.search(r"No module named \S+", str(error))
        if missing is not None:
            hint = "pip install 'perl-rl[ray]' on every node; engine.address says which cluster"
            raise RecipeError(f"{name} cannot do the run's work: {missing[0]}", "", hint) from None
        raise RecipeError(f"{name} does not answer: {first_line(error)}", _ADDRESS) from None
    return answer
