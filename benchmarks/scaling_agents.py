"""What a sync costs the main process where agents on the servers' nodes tell the servers. Part of ``scaling.py``.

fake vLLM servers, actors of a Ray cluster of this machine, the project's ServerPool -> seconds, processor seconds

The actors run the code of :class:`perl.launch.on_ray.rollout_servers.RolloutServer`; each speaks for many servers,
since a machine has no room for 1,024 actors. A call is what it is in a run: the order to an actor, and what came of it.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scaling_measured import MOST_REPEATED, REPEATS, SHM, STALL_SECONDS, measure_syncs, own_ray

from perl.launch.on_ray.desk import Desk
from perl.launch.on_ray.rollout_servers import DESK, GIVING, RayFleet, RolloutServer
from perl.recipe.server_address import ServerAddress
from perl.rollouts.vllm import liveness
from perl.rollouts.vllm.servers import ServerPool
from tests.rollouts.fake_servers import fake_servers

AGENTS = 8
"""Actors, each a process."""
WARM_UP = 1_000_000
"""Bytes of an update before those that are measured."""
_OBJECT_STORE = 3_000_000_000


class Agent(RolloutServer):
    """An actor that has started no server, and speaks for any of them."""

    def __init__(self, folder: str) -> None:
        """Uses a folder that it shares with the others, as on one node."""
        self._folder = Path(folder)

    def give_to(self, url: str, name: str | None, tell: Callable[[ServerAddress], Coroutine[Any, Any, Any]]) -> Any:  # noqa: ANN401
        """As ``give``, to a server that is named, and to several at a time."""
        if name is not None and not self._bring(name):
            raise OSError(name)
        return asyncio.run(tell(ServerAddress(url)))


class Agents(RayFleet):
    """A fleet whose actors each speak for many servers."""

    def __init__(self, agents: Sequence[Any], urls: Sequence[str], folder: str) -> None:
        """Divides the servers among them."""
        super().__init__(len(urls), folder)
        for index, url in enumerate(urls):
            give = partial(agents[index % len(agents)].give_to.remote, url)
            self._actors[index] = SimpleNamespace(give=SimpleNamespace(remote=give), clear=agents[0].clear)


def _row(agents: Sequence[Any], servers: int, sizes: Sequence[int], folder: str) -> dict[str, Any]:
    sent = 0

    async def count(_: object) -> None:
        nonlocal sent
        sent += 1

    with fake_servers(servers) as fakes:
        fleet = Agents(agents, fakes.urls, folder)
        pool = ServerPool(fakes.urls, fleet, stall_seconds=STALL_SECONDS)
        try:
            measure_syncs(pool, fakes, WARM_UP, 1)  # actors import what they need
            for member in pool._dispatcher.servers.members:
                member.server._client.event_hooks = {"request": [count]}
            fakes.reset()
            repeats = REPEATS if servers <= MOST_REPEATED else 1
            syncs = {str(size): measure_syncs(pool, fakes, size, repeats) for size in sizes}
            asked = sum(sum(server["requests"].values()) for server in fakes.stats())
            syncs_each = servers * repeats * len(sizes)
            return {
                "servers": servers,
                "syncs": syncs,
                "requests_of_a_sync": sent / syncs_each,
                "requests_of_agents": (asked - sent) / syncs_each,
                "counts": pool.counts,
                "load_average": os.getloadavg()[0],
            }
        finally:
            pool.close()


def _on_ray(counts: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    import ray

    # All fakes and all actors share this machine's cores, so that a sync takes longer here than a server may be silent
    # for: who looks after such servers would be measured too.
    liveness._WATCH_SECONDS = STALL_SECONDS
    with own_ray(_OBJECT_STORE), tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        desk = ray.remote(Desk).options(name=DESK, num_cpus=0).remote()
        kind = ray.remote(concurrency_groups={GIVING: 1})(Agent).options(num_cpus=0, max_concurrency=8)
        agents = [kind.remote(folder) for _ in range(AGENTS)]
        rows = []
        for servers in counts:
            rows.append(_row(agents, servers, sizes, folder))
            print(f"measured with {servers} servers and {AGENTS} agents", file=sys.stderr, flush=True)
        del desk
        return rows


if __name__ == "__main__":
    print(json.dumps(_on_ray(*json.loads(sys.argv[1]))))
