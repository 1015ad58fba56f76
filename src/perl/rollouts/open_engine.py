"""The engine that a recipe names, ready to be given the policy.

RolloutSection, policy -> Engine
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from perl.errors import RecipeError, RolloutError
from perl.methods.registry import served_rank
from perl.policy.model import base_identity, resolve_model
from perl.policy.precision import compute_dtype
from perl.recipe.engines import Capabilities
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts.by_main import AskedByMain
from perl.rollouts.engine import Engine, Form
from perl.rollouts.sync import SyncPlan
from perl.rollouts.vllm.in_process import InProcessEngine
from perl.rollouts.vllm.servers import ServerPool
from perl.run.host import Fleet, host
from perl.run.joint_work import Processes, several


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
    return _OPENED[how.capabilities](how, plan, policy, settings)


def _open_servers(how: RolloutSection, plan: SyncPlan | None, policy: nn.Module, settings: EngineSettings) -> Engine:  # noqa: ARG001
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


def _open_in_process(how: RolloutSection, plan: SyncPlan | None, policy: nn.Module, settings: EngineSettings) -> Engine:  # noqa: ARG001
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


# How an engine that takes updates is opened.
_OPENED: Mapping[Capabilities, Callable[[RolloutSection, SyncPlan | None, nn.Module, EngineSettings], Engine]] = {
    ServerPool.capabilities: _open_servers,
    InProcessEngine.capabilities: _open_in_process,
}


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
