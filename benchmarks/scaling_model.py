"""What 10,000 GPUs in five regions would do with many adapters of one base: each number from a formula and its inputs.

Run as ``python benchmarks/scaling_model.py``; it computes in a second and measures nothing. Measured inputs come from
``results/``, where their command is named; the others are published or assumed, and say so. ``docs/internals/scale.md``
shows what it prints.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Input(NamedTuple):
    """A number that goes in."""

    value: float
    unit: str
    source: str


BASE = Input(70.55e9, "parameters", "Llama-3.3-70B-Instruct, by `perl plan fsdp2-70b`")
TRAINED = Input(414.2e6, "parameters", "LoRA of rank 32 on every projection, by the same")
KEYS = Input(327_680, "bytes a token", "keys and values in bfloat16: 80 layers x 8 heads x 128 x 2 x 2")
COMPLETIONS = Input(1024, "a step", "64 prompts x 16 generations, assumed")
TOKENS = Input(3000, "tokens a completion", "assumed")
PASS = Input(20_580, "tokens a pass", "of a process with 8 parts of the base in 80 GB, by `perl plan fsdp2-70b`")
PEAK = Input(989e12, "FLOP/s", "H100, NVIDIA's data sheet")
OF_PEAK = Input(0.40, "of the peak", "assumed; perl plan takes 0.10 to 0.50")
BANDWIDTH = Input(3.35e12, "bytes/s", "H100, NVIDIA's data sheet")
OF_BANDWIDTH = Input(0.60, "of the bandwidth", "assumed; perl plan takes 0.45 to 0.85")
AT_ONCE = Input(256, "completions a server", "assumed: vLLM's usual most for one engine")
READ = Input(0.61e-6, "CPU s a token", "measured, results/many_servers.json: the one process that meets servers")
REQUESTS = Input(5, "requests a server and update", "measured, results/many_servers.json")
REPLY = Input(10.1, "bytes a token", "measured, the same: tokens and log-probs as they are handed on")
INTERRUPTED = Input(54 * 24 * 16_384 / 419, "GPU hours", "Llama 3 (arXiv:2407.21783, section 3.3.4): 419 in 54 days")
ASIDE = Input(3.2, "s", "measured once: at most 0.4 s for 320 MB; assumed here for eight times as much")
PRICE = Input(2.5, "dollars a GPU hour", "assumed")
GPUS, REGIONS, NODE, TRAINERS = 10_000, 5, 8, 2
LINKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8, "100 Gbit/s": 1e11 / 8}


@dataclass(frozen=True)
class Job:
    """One adapter in training: nodes that train, a node that samples.

    Attributes:
        training: Seconds of an update.
        rollouts: Seconds of a step's completions.
        gpus: Of both.
        adapter: Bytes of an update in bfloat16.
        state: Bytes of a checkpoint: weights and Adam's two moments in float32.
        gather: Bytes of the base that come into a GPU in a step: forward, again, backward, in each pass.
    """

    training: float
    rollouts: float
    gpus: int
    adapter: float
    state: float
    gather: float

    @property
    def step(self) -> float:
        """Seconds, where rollouts are sampled one step ahead."""
        return max(self.training, self.rollouts)


def one_job(servers: int = 1, trainers: int = TRAINERS) -> Job:
    """A job of so many nodes of each kind."""
    tokens = COMPLETIONS.value * TOKENS.value
    # Forward, the same again where activations are not kept, and the gradient of activations: 2 FLOPs a parameter each.
    training = 6 * BASE.value * tokens / (trainers * NODE * PEAK.value * OF_PEAK.value)
    at_once = min(AT_ONCE.value, COMPLETIONS.value / servers)
    read = (
        2 * BASE.value + at_once * TOKENS.value / 2 * KEYS.value
    )  # the base, and caches that are half full on average
    one_token = read / (NODE * BANDWIDTH.value * OF_BANDWIDTH.value)
    rounds = math.ceil(COMPLETIONS.value / servers / at_once)
    passes = math.ceil(tokens / (trainers * NODE * PASS.value))
    gpus = (trainers + servers) * NODE
    return Job(
        training,
        rounds * TOKENS.value * one_token,
        gpus,
        2 * TRAINED.value,
        12 * TRAINED.value,
        3 * passes * 2 * BASE.value,
    )


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """Prints rows of a name and a number."""
    print(f"{title}")
    for name, shown in rows:
        print(f"  {name:<58}{shown:>22}")
    print()


def moved(job: Job, jobs: int) -> None:
    """Bytes by link."""
    tokens = COMPLETIONS.value * TOKENS.value
    nodes = GPUS // NODE // REGIONS
    rows = [
        ("the base to each node, once (GB)", 2 * BASE.value / 1e9),
        ("inside a node in a step, to each GPU: the base (GB)", job.gather / 1e9),
        ("between training nodes in a step: gradients (GB)", 4 * TRAINED.value / 1e9),
        ("... with one flat mesh: the base as well (GB)", (4 * TRAINED.value + job.gather / TRAINERS) / 1e9),
        ("to a server in a step: the adapter (MB)", job.adapter / 1e6),
        ("from servers in a step: tokens, log-probs (MB)", tokens * REPLY.value / 1e6),
        ("to the store in a checkpoint (GB)", job.state / 1e9),
        ("a job's adapter and tokens (MB/s)", (job.adapter + tokens * REPLY.value) / job.step / 1e6),
        ("a region's store, a server a job (GB/s)", jobs / REGIONS * job.adapter / job.step / 1e9),
        (
            "... each adapter on every server of its region (GB/s)",
            jobs / REGIONS * nodes * job.adapter / job.step / 1e9,
        ),
    ]
    table("What moves", [(name, f"{value:,.2f}") for name, value in rows])


def failures(job: Job) -> None:
    """The best interval of checkpoints (Young 1974), and what is lost."""
    rows = [("a GPU is interrupted every (hours)", f"{INTERRUPTED.value:,.0f}")]
    rows += [("any of all GPUs", f"{INTERRUPTED.value / GPUS:,.1f}")]
    for name, hours in (("a job", INTERRUPTED.value / job.gpus), ("a job on spot machines, assumed", 24.0)):
        interval = math.sqrt(2 * ASIDE.value * hours * 3600)
        lost = ASIDE.value / interval + interval / 2 / (hours * 3600)
        rows.append((f"{name}: every (hours)", f"{hours:,.0f}"))
        rows.append(("  best interval (s), in steps", f"{interval:,.0f}, {max(1, round(interval / job.step))}"))
        rows.append(("  lost of its time", f"{lost:.2%}"))
    table("Failures", rows)


def main() -> None:
    """Prints inputs and tables."""
    inputs = {name: one for name, one in globals().items() if isinstance(one, Input)}
    print("Inputs")
    for name, one in inputs.items():
        print(f"  {name.lower():<14}{one.value:>20,.6g} {one.unit:<30}{one.source}")
    print()
    job = one_job()
    jobs = GPUS // job.gpus
    rows = [
        ("GPUs of a job: two nodes train, one samples", f"{job.gpus}"),
        ("an update (s)", f"{job.training:,.0f}"),
        ("its completions (s)", f"{job.rollouts:,.0f}"),
        ("a step, one step ahead (s)", f"{job.step:,.0f}"),
        ("a step (dollars)", f"{job.gpus * job.step / 3600 * PRICE.value:,.2f}"),
        ("jobs, each with an adapter of its own", f"{jobs}"),
    ]
    table("A job", rows)
    moved(job, jobs)
    late = [(f"an adapter over {name} (s), of a step", job.adapter / rate) for name, rate in LINKS.items()]
    table("Staleness", [(name, f"{seconds:,.2f}, {seconds / job.step:.2%}") for name, seconds in late])
    failures(job)
    tokens = COMPLETIONS.value * TOKENS.value
    rows = []
    for servers in (1, 4, 16, 64):
        one = one_job(servers, 2 * servers)
        rows.append(
            (
                f"one job on {one.gpus} GPUs: a step (s), GPU hours",
                f"{one.step:,.0f}, {one.step * one.gpus / 3600:,.1f}",
            )
        )
    rows.append(("its main process reads replies (CPU s a step)", f"{tokens * READ.value:,.1f}"))
    rows.append(
        ("... and asks all servers of a region (requests an update)", f"{REQUESTS.value * GPUS / NODE / REGIONS:,.0f}")
    )
    table("Where it breaks first", rows)


if __name__ == "__main__":
    main()
