"""Seconds of a sync and of a step for a number of GPUs: pure arithmetic. Part of ``scaling.py``.

constants, adapter bytes, servers -> seconds by part; parts of a step -> step, share of the sync, knees

Every constant says whether it was measured, is of a data sheet, or is assumed; whatever is computed here is derived.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from perl.training.cost_time import Part, Range, step_seconds

GPUS_OF_A_NODE = 8
MOST_SHARE = 0.10
"""Of a step, from which on its sync is too much."""
HALF = 0.6
"""A step on twice the GPUs that takes at most this share of the time counts as half as long."""
SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Of the GPUs, those that may train; the others serve, one a server. Powers of two, into which batches divide."""


@dataclass(frozen=True)
class Constant:
    """A number that the model begins with.

    Attributes:
        kind: Measured here, of a data sheet, or assumed.
        how: What was measured, which sheet, or why it is assumed.
    """

    value: float
    unit: str
    kind: Literal["measured", "data sheet", "assumed"]
    how: str

    def __str__(self) -> str:
        """One line for a person."""
        return f"{self.value:10.3g} {self.unit:15} {self.kind:10}  {self.how}"


ASSUMED = {
    "nfs": Constant(2e9, "bytes/s", "assumed", "one NFS filer, of all that is read and written"),
    "parallel_fs": Constant(50e9, "bytes/s", "assumed", "a parallel file system (Lustre, GPFS), of all that is read"),
    "nic": Constant(12.5e9, "bytes/s", "data sheet", "of a node: 100 Gb/s Ethernet or InfiniBand, no overhead"),
    "ray_link": Constant(1.25e9, "bytes/s", "assumed", "Ray's object store from node to node, one stream"),
    "load_fixed": Constant(0.05, "s", "assumed", "vLLM: one load of an adapter, whatever its size"),
    "load_rate": Constant(0.75e9, "bytes/s", "assumed", "vLLM: reads, stacks and copies an adapter to its GPU"),
    "ray_put": Constant(1.5e-9, "s/byte", "assumed", "copy into Ray's object store; Ray is not installed here"),
    "ray_take": Constant(1.5e-9, "s/byte", "assumed", "an agent's copy to shared memory; Ray is not installed here"),
    "ray_call": Constant(1e-3, "s", "assumed", "one call of an agent; Ray is not installed here"),
}
"""What cannot be measured on one machine without a GPU; Ray's own three are replaced where it is installed."""


@dataclass(frozen=True)
class Costs:
    """All constants of the model.

    Attributes:
        constants: By name: those of :data:`ASSUMED`, ``folder`` and ``serialise`` (s/byte), ``answer``
            (s/token), ``ray_agent`` (s).
        asking: (servers, seconds) measured: processor seconds of the main process to have so many servers load an
            update that is written already.
        telling: The same with agents on their nodes, each told by a call; empty: each takes ``ray_call``.
    """

    constants: Mapping[str, Constant]
    asking: Sequence[tuple[int, float]]
    telling: Sequence[tuple[int, float]] = ()

    def __getitem__(self, name: str) -> float:
        """The value of a constant."""
        return self.constants[name].value

    def seconds_to_ask(self, servers: int) -> float:
        """Of the main process that asks so many servers itself."""
        return _between(self.asking, servers)

    def seconds_to_tell(self, servers: int) -> float:
        """Of the main process that calls so many agents."""
        return _between(self.telling, servers) if self.telling else servers * self["ray_call"]

    def load(self, nbytes: float) -> float:
        """Seconds of a server to load an adapter that it can read from memory; all servers do so at a time."""
        return self["load_fixed"] + nbytes / self["load_rate"]


def _between(measured: Sequence[tuple[int, float]], servers: int) -> float:
    """Between what was measured in a straight line; beyond the last in proportion to it."""
    points = sorted([(0, 0.0), *measured])
    for (fewer, least), (more, most) in pairwise(points):
        if servers <= more:
            return least + (most - least) * (servers - fewer) / (more - fewer)
    last, seconds = points[-1]
    return seconds * servers / last if last else 0.0


def nodes_of(servers: int) -> int:
    """On which so many servers of one GPU are."""
    return -(-servers // GPUS_OF_A_NODE)


def _nfs_by_server(costs: Costs, nbytes: float, servers: int) -> dict[str, float]:
    return {
        "folder": nbytes * costs["folder"],
        "write": nbytes / costs["nfs"],
        "move": servers * nbytes / costs["nfs"],
        "ask": costs.seconds_to_ask(servers),
    }


def _nfs_by_node(costs: Costs, nbytes: float, servers: int) -> dict[str, float]:
    return {
        "folder": nbytes * costs["folder"],
        "write": nbytes / costs["nfs"],
        "move": nodes_of(servers) * nbytes / costs["nfs"],
        "ask": costs.seconds_to_ask(servers),
    }


def _parallel_fs(costs: Costs, nbytes: float, servers: int) -> dict[str, float]:
    of_a_node = min(servers, GPUS_OF_A_NODE) * nbytes / costs["nic"]
    folder, write = nbytes * costs["folder"], nbytes / costs["nic"]
    move = max(servers * nbytes / costs["parallel_fs"], of_a_node)
    return {"folder": folder, "write": write, "move": move, "ask": costs.seconds_to_ask(servers)}


def _http(costs: Costs, nbytes: float, servers: int) -> dict[str, float]:
    ask = costs.seconds_to_ask(servers)
    return {"serialise": nbytes * costs["serialise"], "move": servers * nbytes / costs["nic"], "ask": ask}


def _ray(costs: Costs, nbytes: float, servers: int) -> dict[str, float]:
    rounds = math.ceil(math.log2(nodes_of(servers) + 1))
    return {
        "serialise": nbytes * costs["serialise"],
        "put": nbytes * costs["ray_put"],
        "move": rounds * nbytes / costs["ray_link"],
        "take": nbytes * costs["ray_take"],
        "tell": costs.seconds_to_tell(servers),
        "agent": costs["ray_agent"],
    }


@dataclass(frozen=True)
class Transport:
    """A way from the main process to the servers.

    Attributes:
        formula: Of its own seconds; a: bytes of the adapter, S: servers, K: nodes of eight.
        own: The same, by part.
    """

    label: str
    formula: str
    own: Callable[[Costs, float, int], dict[str, float]]


TRANSPORTS = {
    "nfs_by_server": Transport("NFS, each server", "ask(S) + a folder + a/nfs + S a/nfs", _nfs_by_server),
    "nfs_by_node": Transport("NFS, each node", "ask(S) + a folder + a/nfs + K a/nfs", _nfs_by_node),
    "parallel_fs": Transport(
        "parallel FS", "ask(S) + a folder + a/nic + max(S a/parallel_fs, min(S, 8) a/nic)", _parallel_fs
    ),
    "http": Transport("HTTP push", "ask(S) + a serialise + S a/nic", _http),
    "ray": Transport(
        "Ray, agents",
        "tell(S) + ray_agent + a serialise + a ray_put + ceil(log2(K+1)) a/ray_link + a ray_take",
        _ray,
    ),
}
COMMON = "load_fixed + a/load_rate"
"""What each of them has besides, from the first to the last byte one after the other."""


def sync_parts(transport: str, costs: Costs, nbytes: float, servers: int) -> dict[str, float]:
    """Seconds of a sync by part, which follow each other: nothing overlaps.

    Args:
        transport: Of :data:`TRANSPORTS`.
        costs: The constants.
        nbytes: Of the adapter.
        servers: Of one GPU each, eight on a node.
    """
    own = TRANSPORTS[transport].own(costs, nbytes, servers)
    return own | {"load": costs.load(nbytes)}


def sync_seconds(transport: str, costs: Costs, nbytes: float, servers: int) -> float:
    """Until all servers have the adapter."""
    return sum(sync_parts(transport, costs, nbytes, servers).values())


def step_range(parts: Mapping[str, Part], sync: float, answers: float, *, ahead: bool) -> Range:
    """Seconds of a step.

    Args:
        parts: As :func:`perl.training.forecast.make_forecast` derives them; its sync is replaced.
        sync: Seconds.
        answers: Processor seconds of a process that trains to read its answers, while others are written.
        ahead: Whether rollouts are sampled a step ahead.
    """
    low, high = parts["rollouts"].seconds
    written = Part("rollouts", Range(max(low, answers), max(high, answers)), parts["rollouts"].bound)
    synced = Part("sync", Range(sync, sync), "bytes to each server")
    return step_seconds(dict(parts) | {"rollouts": written, "sync": synced}, overlapped=ahead)


def sync_knee(steps: Mapping[int, float], syncs: Mapping[int, float], most: float = MOST_SHARE) -> int | None:
    """The fewest GPUs on which a sync is more than this share of a step; None: on none of them."""
    return next((gpus for gpus in sorted(steps) if syncs[gpus] > most * steps[gpus]), None)


def halving_knee(steps: Mapping[int, float], half: float = HALF) -> int | None:
    """GPUs from which on twice as many no longer take half the time; None: all doublings pay."""
    return next((gpus for gpus in sorted(steps) if 2 * gpus in steps and steps[2 * gpus] > half * steps[gpus]), None)
