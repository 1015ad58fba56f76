"""Servers that the main process alone asks, while the other processes of a run follow what it is told.

Engine of the main process -> an Engine on every process

For what all processes must know of the answers: where the policy is in shards, its log-probabilities of them are
computed by all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from perl.recipe.engines import Capabilities
from perl.rollouts.engine import Engine, EngineSampling, OnGroup, Pending, Proof, Request, Sampled, Update
from perl.rollouts.vllm.servers import ServerPool
from perl.run.joint_work import Processes

_T = TypeVar("_T")


class AskedByMain:
    """An engine of the main process. Every process calls the same methods in the same order, but for ``start``."""

    capabilities: ClassVar[Capabilities] = ServerPool.capabilities

    def __init__(self, opened: Callable[[], Engine], processes: Processes) -> None:
        """Opens it on the main process.

        Args:
            opened: Opens it.
            processes: That follow.
        """
        self._processes = processes
        self._engine = opened() if processes.main else None
        processes.meet()

    @property
    def counts(self) -> Mapping[str, int]:
        """The engine's, on the main process."""
        return self._engine.counts if self._engine is not None else {}

    @property
    def unproven(self) -> bool:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda engine: engine.unproven)

    @property
    def asleep_bytes(self) -> int:
        """0: servers hold nothing of this process's device."""
        return 0

    def foreign_weights(self) -> list[str]:
        """See :meth:`perl.rollouts.vllm.servers.ServerPool.foreign_weights`."""
        return self._asked(lambda engine: engine.foreign_weights())  # type: ignore[attr-defined]  # servers

    def computes_base_alone(self) -> bool:
        """See :meth:`perl.rollouts.vllm.servers.ServerPool.computes_base_alone`."""
        return self._asked(lambda engine: engine.computes_base_alone())  # type: ignore[attr-defined]  # servers

    def load(self, update: Update) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
        self._asked(lambda engine: engine.load(update))

    def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None) -> Pending:
        """As the engine; on the main process only."""
        if self._engine is None:
            raise ValueError("the main process asks")
        return self._engine.start(requests, sampling, on_group)

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda engine: engine.trial(request, sampling))

    def expect(self, proof: Proof) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
        self._asked(lambda engine: engine.expect(proof))

    def drop(self, failures: Mapping[str, str]) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
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
