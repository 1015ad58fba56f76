"""The engine that a recipe names, ready to be given the policy; servers are asked by the main process alone.

RolloutSection, policy -> Engine; requests of every process -> Engine of the main process -> each process's completions,
or one error on all of them

Where the policy is in shards all processes need the answers of a trial: its log-probabilities are computed by all.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

from torch import nn

from perl.algorithms.registry import function_at
from perl.errors import RecipeError, RolloutError
from perl.methods.registry import served_rank
from perl.policy.model import base_identity, resolve_model
from perl.policy.precision import compute_dtype
from perl.recipe.rollout_section import Capabilities, RolloutSection
from perl.rollouts.engine import (
    Engine,
    EngineSampling,
    ExpectedLogProbs,
    Form,
    OnGroup,
    Pending,
    Request,
    Sampled,
    Update,
)
from perl.rollouts.sync import SyncPlan
from perl.rollouts.vllm.dispatch import Rollouts
from perl.rollouts.vllm.in_process import InProcessEngine
from perl.rollouts.vllm.servers import ServerPool
from perl.run.host import Fleet, host
from perl.run.joint_work import Processes, several

_T = TypeVar("_T")
_Answered = tuple[int, Sequence[Sampled]]  # position of a request, its completions

# In which the groups of a call are handed on to the processes, so that their answers are compared meanwhile.
_ROUNDS = 8


@dataclass(frozen=True)
class EngineSettings:
    """What an engine must know of the one who opens it.

    Attributes:
        name: Of this run, new for each start.
        folder: Where updates for servers are written, if the recipe names no other.
        longest: Tokens of the longest prompt with its completion; None: what the base allows.
        seed: Of an engine in this process; servers use random numbers of theirs.
        processes: That open it together; the main one alone speaks to servers.
        memory_share: Of the device's memory, for an engine in this process.
    """

    name: str
    folder: Path
    longest: int | None = None
    seed: int = 0
    processes: Processes = field(default_factory=Processes)
    memory_share: float = 0.3


def open_engine(how: RolloutSection, plan: SyncPlan | None, policy: nn.Module, settings: EngineSettings) -> Engine:
    """Connects to the servers, or starts vLLM in this process.

    Args:
        how: Which engine, with its settings; ``auto`` is decided.
        plan: What it will be given; None: nothing, it samples from the base.
        policy: Without the wrappers of distributed training.
        settings: What else it must know.

    Raises:
        RolloutError: No server answers.
        PerlError: A server or the installed vLLM cannot do what is needed.
    """
    engine: Engine = function_at(how.capabilities.opens)(how, plan, policy, settings)
    return engine


def open_servers(how: RolloutSection, plan: SyncPlan | None, policy: nn.Module, settings: EngineSettings) -> Engine:  # noqa: ARG001
    """Connects to the servers that the recipe names, or that are started for the run, see :func:`open_engine`."""

    def opened() -> ServerPool:
        fleet = _fleet(how)
        pool = ServerPool(
            how.addresses if fleet is None else fleet.addresses(),
            fleet or Path(how.sync_folder or settings.folder),
            timeout_seconds=how.server_timeout,
            folder_on_servers=how.sync_folder_on_servers,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(pool.close)  # whatever goes wrong, Ctrl-C too
            pool.take_folder(settings.name)
            pool.check(settings.longest or 0, plan.form if plan else None)
            stack.pop_all()
        return pool

    return opened() if settings.processes.count == 1 else AskedByMain(opened, settings.processes)


def _fleet(how: RolloutSection) -> Fleet | None:
    """Who has started the servers of the run; None: they are named by their addresses.

    Raises:
        RecipeError: Nobody has.
    """
    if how.started is None:
        return None
    fleet = host().fleet
    if fleet is None:
        what = "servers are started by perl train on a Ray cluster only (engine.name: ray)"
        raise RecipeError(what, "rollout.servers", "name their addresses: [http://HOST:PORT]")
    return fleet


def open_in_process(how: RolloutSection, plan: SyncPlan | None, policy: nn.Module, settings: EngineSettings) -> Engine:  # noqa: ARG001
    """Opens vLLM in this process, see :func:`open_engine`."""
    if several() and settings.processes.count == 1:  # it would wait for the others
        what = "vLLM in this process is opened by all processes of a run together, and this one is alone"
        raise RolloutError(what, "rollout.backend", "transformers, or vllm-server")
    base, revision = base_identity(policy)
    return InProcessEngine(
        resolve_model(base),
        revision=revision,
        dtype=str(compute_dtype(policy)).removeprefix("torch."),
        max_model_len=settings.longest,
        gpu_memory_utilization=settings.memory_share,
        seed=settings.seed,
        max_lora_rank=served_rank(plan.largest_rank) if plan and plan.largest_rank is not None else None,
    )


def check_servers(how: RolloutSection, longest_tokens: int, form: Form) -> list[dict[str, Any]]:
    """Checks that the servers can do what a run needs; waits for the first one for the recipe's ``server_timeout``.

    Args:
        how: Names the servers.
        longest_tokens: Of a prompt with its completion.
        form: In which they will be given updates.

    Returns:
        What each reachable server reports: url, version, base_name, longest, adapters.

    Raises:
        RolloutError: No server answers.
        PerlError: One cannot do what is needed.
    """
    fleet = _fleet(how)
    urls = how.addresses if fleet is None else fleet.addresses()
    pool = ServerPool(urls, fleet, timeout_seconds=how.server_timeout)
    try:
        return pool.check(longest_tokens, form)
    finally:
        pool.close()


class AskedByMain:
    """The servers of the main process. Every process calls the same methods in the same order."""

    capabilities: ClassVar[Capabilities] = ServerPool.capabilities

    def __init__(self, opened: Callable[[], ServerPool], processes: Processes) -> None:
        """Connects the main process.

        Args:
            opened: Does so.
            processes: That ask.
        """
        self._processes = processes
        self._pool = opened() if processes.main else None
        processes.meet()

    @property
    def counts(self) -> Mapping[str, int]:
        """The engine's, on the main process."""
        return self._pool.counts if self._pool is not None else {}

    @property
    def asleep_bytes(self) -> int:
        """0: servers hold nothing of this process's device."""
        return 0

    def foreign_weights(self) -> list[str]:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda pool: pool.foreign_weights())

    def computes_base_alone(self) -> bool:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda pool: pool.computes_base_alone())

    def load(self, update: Update) -> None:
        """See :class:`perl.rollouts.engine.Engine`; the main process's update counts."""
        self._asked(lambda pool: pool.load(update))

    def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None) -> Pending:
        """Begins to sample what all processes ask for; each gets the completions of its own requests.

        Args:
            requests: Of this process; may be none.
            sampling: How tokens are drawn; the same on all processes.
            on_group: Called on the main process as soon as a group of its own is there, on the others within
                ``result``, as soon as an eighth of all groups is there that were not given to them yet.
        """
        parts = self._processes.collected(list(requests))
        shared = _Shared(self._processes, [len(part) for part in parts], on_group)
        self._asked(lambda pool: shared.follow(pool.start(list(chain(*parts)), sampling, shared.take)))
        return shared

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """See :class:`perl.rollouts.engine.Engine`."""
        return self._asked(lambda pool: pool.trial(request, sampling))

    def expect(self, proof: ExpectedLogProbs) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
        self._asked(lambda pool: pool.expect(proof))

    def drop(self, failures: Mapping[str, str]) -> None:
        """See :class:`perl.rollouts.engine.Engine`; what failed on the main process counts."""
        self._asked(lambda pool: pool.drop(failures))

    def sleep(self) -> None:
        """See :class:`perl.rollouts.engine.Engine`."""
        if self._pool is not None:
            self._pool.sleep()

    def close(self) -> None:
        """Closes it, where it is."""
        if self._pool is not None:
            self._pool.close()

    def _asked(self, what: Callable[[ServerPool], _T]) -> _T:
        """What the engine answers, on all processes."""
        return self._processes.by_main(lambda: what(self._pool))  # type: ignore[arg-type]  # there it is open


class _Shared:
    """Rollouts under way for all processes: groups come to the main process, which hands them on in rounds."""

    def __init__(self, processes: Processes, counts: Sequence[int], on_group: OnGroup | None) -> None:
        """Begins with none; the main process knows of each process how many requests it has, by rank."""
        self._processes, self._on_group = processes, on_group
        self._ends = list(accumulate(counts))
        self._left = sum(counts)
        self._of_a_round = -(-self._left // _ROUNDS)
        self._came: SimpleQueue[_Answered | None] = SimpleQueue()  # None: no more will come
        self._own: list[list[Sampled]] | None = None

    def follow(self, rollouts: Rollouts) -> None:
        """Takes what the main process has begun; called there."""
        self._rollouts = rollouts
        rollouts.add_done_callback(lambda _: self._came.put(None))

    def take(self, position: int, group: Sequence[Sampled]) -> None:
        """A group is there; called on the main process, whose own requests come first."""
        if self._on_group is not None and position < self._ends[0]:
            self._on_group(position, group)
        self._came.put((position, group))

    def result(self) -> list[list[Sampled]]:
        """The completions of this process's requests; every process must call it, once or more often."""
        if self._own is None:
            own: dict[int, list[Sampled]] = {}
            left = True
            while left:
                came, left = self._processes.scattered(self._round)
                for position, group in came:
                    own[position] = list(group)
                    if self._on_group is not None and not self._processes.main:
                        self._on_group(position, group)
            self._own = [own[position] for position in range(len(own))]
        return self._own

    def _round(self) -> list[tuple[list[_Answered], bool]]:
        """For each process the groups that came since the last round, and whether any process waits for more.

        Raises:
            PerlError: The servers failed.
        """
        parts: list[list[_Answered]] = [[] for _ in self._ends]
        enough = max(0, self._left - self._of_a_round)
        while self._left > enough or not (self._left == 0 or self._came.empty()):
            found = self._came.get()
            if found is None:
                self._rollouts.result()  # raises: all groups would have come before
                continue
            position, group = found
            rank = bisect_right(self._ends, position)
            parts[rank].append((position - (self._ends[rank - 1] if rank else 0), group))
            self._left -= 1
        return [(part, self._left > 0) for part in parts]
