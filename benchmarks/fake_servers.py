"""Fake vLLM servers, up to 1,024 in one process: what many servers and many clients do to each other.

how many -> their addresses, while they run; each answers by arithmetic, at once or as slowly as it is told

They speak the part of vLLM's HTTP that :class:`perl.rollouts.vllm.servers.ServerPool` uses. ``load_seconds`` and the
like change while they run, and all they were asked is counted. Started as a process of its own, so that neither its
open files nor its time are those of who asks::

    with fake_servers(16, answer_seconds=0.5) as fakes:
        pool = ServerPool(fakes.urls, folder)
        ...
        fakes.set(3, load_seconds=60.0)
        fakes.stats()[3]["completions"]
"""

import argparse
import asyncio
import contextlib
import functools
import json
import resource
import subprocess
import sys
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

TOKEN, BASE = 5, "base"
"""The one token that is ever written, and the name of the base."""


@dataclass(frozen=True)
class Behaviour:
    """How a fake server answers; times may change while they pass.

    Attributes:
        answer_seconds: To write the completions of a request.
        tokens: Of a completion, if the request allows so many.
        load_seconds: To load an adapter or merged weights.
        health_seconds: To answer whether it is healthy.
        refuses_loads: Every load is refused.
        wrong: Added to its log-probabilities, as if it served another base.
        engines: Data-parallel replicas that its metrics tell of.
    """

    answer_seconds: float = 0.0
    tokens: int = 8
    load_seconds: float = 0.0
    health_seconds: float = 0.0
    refuses_loads: bool = False
    wrong: float = 0.0
    engines: int = 1


def log_prob_of(name: str) -> float:
    """The log-probability of all tokens under an adapter, merged weights or the base, by its name."""
    return -0.1 - zlib.crc32(name.encode()) % 1000 / 1000


@dataclass(frozen=True)
class Fakes:
    """Servers that run.

    Attributes:
        urls: Their addresses.
        control: Of who counts what they were asked.
    """

    urls: list[str]
    control: str

    def stats(self) -> list[dict[str, Any]]:
        """Of each server what it was asked and has.

        ``requests`` by path, ``completions`` begun, ``in_hand`` now and ``most_in_hand`` at a time, ``proofs`` that it
        gave, ``connections`` and ``peak_connections``, names of ``adapters`` and ``weights``, ``loads`` of either.
        """
        return self._asked("/stats")["servers"]

    def peak_connections(self) -> int:
        """Open at one time, on all servers together, since the start or :meth:`reset`."""
        return int(self._asked("/stats")["peak_connections"])

    def reset(self) -> None:
        """Counts begin anew."""
        self._asked("/reset", {})

    def set(self, index: int | None = None, **behaviour: float) -> None:
        """From the next request on a server behaves otherwise; None: all do."""
        self._asked("/set", {"index": index, "behaviour": behaviour})

    def restart(self, index: int) -> None:
        """Another process in the place of a server: what it had loaded is gone."""
        self._asked("/restart", {"index": index})

    def _asked(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.control + path, data)  # noqa: S310 (loopback)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found


@contextlib.contextmanager
def fake_servers(count: int, **behaviour: float) -> Iterator[Fakes]:
    """So many servers in a process of their own, until the block ends.

    Args:
        count: How many.
        behaviour: Fields of :class:`Behaviour`, for all of them.
    """
    command = [sys.executable, __file__, str(count), json.dumps(behaviour)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 (this file)
    try:
        ports = json.loads(process.stdout.readline() if process.stdout is not None else "[]")
        control, *urls = [f"http://127.0.0.1:{port}" for port in ports]
        yield Fakes(urls, control)
    finally:
        process.kill()
        process.communicate()


class _Server:
    """The state of one server."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.changed = behaviour, asyncio.Event()
        self.connections = self.peak_connections = 0
        self.reset()
        self.restart()

    def reset(self) -> None:
        self.requests, self.loads = Counter[str](), Counter[str]()
        self.completions = self.most_in_hand = self.proofs = 0
        self.peak_connections = self.connections

    def restart(self) -> None:
        self.started, self.adapters, self.label, self.weights = time.time(), dict[str, str](), "default", BASE
        self.in_hand, self.written, self.busy_since = 0, 0, 0.0

    def stats(self) -> dict[str, Any]:
        names = ("requests", "completions", "in_hand", "most_in_hand", "connections", "peak_connections", "weights")
        names += ("proofs",)
        return {name: getattr(self, name) for name in names} | {
            "adapters": sorted(self.adapters),
            "loads": self.loads,
        }

    async def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests[path] += 1
        if method == "GET":
            return await self._get(path)
        if path == "/v1/completions":
            return await self._complete(body)
        if path == "/v1/load_lora_adapter":
            return await self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/collective_rpc" and not body["kwargs"]["weights_path"].endswith("/seen"):
            return await self._load(PurePosixPath(body["kwargs"]["weights_path"]).name, None)
        return 200, {"success": True}

    async def _get(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            await self._lasting("health_seconds")
            return 200, {}
        if path == "/metrics":
            return 200, self._metrics()
        cards = [{"id": BASE, "root": "/models/base", "parent": None, "max_model_len": 100_000}]
        cards += [{"id": name, "root": path, "parent": BASE} for name, path in self.adapters.items()]
        known = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": cards},
            "/weight_info": {"weight_version": self.label},
        }
        if path in known:
            return 200, known[path]
        takes_post = path in ("/v1/load_lora_adapter", "/collective_rpc")
        return (405, {"detail": "Method Not Allowed"}) if takes_post else (404, {"detail": "Not Found"})

    def _metrics(self) -> str:
        """As vLLM: a counter for each replica; it moves while something is written."""
        written = self.written + (1000 * (time.monotonic() - self.busy_since) if self.in_hand else 0)
        lines = [f"process_start_time_seconds {self.started!r}"]
        for engine in range(self.behaviour.engines):
            labels = f'{{engine="{engine}",model_name="{BASE}"}}'
            lines += [f"vllm:prompt_tokens_total{labels} 0.0", f"vllm:generation_tokens_total{labels} {written:.1f}"]
        return "\n".join(lines) + "\n"

    async def _load(self, name: str, path: str | None) -> tuple[int, Any]:
        self.loads[name] += 1
        await self._lasting("load_seconds")
        if self.behaviour.refuses_loads:
            return 400, {"error": {"message": f"cannot load {name}"}}
        if path is None:
            self.weights = name
        elif name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        else:
            self.adapters[name] = path
        return 200, {"success": True}

    async def _lasting(self, name: str) -> None:
        """Returns after as many seconds as the behaviour says, also if that changes meanwhile."""
        began = time.monotonic()
        while (left := began + getattr(self.behaviour, name) - time.monotonic()) > 0:
            changed = self.changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    def behave(self, **behaviour: float) -> None:
        """From now on."""
        self.behaviour = replace(self.behaviour, **behaviour)
        self.changed.set()
        self.changed = asyncio.Event()

    def _log_prob(self, model: str) -> float:
        return log_prob_of(self.weights if model == BASE else model) + self.behaviour.wrong

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        model, prompts = body["model"], body["prompt"]
        if model != BASE and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        if isinstance(prompts[0], list):  # a proof
            self.proofs += 1
            top = {f"token_id:{TOKEN}": self._log_prob(model), "token_id:6": -20.0}
            return 200, {"choices": [{"index": i, "logprobs": {"top_logprobs": [top]}} for i in range(len(prompts))]}
        count, log_prob = body["n"], self._log_prob(model)
        if not self.in_hand:
            self.busy_since = time.monotonic()
        self.completions, self.in_hand = self.completions + count, self.in_hand + count
        self.most_in_hand = max(self.most_in_hand, self.in_hand)
        length = min(self.behaviour.tokens, body["max_tokens"])
        try:
            await self._lasting("answer_seconds")
        finally:
            self.in_hand -= count
        self.written += count * length
        choice = {
            "finish_reason": "length" if length == body["max_tokens"] else "stop",
            "token_ids": [TOKEN] * length,
            "logprobs": {"token_logprobs": [log_prob] * length},
        }
        return 200, {"choices": [choice | {"index": i} for i in range(count)]}


class _Everybody:
    """All servers, and who tells what they were asked."""

    def __init__(self, count: int, behaviour: Behaviour) -> None:
        self.connections = self.peak_connections = 0
        self.servers = [_Server(behaviour) for _ in range(count)]

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        chosen = self.servers if body.get("index") is None else [self.servers[body["index"]]]
        if path == "/reset":
            self.peak_connections = self.connections
            for server in self.servers:
                server.reset()
        elif path == "/set":
            for server in chosen:
                server.behave(**body["behaviour"])
        elif path == "/restart":
            for server in chosen:
                server.restart()
        servers = [server.stats() for server in self.servers]
        return 200, {"servers": servers, "peak_connections": self.peak_connections}

    async def serve(self) -> None:
        listening = [await _listen(self._control)]
        for server in self.servers:
            listening.append(await _listen(functools.partial(self._accept, server)))
        print(json.dumps([one.sockets[0].getsockname()[1] for one in listening]), flush=True)
        await asyncio.gather(*(one.serve_forever() for one in listening))

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _talk(reader, writer, lambda _, path, body: self.answer(path, body))

    async def _accept(self, server: _Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections, server.connections = self.connections + 1, server.connections + 1
        self.peak_connections = max(self.peak_connections, self.connections)
        server.peak_connections = max(server.peak_connections, server.connections)
        try:
            await _talk(reader, writer, server.answer)
        finally:
            self.connections, server.connections = self.connections - 1, server.connections - 1


class _Connection(asyncio.StreamReaderProtocol):
    """Gives a request up whose client has gone, as vLLM does."""

    working: asyncio.Task[Any] | None = None

    def eof_received(self) -> bool | None:
        if self.working is not None:
            self.working.cancel()
        return super().eof_received()


Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Reply = Callable[[str, str, dict[str, Any]], Awaitable[tuple[int, Any]]]


async def _listen(accept: Accept, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
    """A port for connections that a coroutine accepts; 0: a free one."""

    def connection() -> _Connection:
        return _Connection(asyncio.StreamReader(limit=2**20), accept)

    return await asyncio.get_running_loop().create_server(connection, host, port, backlog=1024)


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Reply) -> None:
    """Answers the requests of a connection until it is closed; an answer that nobody waits for is given up."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ", 2)
            lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
            body = json.loads(await reader.readexactly(int(lengths[0])) or b"{}") if lengths else {}
            working = asyncio.ensure_future(answer(method, path, body))
            writer.transport.get_protocol().working = working  # type: ignore[attr-defined]
            status, found = await working
            text = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(text)) + text)
            await writer.drain()
    writer.close()


def main() -> None:
    """Runs them until the process is killed or who started it has ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("behaviour", type=json.loads, help="JSON of " + ", ".join(asdict(Behaviour())))
    parser.add_argument("--port", type=int, help="of one server, which nobody counts; the rest as vLLM's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> None:
        if given.port is not None:
            everybody = _Everybody(1, Behaviour(**given.behaviour))
            accept = functools.partial(everybody._accept, everybody.servers[0])
            await (await _listen(accept, given.host, given.port)).serve_forever()
        serving = asyncio.ensure_future(_Everybody(given.count, Behaviour(**given.behaviour)).serve())
        left = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await asyncio.wait([serving, left], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()

    asyncio.run(run())


if __name__ == "__main__":
    main()
