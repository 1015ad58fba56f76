"""How the processes of a run share the completions of a task.

places that are left -> rounds, and in each round this process's part -> every sample, on the main process

A sample depends on its seed and not on who draws it. After each round the main process has all samples of the round,
so that a kill loses no more than that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from perl.evaluation.samples import Place, Sample
from perl.recipe.engines import Capabilities
from perl.run.joint_work import Processes
from perl.run.shards import is_sharded

# Completions that an engine with a queue of its own writes between two exchanges, on each process.
_QUEUED = 1024


@dataclass(frozen=True)
class Part:
    """What a process draws in a round.

    Attributes:
        places: Its samples.
        spare: They are drawn and thrown away: the forward passes of the others need this process too.
    """

    places: Sequence[Place]
    spare: bool = False


@dataclass
class Sharing:
    """Who draws what; without arguments this process draws everything.

    Attributes:
        processes: That share.
        at_once: Completions that each writes in a round; None: the main process draws everything, all at once.
        in_shards: A forward pass needs all processes, so each must draw in every round.
        counts: How many each process has drawn, on the main process.
    """

    processes: Processes = field(default_factory=Processes)
    at_once: int | None = None
    in_shards: bool = False
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is drawn yet."""
        self.counts = [0] * self.processes.count

    def __str__(self) -> str:
        """For the end of a line of a log: by how many processes, and the completions of each."""
        if self.processes.count == 1 or self.at_once is None:
            return ""
        return f", by {self.processes.count} processes: {' + '.join(map(str, self.counts))} completions"

    def parts(self, left: Sequence[Place]) -> Iterator[Part]:
        """This process's part of each round.

        Args:
            left: In the order in which one process would draw them; its batches are those of one process, but for the
                last round, which is divided evenly.
        """
        processes = self.processes
        if self.at_once is None or processes.count == 1:
            if left:
                yield Part(left if processes.main else ())
            return
        for start in range(0, len(left), self.at_once * processes.count):
            together = left[start : start + self.at_once * processes.count]
            first, end = (-(-len(together) * rank // processes.count) for rank in (processes.rank, processes.rank + 1))
            if first == end and self.in_shards:
                yield Part(together[:1], spare=True)
            else:
                yield Part(together[first:end])

    def collected(self, own: Sequence[Sample]) -> list[Sample]:
        """The samples that the others drew in this round; an empty list on others than the main process."""
        drawn = self.processes.collected(list(own))
        for rank, samples in enumerate(drawn):
            self.counts[rank] += len(samples)
        return [sample for samples in drawn[1:] for sample in samples]


def share(processes: Processes, engine: Capabilities, batch_size: int, policy: nn.Module) -> Sharing:
    """How a policy's completions are shared.

    Args:
        processes: That could share them.
        engine: What draws. Servers are asked by the main process alone, and share the work themselves.
        batch_size: Completions that transformers write at a time.
        policy: Whose completions they are.
    """
    if engine.needs_servers:
        return Sharing(processes)
    if engine.takes_updates:
        return Sharing(processes, _QUEUED)
    return Sharing(processes, batch_size, in_shards=is_sharded(policy))
