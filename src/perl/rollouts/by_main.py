"""Servers that the main process alone asks, for all processes of a run.

requests of every process -> Engine of the main process -> each process's completions, or one error on all of them

Where the policy is in shards all processes need the answers of a trial: its log-probabilities are computed by all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from perl.recipe.engines import Capabilities
from perl.rollouts.engine import Engine, EngineSampling, OnGroup, Pending, Proof, Request, Sampled, Update
from perl.rollouts.vllm.servers import ServerPool
from perl.run.joint_work import Processes

_T = TypeVar("_T")


class AskedByMain:
    """An engine of the main process. Every process calls the same methods in the same order."""

    capabilities: ClassVar[Capabilities] = ServerPool.capabilities

    def __init__(self, opened: Callable[[], Engine], processes: Processes) -> None:
        """Opens it on the main process.

        Args:
            opened: Opens it.
            processes: That ask.
        """
        self._processes = processes
        self._engine = opened() if processes.main else None
        processes.meet()

    @property
    def counts(self) -> Mapping[str, int]:
        """The engine's, on the main process."""
        return self._engine.counts if self._engine is not None else {}

    @property
    def asleep_bytes(self) -> int:
        """0: servers hold nothing of this process's device."""
        return 0

    def foreign_weights(self) -> list[str]:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda engine: engine.foreign_weights())

    def computes_base_alone(self) -> bool:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda engine: engine.computes_base_alone())

    def load(self, update: Update) -> None:
        """See :class:`perl.rollouts.engine.Engine`; the main process's update counts."""
        self._asked(lambda engine: engine.load(update))

    def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None) -> Pending:
        """Begins to sample what all processes ask for; each gets the completions of its own requests.

        Args:
            requests: Of this process; may be none.
            sampling: How tokens are drawn; the same on all processes.
            on_group: Called on the main process as soon as a group of its own is there, on the others with all.
        """
        parts = self._processes.collected(list(requests))
        pending: list[Pending] = []

        def begin(engine: Engine) -> None:
            asked = [request for part in parts for request in part]
            pending.append(engine.start(asked, sampling, of_own))

        def of_own(position: int, group: Sequence[Sampled]) -> None:
            if on_group is not None and position < len(requests):  # the main process's come first
                on_group(position, group)

        self._asked(begin)
        return _Shared(self._processes, pending, [len(part) for part in parts], on_group)

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda engine: engine.trial(request, sampling))

    def expect(self, proof: Proof) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
        self._asked(lambda engine: engine.expect(proof))

    def drop(self, failures: Mapping[str, str]) -> None:
        """See :class:`perl.rollouts.engine.Engine`; what failed on the main process counts."""
        self._asked(lambda engine: engine.drop(failures))

    def sleep(self) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
        if self._engine is not None:
            self._engine.sleep()

    def close(self) -> None:
        """Closes it, where it is."""
        if self._engine is not None:
            self._engine.close()

    def _asked(self, what: Callable[[Engine], _T]) -> _T:
        """What the engine answers, on all processes."""
        return self._processes.by_main(lambda: what(self._engine))  # type: ignore[arg-type]  # there it is open


class _Shared:
    """Rollouts under way for all processes."""

    def __init__(
        self, processes: Processes, pending: Sequence[Pending], counts: Sequence[int], on_group: OnGroup | None
    ) -> None:
        """Takes what the main process has begun: for each process so many requests, in the order of their ranks."""
        self._processes, self._pending, self._counts, self._on_group = processes, pending, counts, on_group
        self._own: list[list[Sampled]] | None = None

    def result(self) -> list[list[Sampled]]:
        """The completions of this process's requests; every process must call it, once or more often."""
        if self._own is None:
            self._own = self._processes.scattered(self._divided)
            if self._on_group is not None and not self._processes.main:
                for position, group in enumerate(self._own):
                    self._on_group(position, group)
        return self._own

    def _divided(self) -> list[list[list[Sampled]]]:
        groups = iter(self._pending[0].result())
        return [[next(groups) for _ in range(count)] for count in self._counts]
