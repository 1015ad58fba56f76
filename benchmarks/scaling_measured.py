"""What one machine can measure of a sync to many servers. Part of ``scaling.py``.

fake vLLM servers, the project's ServerPool -> seconds, processor seconds, connections; bytes -> seconds a byte
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import save

from perl.recipe.server_address import ServerAddress
from perl.rollouts.engine import EngineSampling, Request, Update
from perl.rollouts.vllm.answers import read_answer
from perl.rollouts.vllm.giving import Given, Order, give_at
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.fake_servers import TOKEN, Fakes, fake_servers

TENSORS = 392  # of a LoRA on the seven linear layers of 28 blocks
GROUP, TOKENS, PROMPT = 8, 256, 200
LEAST_REQUESTS, WRITING_SECONDS = 64, 1.0
SHM = Path("/dev/shm")  # noqa: S108 (memory, in a folder that is deleted)
_CALLS = 256
REPEATS, MOST_REPEATED = 3, 64
"""Syncs of each size, with up to so many servers; with more there is one."""
_LOOK_SECONDS = 0.2
# All fakes and the pool share two cores: answers of 1,024 servers may wait here for longer than a server may hang.
STALL_SECONDS = 600.0
_OBJECT_STORE = 1_500_000_000


def adapter(nbytes: int) -> dict[str, torch.Tensor]:
    """So many bytes in as many tensors as a LoRA has."""
    names = [f"base_model.model.model.layers.{number // 14}.part{number % 14}.weight" for number in range(TENSORS)]
    return {name: torch.ones(nbytes // (2 * TENSORS), dtype=torch.bfloat16) for name in names}


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it returns, and its seconds: of the clock, and of this process's threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def measure_pool(servers: int, sizes: Sequence[int], repeats: int = 1) -> dict[str, Any]:
    """A pool of so many fake servers: connect, a sync of each size, a batch of rollouts.

    The servers are one process on the same cores and load nothing: seconds are those of the protocol and of writing
    the folder once.

    Args:
        servers: How many.
        sizes: Bytes of an adapter.
        repeats: Syncs of each size, of which the least counts: what else runs here only adds.
    """
    with (
        fake_servers(servers, tokens=TOKENS, answer_seconds=WRITING_SECONDS) as fakes,
        tempfile.TemporaryDirectory() as folder,
    ):
        pool, connected = timed(lambda: ServerPool(fakes.urls, Path(folder), stall_seconds=STALL_SECONDS))
        try:
            fakes.reset()
            syncs = {str(size): measure_syncs(pool, fakes, size, repeats) for size in sizes}
            asked = sum(sum(server["requests"].values()) for server in fakes.stats())
            fakes.reset()
            requests = [Request((TOKEN,) * PROMPT, GROUP)] * max(LEAST_REQUESTS, servers)
            sampling = EngineSampling(1.0, TOKENS, (0,))
            groups, batch = timed(lambda: pool.start(requests, sampling).result())
            tokens = sum(len(sampled.token_ids) for group in groups for sampled in group)
            return {
                "servers": servers,
                "connect": connected,
                "syncs": syncs,
                "requests_of_a_sync": asked / (servers * repeats * len(sizes)),
                "batch": batch | {"requests": len(requests), "tokens": tokens},
                "cpu_us_per_token": 1e6 * batch["cpu_seconds"] / tokens,
                "peak_connections": fakes.peak_connections(),
                "counts": pool.counts,
                "load_average": os.getloadavg()[0],
            }
        finally:
            pool.close()


def measure_syncs(pool: ServerPool, fakes: Fakes, nbytes: int, repeats: int) -> dict[str, float]:
    """The least of each number: ``seconds`` until the run goes on; the others until the last server has the update."""
    tensors, found = adapter(nbytes), []
    for turn in range(repeats):
        update = Update(f"v{nbytes}-{turn}", "adapter", tensors, {"r": 8})
        late = pool.counts.get("servers_late", 0)
        wall, cpu = time.perf_counter(), time.process_time()
        pool.load(update)
        seconds = time.perf_counter() - wall
        late = pool.counts.get("servers_late", 0) - late
        while late and not all(update.name in server["adapters"] for server in fakes.stats()):
            time.sleep(_LOOK_SECONDS)
        every = {"all_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        found.append({"seconds": seconds, "late": late} | every)
    return {name: min(row[name] for row in found) for name in found[0]}


def measure_bytes(nbytes: int, repeats: int = 5) -> dict[str, float]:
    """Seconds a byte to serialise an adapter, and to write it to memory and to a disk that has it then; the least."""
    tensors, rows = adapter(nbytes), []
    memory = tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None)
    with memory as in_memory, tempfile.TemporaryDirectory() as on_disk:
        for _ in range(repeats):
            content, *seconds = _written(tensors, Path(in_memory) / "a", Path(on_disk) / "a")
            rows.append(seconds)
    names = ("serialise", "memory_write", "disk_write")
    return {name: min(row[at] for row in rows) / len(content) for at, name in enumerate(names)}


def _written(tensors: dict[str, torch.Tensor], in_memory: Path, on_disk: Path) -> tuple[bytes, float, float, float]:
    content, serialised = timed(lambda: save(tensors))
    _, memory = timed(lambda: in_memory.write_bytes(content))
    _, disk = timed(lambda: _write_through(on_disk, content))
    return content, serialised["seconds"], memory["seconds"], disk["seconds"]


def _write_through(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def measure_answer(tokens: int = 2048, repeats: int = 5) -> float:
    """Processor seconds a token to read an answer as vLLM gives it: JSON, then ids and log-probabilities."""
    draw = np.random.default_rng(0)
    scores = [-float(number) for number in draw.exponential(size=tokens)]
    logprobs = {
        "text_offset": list(range(0, 5 * tokens, 5)),
        "token_logprobs": scores,
        "tokens": [" word"] * tokens,
        "top_logprobs": [{" word": score} for score in scores],
    }
    ids = [int(number) for number in draw.integers(150_000, size=tokens)]
    choice = {"text": " word" * tokens, "logprobs": logprobs, "finish_reason": "stop", "token_ids": ids}
    text = json.dumps({"choices": [choice | {"index": index} for index in range(GROUP)]})

    def read() -> list[Any]:
        return [read_answer(found) for found in json.loads(text)["choices"]]

    return min(timed(read)[1]["cpu_seconds"] for _ in range(repeats)) / (GROUP * tokens)


def measure_ray(nbytes: int) -> dict[str, Any] | None:
    """Seconds of Ray's object store, in a process of its own; None: Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        return None
    command = [sys.executable, __file__, str(nbytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)  # noqa: S603 (this file)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_agent(repeats: int = 20) -> float:
    """Processor seconds of an agent that has its server look at itself, load an adapter and unload one; the least."""
    seconds = []
    with fake_servers(1) as fakes:
        address = ServerAddress(fakes.urls[0])
        for turn in range(repeats):
            order = Order(
                f"v{turn}", "adapter", "", f"v{turn}", load=True, look=True, takes_weights=True, unload=("old",)
            )
            given, told = timed(partial(asyncio.run, give_at(order, address)))
            if not (isinstance(given, Given) and given.loaded):
                raise RuntimeError(f"the server was told in vain: {given}")
            seconds.append(told["cpu_seconds"])
    return min(seconds)


def measure_agents(counts: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of servers that agents tell; see ``scaling_agents.py``; none where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        return []
    program = Path(__file__).with_name("scaling_agents.py")
    command = [sys.executable, str(program), json.dumps([list(counts), list(sizes)])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)  # noqa: S603 (beside this file)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def own_ray(object_store: int) -> Iterator[None]:
    """Inside, a Ray cluster of this machine alone.

    Args:
        object_store: Its bytes.
    """
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",  # whatever other cluster this machine has
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=object_store,
        logging_level="ERROR",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _on_ray(nbytes: int) -> dict[str, Any]:
    """Of a byte: into the store, and from there by an agent of the node into its memory; and of a call of an agent."""
    import ray

    class Agent:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def take(self, content: Any) -> int:  # noqa: ANN401 (an array)
            path = Path(self.folder) / str(os.getpid())
            count = path.write_bytes(memoryview(content))
            path.unlink()
            return count

        def ready(self) -> bool:
            return True

    with own_ray(_OBJECT_STORE), tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        agent = ray.remote(Agent).options(num_cpus=0).remote(folder)
        ray.get(agent.ready.remote())
        content = np.ones(nbytes, np.uint8)  # pages of its own, which zeros would not have
        puts, takes = [], []
        for _ in range(5):
            held, put = timed(lambda: ray.put(content))
            _, taken = timed(lambda held=held: ray.get(agent.take.remote(held)))
            puts.append(put["seconds"] / nbytes)
            takes.append(taken["seconds"] / nbytes)
            del held
        _, called = timed(lambda: ray.get([agent.ready.remote() for _ in range(_CALLS)]))
        return {"put": min(puts), "take": min(takes), "call": called["seconds"] / _CALLS, "version": ray.__version__}


if __name__ == "__main__":
    print(json.dumps(_on_ray(int(sys.argv[1]))))
