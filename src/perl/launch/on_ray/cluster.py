"""A Ray cluster, reached and looked at before anything of it is reserved.

address -> Cluster, or one line that says what is wrong with it
"""

import contextlib
import logging
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RaySystemError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from perl.errors import PerlError, RecipeError, did_you_mean, first_line
from perl.launch.agreement import statement
from perl.launch.on_ray.address import ADDRESS, LOCAL, enter, no_cluster, of_this_machine
from perl.launch.on_ray.own_cluster import out_of_reach_of_signals, own_folder, silent_ray
from perl.recipe.rollout_section import StartedServers
from perl.recipe.sections import EngineSection
from perl.run.folder import differences

_STORAGE = "engine.storage"
_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Those of pyarrow's file systems."""
# For a node to start a Python that imports this package.
_LOOK_SECONDS = 600.0
# For a node to start a Python that imports next to nothing.
_PYTHON_SECONDS = 120.0
# Its distributions have several names; what it says itself it says after seconds of imports.
_SAY_VERSION = """
import importlib.metadata as metadata, importlib.util
if importlib.util.find_spec("vllm"):
    names = metadata.packages_distributions().get("vllm")
    print(metadata.version(names[0]) if names else "unknown")
"""
_UNKNOWN = "unknown"
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
        sizes: GPUs and cores of each node, by its id.
        logs: Folder in which each node has what Ray and the processes print.
        own: It is of this machine alone, and ends with the run, with its logs.
        let_go: What the run has started there ends when :func:`connected` does; not in a script with its own Ray.
    """

    address: str
    nodes: Mapping[str, str]
    gpus: int
    cpus: int
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    logs: str = "/tmp/ray/session_latest/logs"  # noqa: S108 (where Ray puts them)
    own: bool = False
    let_go: bool = True


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
        yield replace(_seen(None, None), logs="the session folder of its Ray, under logs,", let_go=False)
        return
    address = of_this_machine() if engine.address in (None, "auto") else engine.address
    if address not in (None, LOCAL):
        enter(address)
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    own = None
    with contextlib.ExitStack() as opened:
        if address in (None, LOCAL):
            own = opened.enter_context(own_folder())
            how |= {"address": LOCAL, "include_dashboard": False, "_temp_dir": str(own)}
        else:
            how |= {"address": address}
            how |= {} if _OF_A_JOB in os.environ else {"runtime_env": {"env_vars": _handed_on()}}
        opened.enter_context(silent_ray())
        opened.callback(ray.shutdown)
        try:
            with out_of_reach_of_signals():
                ray.init(**how)
        except (ConnectionError, RuntimeError, ValueError, RaySystemError) as error:
            raise no_cluster(address or "auto", error) from None
        yield _seen(None if own is not None else address, own)


def _handed_on() -> dict[str, str]:
    named = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON) and "@" not in value}
    words = {name: name.removeprefix("TOKENIZERS_") for name in named}
    return {name: value for name, value in named.items() if not any(word in words[name] for word in _SECRET)}


def _seen(address: str | None, own: Path | None) -> Cluster:
    alive = [node for node in ray.nodes() if node["Alive"]]
    has = ray.cluster_resources()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    sizes = {node["NodeID"]: _size(node["Resources"]) for node in alive}
    name = address or "this machine's Ray cluster"
    found = Cluster(name, nodes, *_size(has), sizes)
    return found if own is None else replace(found, logs=f"{own}/session_latest/logs", own=True)


def _size(resources: Mapping[str, float]) -> tuple[int, int]:
    """GPUs and cores."""
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 0))


def check_nodes(
    cluster: Cluster,
    seen: Sequence[Path],
    *,
    storage: str | None,
    shared: Path | None,
    servers: StartedServers | None = None,
    check_vllm: Callable[[str, str], None] = lambda _, __: None,
) -> None:
    """Refuses nodes that differ from this process, or do not see what the run needs.

    Args:
        cluster: Whose nodes are asked, each at once.
        seen: Files and folders that each must have.
        storage: Folder for checkpoints that each must be able to read; None, or a URI: nothing is looked for.
        shared: The run folder, if it must be the same on all nodes; None: it need not be.
        servers: That are to be started there; None: none are.
        check_vllm: Refuses a version of vLLM that the servers' Python has, on the node that is named.

    Raises:
        RecipeError: A node does not; the line names it.
    """
    if storage is not None and "://" in storage:
        _check_uri(storage)
    common = shared if storage is None else Path(storage) if "://" not in storage else None
    token = None if common is None else _token(common, _STORAGE if storage is not None else "train.output_dir")
    try:
        asked = {node: _asked(node, seen, servers, token) for node in cluster.nodes}
        ours = statement({})
        for node, question in asked.items():
            name = f"node {cluster.nodes[node]}"
            theirs = _answer(question, name)
            different = differences(ours["versions"], theirs["versions"])
            if different:
                hint = "install the same versions on every node"
                raise RecipeError(f"{name} has other versions than this one: {'; '.join(different[:3])}", "", hint)
            python = None if servers is None else servers.python
            _refuse_blind(theirs["absent"], name, token, storage, python)
            if servers is not None:
                _refuse_vllm(theirs["vllm"], name, servers.python, check_vllm)
    finally:
        if token is not None:
            token.unlink(missing_ok=True)


def _check_uri(storage: str) -> None:
    """Refuses a URI of a kind that Ray's storage is not; whether it can be written is found out by Ray."""
    scheme, _, place = storage.partition("://")
    if scheme not in _STORES or not place:
        hint = did_you_mean(scheme, _STORES) if place else "s3://BUCKET/FOLDER"
        raise RecipeError(f"{storage!r} is no place that Ray can keep files in", _STORAGE, hint)


def _refuse_blind(
    absent: Sequence[str], name: str, token: Path | None, storage: str | None, python: str | None
) -> None:
    """Refuses a node without the common folder, the servers' Python, or another file that the run needs."""
    if token is not None and str(token) in absent:
        where = "train.output_dir" if storage is None else _STORAGE
        hint = "a folder that all nodes share" + (", or engine.storage: s3://..." if storage is None else "")
        raise RecipeError(f"{name} does not see {token.parent} as this one does", where, hint)
    if python is not None and python in absent:
        hint = "the path of a Python that has vLLM, the same on every node"
        raise RecipeError(f"{name} does not have {python}", "rollout.servers.python", hint)
    if absent:
        hint = "a folder that all nodes share, or `ray job submit --working-dir . -- perl train RECIPE`"
        raise RecipeError(f"{name} does not have {absent[0]}", "", hint)


def check_here(servers: StartedServers, check_vllm: Callable[[str, str], None]) -> None:
    """Refuses servers that this machine, which is the whole cluster, cannot start; see :func:`check_nodes`."""
    if servers.python is not None and not Path(servers.python).exists():
        raise RecipeError(f"this machine does not have {servers.python}", "rollout.servers.python")
    _refuse_vllm(_vllm_of(servers.python), "this machine", servers.python, check_vllm)


def _refuse_vllm(found: str, name: str, python: str | None, check: Callable[[str, str], None]) -> None:
    where = "rollout.servers" if python is None else "rollout.servers.python"
    by = python or "the Python that trains"
    if not found:
        hint = "servers: {count: N, python: PATH} of an environment that has it, on every node"
        raise RecipeError(f"{name} has no vLLM for servers by {by}", where, hint)
    if found == _UNKNOWN:  # of a copy of its sources; a server says its own
        return
    try:
        check(found, f"{name}, {by}")
    except PerlError as error:
        first = error.mistakes[0]
        raise RecipeError(f"{first.where}: {first.message}", where, first.hint) from None


def _token(folder: Path, where: str) -> Path:
    token = folder / f".seen-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written: {error.strerror}", where) from None
    return token


def _asked(node: str, seen: Sequence[Path], servers: StartedServers | None, token: Path | None) -> Any:  # noqa: ANN401 (Ray's)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    python = None if servers is None else servers.python
    paths = [*map(str, seen), *([python] if python else []), *([str(token)] if token else [])]
    task = ray.remote(_look_around).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    return task.remote(paths, servers is not None, python)


def _look_around(paths: list[str], serves: bool, python: str | None) -> dict[str, Any]:
    """What a node has; run there."""
    absent = [path for path in paths if not Path(path).exists()]
    vllm = _vllm_of(python) if serves and not absent else ""
    return {**statement({}), "absent": absent, "vllm": vllm}


def _vllm_of(python: str | None) -> str:
    """The version of vLLM that a Python has; empty: it has none, or does not run."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or python is None}
    try:
        command = [python or sys.executable, "-c", _SAY_VERSION]
        found = subprocess.run(  # noqa: S603 (of the recipe)
            command, env=variables, capture_output=True, text=True, timeout=_PYTHON_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def _answer(question: Any, name: str) -> dict[str, Any]:  # noqa: ANN401 (Ray's)
    try:
        answer: dict[str, Any] = ray.get(question, timeout=_LOOK_SECONDS)
    except (RayError, PerlError) as error:
        missing = re.search(r"No module named \S+", str(error))
        if missing is not None:
            hint = "pip install 'perl-rl[ray]' on every node; engine.address says which cluster"
            raise RecipeError(f"{name} cannot do the run's work: {missing[0]}", "", hint) from None
        raise RecipeError(f"{name} does not answer: {first_line(error)}", ADDRESS) from None
    return answer
