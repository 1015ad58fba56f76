"""vLLM servers as actors of a Ray cluster: one actor owns one stock server, and Ray starts it again elsewhere.

command line -> actors -> addresses; update in Ray's object store -> memory of the node, where its servers read it
"""

import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from perl.errors import RolloutError
from perl.launch.on_ray import owned_process
from perl.recipe.server_address import ServerAddress
from perl.run.host import Fleet

SERVER = "perl-server-{}"
"""Names of the actors in the run's namespace."""

# For an actor to answer; one that is being started again answers later.
_ASK_SECONDS = 60.0
# For the other servers, once one is being started.
_GRACE_SECONDS = 30.0
_STOP_SECONDS = 15.0
KEY_VARIABLE = "PERL_RL_SERVER_KEY"
"""Variable of the run's processes that holds the servers' key."""
# For the cluster to start a Python and choose a port, after which vLLM itself takes its time.
_START_SECONDS = 300.0
# For an update to reach a node.
_BRING_SECONDS = 300.0
_SECONDS_TO_TELL = 1.0
_SHM = Path("/dev/shm")  # noqa: S108 (memory, in a folder that only this user can read)


PORT = "{port}"
"""Stands for the port, which is chosen on the server's node."""


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        line: The command as a shell has it, with :data:`PORT` in the place of the port.
        python: Takes the place of the line's first word; None: ours.
        gpus: That each server is given.
        key: Without which it answers nobody under /v1.
    """

    line: str
    python: str | None
    gpus: int
    key: str


class RolloutServer:
    """The actor's class: it owns one vLLM server, and puts updates into the memory of its node."""

    def __init__(self, command: ServerCommand, folder: str) -> None:
        """Starts the server on a free port; it needs a minute until it answers.

        Args:
            command: How.
            folder: In which updates lie on each node.
        """
        self._folder, self._name = Path(folder), f"server-{os.getpid()}"
        with socket.socket() as listening:
            listening.bind(("", 0))
            port = int(listening.getsockname()[1])
        place = ray.util.get_node_ip_address()
        self._url = f"http://{place}:{port}"
        os.environ[KEY_VARIABLE] = command.key
        self._owned = _started(command, place, port, self._folder, self._name)

    def address(self) -> str:
        """Where the server listens, once it is up.

        Raises:
            RuntimeError: It has ended; Ray starts the actor again.
        """
        ended = self._folder / (self._name + owned_process.ENDED)
        if not ended.exists():
            return self._url
        last = (self._folder / f"{self._name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        # Ray starts the actor again, with another server.
        threading.Timer(_SECONDS_TO_TELL, os._exit, (1,)).start()
        raise RuntimeError(f"vLLM ended with exit code {ended.read_text()}: {' '.join(last)[:300]}")

    def bring(self, name: str, kept: Collection[str], files: Sequence[Any]) -> None:
        """Puts an update into the memory of this node, unless another server here has; others go.

        Args:
            name: Of the update.
            kept: Names of those that may still be needed.
            files: A reference to its files in the object store, in a list so that Ray does not fetch it before.
        """
        target = self._folder / name
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of the servers of a node, one at a time
            if target.is_dir():
                return
            for held in self._folder.iterdir():
                if held.is_dir() and held.name not in kept:
                    shutil.rmtree(held, ignore_errors=True)
            contents: Mapping[str, Any] = ray.get(files[0], timeout=_BRING_SECONDS)
            staged = self._folder / f".{name}.tmp"
            shutil.rmtree(staged, ignore_errors=True)
            for file, content in contents.items():
                (staged / file).parent.mkdir(parents=True, exist_ok=True)
                (staged / file).write_bytes(memoryview(content))
            staged.rename(target)

    def stop(self) -> None:
        """Ends the server, and with the last one of a node what lies in its memory."""
        self._owned.close()
        end = time.monotonic() + _STOP_SECONDS
        ended = self._folder / (self._name + owned_process.ENDED)
        while self._folder.is_dir() and not ended.exists() and time.monotonic() < end:
            time.sleep(0.1)


def _started(command: ServerCommand, place: str, port: int, folder: Path, name: str) -> IO[bytes]:
    """Starts a server; as long as what is returned stays open, it runs."""
    words = shlex.split(command.line.replace(PORT, str(port)))
    environment = dict(os.environ)
    while "=" in words[0].partition(" ")[0] and not words[0].startswith("-"):
        variable, _, value = words.pop(0).partition("=")
        environment[variable] = value
    if command.python is not None:  # what lies beside it, as ``vllm`` does, counts too
        beside = Path(command.python).parent / words[0]
        words[0] = str(beside) if words[0] != "python" and beside.exists() else command.python
        environment.pop("PYTHONPATH", None)
    environment["VLLM_API_KEY"] = command.key
    words += ["--host", place, "--disable-uvicorn-access-log"]
    watched = [sys.executable, str(Path(owned_process.__file__)), str(folder), name, *words]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / f"{name}.log").open("ab") as file:
        starter = subprocess.Popen(watched, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment)  # noqa: S603
    starter.wait()  # it has left its work to a process that is no child of ours
    assert starter.stdin is not None  # noqa: S101 (a pipe)
    return starter.stdin


def folder_in_memory(run: str) -> str:
    """Where the updates of a run lie on every node."""
    return str((_SHM if _SHM.is_dir() else Path(tempfile.gettempdir())) / f"perl-rl-{os.getuid()}-{run}")


@contextlib.contextmanager
def started_servers(count: int, command: ServerCommand, folder: str) -> Iterator[list[Any]]:
    """The actors of the servers, which end with the block.

    Args:
        count: How many.
        command: How each is started.
        folder: See :func:`folder_in_memory`.
    """
    # vLLM says itself what it needs of the cores; where it has GPUs it is placed by these.
    kind: Any = ray.remote(RolloutServer)
    how = {"num_cpus": 0, "num_gpus": command.gpus, "max_restarts": -1, "max_concurrency": 8}
    actors = [kind.options(name=SERVER.format(index), **how).remote(command, folder) for index in range(count)]
    try:
        yield actors
    finally:
        stopping = [actor.stop.remote() for actor in actors]
        with contextlib.suppress(RayError):
            ray.wait(stopping, num_returns=len(stopping), timeout=2 * _STOP_SECONDS)
        for actor in actors:
            ray.kill(actor, no_restart=True)


class RayFleet(Fleet):
    """The servers as a process of the run sees them."""

    def __init__(self, count: int, folder: str) -> None:
        """Takes so many servers; finds their actors by name.

        Args:
            count: How many there are.
            folder: In which updates lie on their nodes.
        """
        self._count, self._folder = count, folder
        self._actors: dict[int, Any] = {}
        self._kept: dict[str, Any] = {}  # references to the files of updates, by name

    def addresses(self) -> list[ServerAddress]:
        """See :class:`perl.run.host.Fleet`; one that is not started yet is nowhere, and found when it is."""
        asked = [self._actor(index).address.remote() for index in range(self._count)]
        ray.wait(asked, timeout=_START_SECONDS)
        ray.wait(asked, num_returns=len(asked), timeout=_GRACE_SECONDS)
        urls, reason = [""] * self._count, ""
        for index, reference in enumerate(asked):
            try:
                urls[index] = ray.get(reference, timeout=0)
            except RayError as error:
                reason = _reason(error)
        if not any(urls):
            what = f"the cluster has started none of {self._count} servers: {reason}"
            raise RolloutError(what, "rollout.servers", "`ray status` says what the cluster has and what waits for it")
        return [ServerAddress(url or f"http://127.0.0.1:{index + 1}", KEY_VARIABLE) for index, url in enumerate(urls)]

    async def address(self, index: int) -> str:
        """See :class:`perl.run.host.Fleet`."""
        return str(await self._asked(_ASK_SECONDS, index, "address"))

    def path(self, name: str) -> str:
        """See :class:`perl.run.host.Fleet`."""
        return f"{self._folder}/{name}"

    def publish(self, name: str, files: Mapping[str, bytes]) -> None:
        """See :class:`perl.run.host.Fleet`."""
        try:
            # As arrays they lie in the store once, and a node's servers read them there.
            self._kept[name] = ray.put({file: np.frombuffer(content, np.uint8) for file, content in files.items()})
        except (RayError, ValueError) as error:
            what = f"Ray's object store does not take the update {name}: {type(error).__name__}"
            raise RolloutError(what, "rollout.servers", "the same command goes on") from None

    async def bring(self, index: int, name: str) -> None:
        """See :class:`perl.run.host.Fleet`."""
        seconds = _ASK_SECONDS + _BRING_SECONDS
        await self._asked(seconds, index, "bring", name, list(self._kept), [self._kept[name]])

    def forget(self, name: str) -> None:
        """See :class:`perl.run.host.Fleet`."""
        self._kept.pop(name, None)

    def _actor(self, index: int) -> Any:  # noqa: ANN401 (Ray's)
        if index not in self._actors:
            self._actors[index] = ray.get_actor(SERVER.format(index))
        return self._actors[index]

    async def _asked(self, seconds: float, index: int, what: str, *given: Any) -> Any:  # noqa: ANN401 (Ray's)
        """What an actor answers; occupies no thread meanwhile, so that any number can be asked at a time."""
        try:
            return await asyncio.wait_for(getattr(self._actor(index), what).remote(*given), seconds)
        except (RayError, ValueError, TimeoutError) as error:  # it is being started again, or its node is gone
            raise OSError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """What an actor said, or that it said nothing."""
    told = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(told, RuntimeError | OSError):
        return str(told)
    if told is not None:
        return f"its actor fails: {told!r}"
    return f"its actor does not answer: {type(error).__name__}"
