"""Rollouts from vLLM servers, which get the adapter or the changed weights and never the model.

Update -> folder -> servers; requests -> servers -> Sampled

The servers are stock vLLM, started by somebody else, and read updates from a folder that they share with this process.
One may come, go or hang at any time: see ``liveness.py``. Of several processes the main one alone has a pool.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from perl.errors import PerlError, RolloutError, warn
from perl.recipe.rollout_section import VLLM_SERVER, Capabilities
from perl.recipe.server_address import ServerAddress
from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Form, OnGroup, Request, Sampled, Update
from perl.rollouts.vllm.dispatch import Dispatcher, Rollouts
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.members import Version
from perl.rollouts.vllm.sync_folder import Owner, clear, dead_runs, is_dead, run_of, update_files, write_update
from perl.rollouts.vllm.transport import Connections
from perl.run.host import Fleet

STALL_SECONDS = 60.0
"""Without a sign of life for so long a server is dropped."""

_CLOSE_SECONDS = 10.0

T = TypeVar("T")


class ServerPool:
    """An :class:`~perl.rollouts.engine.Engine` of any number of vLLM servers.

    Each request goes to the server with the fewest completions to write. What a server had in hand when it was dropped
    goes to another one; it serves again once it is back and has proven that it has the current update.
    """

    capabilities: ClassVar[Capabilities] = VLLM_SERVER

    def __init__(
        self,
        urls: Sequence[str | ServerAddress],
        folder: Path | Fleet | None,
        *,
        timeout_seconds: float = 600.0,
        folder_on_servers: str | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Waits until one server answers; the others may follow.

        Args:
            urls: As ``http://host:8000``, or with what gives access to it.
            folder: Where updates are written for the servers; or who has started the servers, finds them again and
                brings updates to them; None: it will load none.
            timeout_seconds: Time without any server after which rollouts fail.
            folder_on_servers: The same folder as the servers see it.
            stall_seconds: See :data:`STALL_SECONDS`.

        Raises:
            PerlError: An address is malformed, or a server is incompatible.
            RolloutError: No server answers.
        """
        connections = Connections()
        servers = [VllmServer(url, connections) for url in urls]
        if not urls or len({server.url for server in servers}) < len(urls):
            raise PerlError("needs the addresses of vLLM servers, each once", hint="as http://host:8000")
        self._owner: Owner | None = None
        self._folder = Path(folder).resolve() if isinstance(folder, Path | str) else None
        self._fleet = fleet = None if isinstance(folder, Path | str) else folder
        self._folder_on_servers = PurePosixPath(folder_on_servers or self._folder or "")
        self._written: set[Path] = set()
        self._dead: set[tuple[Path, str]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="perl-rollouts", daemon=True)
        self._thread.start()

        async def dispatcher() -> Dispatcher:
            limits = {"timeout_seconds": timeout_seconds, "stall_seconds": stall_seconds}
            return Dispatcher(servers, connections, fleet=fleet, **limits)

        self._dispatcher = self._call(dispatcher())
        self._dispatcher.versions.is_left = self._has_ended
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)  # whatever goes wrong, Ctrl-C too
            self._call(self._dispatcher.servers.connect())
            opened.pop_all()

    def take_folder(self, run: str) -> None:
        """Clears what killed runs have left in the folder and on the servers, and marks there that this one lives.

        Args:
            run: Name with which the names of its updates begin.

        Raises:
            PerlError: The folder cannot be written.
        """
        if self._fleet is not None:  # which serves this run alone: whatever it holds is of an earlier start
            self._call(self._dispatcher.unload(lambda name, _: run_of(name) not in (None, run)))
            return
        if self._folder is None:
            raise ValueError("an engine without a folder has none to take")
        folder = self._folder
        try:
            self._owner = Owner(folder, run)
        except OSError as error:
            raise PerlError(f"cannot write updates: {error}", str(folder)) from error
        self._dead |= {(folder, name) for name in dead_runs(folder)}
        unloaded = self._call(
            self._dispatcher.unload(lambda name, path: PurePosixPath(path).name == name and self._has_ended(path))
        )
        for place, name in sorted(self._dead):
            clear(place, name)
        if self._dead:
            runs = ", ".join(sorted({name for _, name in self._dead}))
            warn("PRL340", "rollouts: cleared what ended runs had left (%s): %d adapters on servers", runs, unloaded)

    def _has_ended(self, path: str) -> bool:
        """Whether the run has ended that has written an update, by its folder as servers see it."""
        parent, run = PurePosixPath(path).parent, run_of(PurePosixPath(path).name)
        if run is None:
            return False
        place = self._folder if self._folder is not None and parent == self._folder_on_servers else Path(parent)
        if is_dead(place, run):
            self._dead.add((place, run))
        return (place, run) in self._dead

    @property
    def counts(self) -> dict[str, int]:
        """So far: requests sent again, servers dropped, requests that went on under another update."""
        found = self._dispatcher
        counts = {"requests_retried": found.retried, "servers_lost": found.servers.lost}
        return counts | ({"requests_continued": found.continued} if found.continued else {})

    def check(self, longest_tokens: int, form: Form | None = None) -> list[dict[str, Any]]:
        """Refuses servers that cannot do what is needed, now and when they come back.

        Args:
            longest_tokens: Of a prompt with its completion.
            form: In which they will be given updates; None: it is not known yet.

        Returns:
            What each server that has answered reports of itself.

        Raises:
            PerlError: Names those that cannot.
        """

        async def check() -> list[dict[str, Any]]:
            members = self._dispatcher.servers.members
            self._dispatcher.versions.check(longest_tokens, form, members)
            return [{"url": member.url} | dataclasses.asdict(member.facts) for member in members if member.facts]

        return [facts | {"adapters": sorted(facts["adapters"])} for facts in self._call(check())]

    def foreign_weights(self) -> list[str]:
        """Addresses of servers that hold weights of a run that has ended: they need the whole base, as merged weights.

        Raises:
            PerlError: Another run uses a server in a way that does not go with what this one needs.
            RolloutError: No server answers.
        """
        held = self._call(self._dispatcher.servers.each(self._dispatcher.versions.foreign_weights))
        return sorted(url for url, name in held.items() if name is not None)

    def computes_base_alone(self) -> bool:
        """Whether a server computes the base wrongly in one batch with requests for adapters: vLLM for CPUs."""
        return self._on_cpu()

    def _on_cpu(self) -> bool:
        members = self._dispatcher.servers.members
        return any(member.facts is not None and member.facts.on_cpu for member in members)

    def expect(self, proof: ExpectedLogProbs) -> None:
        """From now on a server that comes back serves only if it answers so with what was loaded last."""
        self._dispatcher.versions.current.proof = proof

    def drop(self, failures: Mapping[str, str]) -> None:
        """Servers that failed a comparison are not used again before another process answers there.

        Args:
            failures: Their addresses, and the reason of each.
        """
        self._call(self._dispatcher.drop(failures))

    def load(self, update: Update) -> None:
        """From now on requests are answered with this update; those under way keep theirs, unless they continue.

        Merged weights wait until no request is under way. An adapter is meant for the base: merged weights that were
        loaded before it have restored that.

        Raises:
            PerlError: A server cannot load it before something is fixed, or the folder cannot be written.
        """
        if update.form == "merged" and self._on_cpu() and any(".experts." in name for name in update.tensors):
            what = "vLLM servers for CPUs compute with experts' weights wrongly once they have loaded them again"
            raise PerlError(what, hint="use backend vllm or transformers, or adapt other layers (peft.target_modules)")
        version = Version(update.name, update.form, proof=update.proof)
        if self._fleet is not None:
            version.path, version.forget = self._fleet.path(update.name), partial(self._fleet.forget, update.name)
            self._fleet.publish(update.name, update_files(update))
        elif self._folder is not None:
            version.path = str(self._folder_on_servers / update.name)
            folder = write_update(update, self._folder)
            self._written.add(folder)
            version.forget = partial(shutil.rmtree, folder, ignore_errors=True)
        else:
            raise ValueError("an engine without a folder loads nothing")
        self._call(self._dispatcher.load(version))

    def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None) -> Rollouts:
        """Begins to sample, with the update that was loaded last; before the first one, from the base.

        Args:
            requests: Each is one request to one server.
            sampling: How tokens are drawn.
            on_group: Called in a separate thread, one group at a time; what it raises comes out of ``result``.
        """
        return self._call(self._dispatcher.start(requests, sampling, on_group))

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """What each server that is ready writes, under the update loaded last, by its address.

        Raises:
            RolloutError: No server answers, or one refuses.
        """
        return self._call(self._dispatcher.trial(request, sampling))

    @property
    def asleep_bytes(self) -> int:
        """0: servers use other devices."""
        return 0

    def sleep(self) -> None:
        """Does nothing: others may use the servers."""

    def close(self) -> None:
        """Ends what is under way, makes servers forget what was loaded if they answer, and deletes what was written."""
        if not self._thread.is_alive():
            return
        closing = asyncio.run_coroutine_threadsafe(self._dispatcher.close(), self._loop)
        done = concurrent.futures.wait([closing], timeout=_CLOSE_SECONDS).done
        forgotten = bool(done) and closing.exception() is None and closing.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)
        if self._owner is not None:
            self._owner.release(forgotten)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns."""
        if not self._thread.is_alive():
            work.close()
            raise RolloutError("the engine was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # of Ctrl-C; what is done stays done
