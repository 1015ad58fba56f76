"""Seconds of a step as a range, what bounds each part, and how many servers keep the trainer busy.

FLOPs, bytes, Rates -> Part(low, high, bound)

T_training >= FLOPs / rate. T_rollouts >= tokens one after the other x the longest of: what a step of the engine takes
without work, the base and the caches read once from memory, its products. A range goes from what well-tuned programs
reach to what plain ones do; the rates say which is assumed and which was measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from perl.recipe.engines import Capabilities
from perl.training.hardware import Hardware


class Range(NamedTuple):
    """From the least to the most."""

    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Both ends."""
        return Range(self.low * factor, self.high * factor)

    def plus(self, other: "Range") -> "Range":
        """One after the other."""
        return Range(self.low + other.low, self.high + other.high)

    @property
    def middle(self) -> float:
        """The geometric mean, for ranges over a factor."""
        return (self.low * self.high) ** 0.5


NOTHING = Range(0.0, 0.0)

# Shares of a data sheet's number that programs reach. Products of a LoRA training: 11 to 37 % are published for one
# H100 (prime-rl's benchmarks, Qwen3 of 0.6B and 4B, 16k and 65k tokens); packed passes of large models reach half.
_OF_PEAK = Range(0.10, 0.50)
_OF_BANDWIDTH = Range(0.45, 0.85)
_OF_LINK = Range(0.30, 0.80)
# Seconds that a layer's kernels take to be started for one token: transformers without graphs and with an adapter
# beside each matrix; vLLM with graphs. Assumed.
_LAYER_EAGER = Range(0.5e-3, 2.0e-3)
_LAYER_GRAPH = Range(0.08e-3, 0.35e-3)
_LAYER_CPU = Range(0.1e-3, 1.0e-3)
# Answers judged in a second on a node: those that need symbolic algebra, by two workers, and all of a usual mix. Of
# benchmarks/results/verifier.json: `speed.checks_per_second_of_workers` and `speed.checks_per_second`.
_VERDICTS = Range(714.0, 3953.0)
# Between nodes, of a node: 100 Gb/s to 400 Gb/s. Assumed.
_NODE_LINK = Range(12.5e9, 50e9)
# Disk or HTTP, by which servers are given the policy; and what a server takes to load it.
_SYNC_LINK, _SYNC_LOAD = Range(0.5e9, 3e9), Range(0.02, 0.6)
# Around a measured rate: other lengths, other loads of the machine.
AROUND_MEASURED = Range(0.75, 1.35)


@dataclass(frozen=True)
class Rates:
    """What a process reaches, as ranges.

    Attributes:
        products: FLOP/s of forward and backward passes.
        writing: FLOP/s of the products of rollouts.
        bandwidth: Bytes/s read from memory.
        link: Bytes/s exchanged with other processes.
        token: Seconds of a step of the engine that has nothing to compute.
        verdicts: Answers judged in a second.
        measured: Names of those that were measured; the others are derived from data sheets and assumptions.
    """

    products: Range
    writing: Range
    bandwidth: Range
    link: Range
    token: Range
    verdicts: Range = _VERDICTS
    measured: frozenset[str] = frozenset()

    def with_measured(self, rates: Mapping[str, float]) -> "Rates":
        """The same with measured numbers in place of derived ones.

        Args:
            rates: Name of an attribute -> what was measured.
        """
        low, high = AROUND_MEASURED
        ranges = {name: Range(rate * low, rate * high) for name, rate in rates.items()}
        return replace(self, **ranges, measured=self.measured | rates.keys())


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a step.

    Attributes:
        name: Of the part.
        seconds: The range.
        bound: What takes most of it.
        measured: Whether the rate behind it was measured.
    """

    name: str
    seconds: Range
    bound: str
    measured: bool = False

    def times(self, factor: float) -> "Part":
        """The same part of as many steps."""
        return replace(self, seconds=self.seconds.times(factor))

    def up_to(self, times: float) -> "Part":
        """This once at least and so many times at most."""
        return replace(self, seconds=Range(self.seconds.low, self.seconds.high * times))

    def then(self, other: "Part") -> "Part":
        """This and after it another of its kind."""
        return replace(self, seconds=self.seconds.plus(other.seconds))


def derived_rates(
    device: Hardware, engine: Capabilities, layers: int, *, peak: float, on_a_node: int, nodes: int
) -> Rates:
    """From the data sheet.

    Args:
        device: Of a process.
        engine: That writes the rollouts.
        layers: Of the model.
        peak: FLOP/s of the device in the type of the run.
        on_a_node: Processes of a node, which share its CPU, and its link to other nodes.
        nodes: Of the run; with more than one, what is exchanged goes through the nodes' network.
    """
    share = 1.0 / on_a_node if device.on_cpu else 1.0
    layer = _LAYER_CPU if device.on_cpu else _LAYER_GRAPH if engine.takes_updates else _LAYER_EAGER
    return Rates(
        products=_OF_PEAK.times(peak * share),
        writing=_OF_PEAK.times(peak * share),
        bandwidth=_OF_BANDWIDTH.times(device.bandwidth * share),
        link=_OF_LINK.times(device.link) if nodes == 1 else _NODE_LINK.times(1 / on_a_node),
        token=layer.times(layers),
    )


def taking(work: float, rate: Range) -> Range:
    """Seconds of work at a rate."""
    return Range(work / rate.high, work / rate.low)


def training_part(flops: float, gathered: float, averaged: float, rates: Rates) -> Part:
    """Forward and backward passes, scores without gradient, and what the processes exchange for them.

    Args:
        flops: Of a process.
        gathered: Bytes of the base that it receives; fetched while another layer computes, at best.
        averaged: Bytes of gradients that it sends after the last pass.
        rates: Of a process.
    """
    compute, fetch = taking(flops, rates.products), taking(gathered, rates.link)
    both = Range(max(compute.low, fetch.low), compute.high + fetch.high)
    bound = "gathering the base" if fetch.middle > compute.middle else "products"
    return Part("training", both.plus(taking(averaged, rates.link)), bound, "products" in rates.measured)


@dataclass(frozen=True)
class Writing:
    """Completions that one engine writes.

    Attributes:
        count: Completions.
        at_once: Of them; the others wait.
        steps: Tokens of the longest.
        mean: Tokens of each on average, with those that pad it.
        flops: Of all of them.
        reading: Of these, for the prompts.
        weights: Bytes of the base, read for each token.
        cache: Bytes of keys and values that a completion has on average while it is written.
        gathered: Bytes of the base that are received for each token, in shards.
    """

    count: int
    at_once: int
    steps: int
    mean: float
    flops: float
    reading: float
    weights: float
    cache: float
    gathered: float = 0.0

    def one_each(self, completions: int) -> "Writing":
        """What is written with one completion of each prompt, where there are so many."""
        count, share = -(-self.count // completions), 1 / completions
        return replace(self, count=count, flops=self.flops * share, reading=self.reading * share)


def rollout_part(work: Writing, rates: Rates) -> Part:
    """Seconds until an engine has written all of its completions."""
    if not work.count:
        return Part("rollouts", NOTHING, "nothing")
    turns = -(-work.count // max(work.at_once, 1))
    tokens = turns * work.steps
    read = turns * work.steps * work.weights + work.count * work.mean * work.cache
    bounds = {
        "tokens one after the other": rates.token.times(tokens),
        "reading base and cache": taking(read, rates.bandwidth),
        "products": taking(work.flops, rates.writing),
        "gathering the base": taking(tokens * work.gathered, rates.link),
    }
    bound = max(bounds, key=lambda name: bounds[name].middle)
    if "token" in rates.measured:  # a step as it is, with its reading and its products
        prompts = taking(work.reading, rates.products)
        seconds = bounds["tokens one after the other"].plus(prompts).plus(bounds["gathering the base"])
        return Part("rollouts", seconds, bound, measured=True)
    # At best all of it overlaps, at worst nothing does.
    low = max(seconds.low for seconds in bounds.values())
    return Part("rollouts", Range(low, sum(seconds.high for seconds in bounds.values())), bound)


def sync_part(synced: float, servers: int) -> Part:
    """Seconds until all engines have the policy."""
    if not synced:
        return Part("sync", NOTHING, "nothing")
    return Part("sync", taking(synced * max(servers, 1), _SYNC_LINK).plus(_SYNC_LOAD), "bytes to each server")


def verdict_part(answers: int, processes: int, rates: Rates) -> Part:
    """Seconds until all answers are judged; 0 answers: nothing here judges them."""
    return Part("verifier", taking(answers, rates.verdicts.times(processes)), "answers")


def step_seconds(parts: Mapping[str, Part], *, overlapped: bool) -> Range:
    """Of a step: its parts one after the other, or rollouts beside the rest where they are sampled ahead."""
    apart = [part.seconds for name, part in parts.items() if not (overlapped and name == "rollouts")]
    rest = Range(sum(part.low for part in apart), sum(part.high for part in apart))
    if not overlapped:
        return rest
    ahead = parts["rollouts"].seconds
    return Range(max(rest.low, ahead.low), max(rest.high, ahead.high))


@dataclass(frozen=True)
class Supply:
    """How the servers of a run and its trainer fit together.

    Attributes:
        samples: Completions that each server must write at a time so that the trainer never waits; None: as many as it
            has do not suffice.
        at_once: The most that a server writes at a time: what it has memory for, and of a step's no more than its own.
        servers_per_trainer: Servers for each GPU that trains so that it never waits, if each writes so many at a time.
    """

    samples: int | None
    at_once: int
    servers_per_trainer: float


def supply(wanted: float, server: Writing, rates: Rates, *, servers: int, trainers: int, ahead: int = 0) -> Supply:
    """What servers must do to feed a trainer.

    Args:
        wanted: Completion tokens that the trainers take in a second.
        server: A server's work; of its completions what one costs.
        rates: Of a server.
        servers: How many there are.
        trainers: Processes that train.
        ahead: Steps whose completions are sampled before they are needed.
    """

    def speed(count: int) -> float:
        """Tokens/s of a server that writes so many completions at a time."""
        of_one = server.flops / max(server.count * server.mean, 1)
        read = (server.weights + count * server.cache) / rates.bandwidth.middle
        return count / max(rates.token.middle, read, count * of_one / rates.writing.middle)

    most = max(min(server.at_once, server.count * (1 + ahead)), 1)
    enough = next((count for count in range(1, most + 1) if speed(count) >= wanted / max(servers, 1)), None)
    return Supply(enough, most, wanted / speed(most) / max(trainers, 1))
