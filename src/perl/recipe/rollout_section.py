"""The section of a recipe that says how completions are sampled, and the engines that rollouts can come from.

YAML mapping -> RolloutSection; backend -> Capabilities

A new engine is a class behind ``rollouts/engine.py`` and a row of :data:`ENGINES`, here or from a user's package; the
other rooms ask for a capability. Imports nothing heavy, so that a recipe is checked without torch.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from perl.recipe.section import Section, SettingError
from perl.recipe.server_address import ServerAddress, server_address

Backend = Literal["auto", "transformers", "vllm", "vllm-server"]
"""What a recipe may name without a package of the user's; ``auto`` is decided by :func:`best_backend`."""
MOST_AHEAD = 64
"""Steps that rollouts may be sampled ahead; servers hold an adapter in memory for each, as their --max-loras says."""
STARTED = "started"
"""Servers that a run starts, as pydantic's locations of mistakes name them."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do and needs.

    Attributes:
        name: As a recipe names it.
        log_probs: Rollouts come with the log-probabilities they were drawn with, which the loss corrects for.
        needs_servers: Runs on servers: recipes name their addresses, and they outlive a run.
        in_process: Each process of a run has one of its own, which takes a share of the device's memory.
        samples_ahead: Can sample while the policy trains (``rollout.prefetch``).
        quantised_base: Can hold a base that is quantised.
        package: Python package that must be installed where the run is; None: no further one.
        opens: ``module:function`` with the arguments of :func:`perl.rollouts.open_engine.open_engine`, which gives the
            engine; empty: it samples from the model in the trainer's memory, which is the policy.
    """

    name: str
    log_probs: bool = False
    needs_servers: bool = False
    in_process: bool = False
    samples_ahead: bool = False
    quantised_base: bool = False
    package: str | None = None
    opens: str = ""

    @property
    def takes_updates(self) -> bool:
        """Whether it samples from its own copy of the base, and is given the policy after each step."""
        return bool(self.opens)

    @property
    def installed(self) -> bool:
        """Whether the package it needs can be imported; the package is not imported for it."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


TRANSFORMERS = Capabilities("transformers", quantised_base=True)
VLLM = Capabilities(
    "vllm",
    log_probs=True,
    in_process=True,
    package="vllm",
    opens="perl.rollouts.open_engine:open_in_process",
)
VLLM_SERVER = Capabilities(
    "vllm-server",
    log_probs=True,
    needs_servers=True,
    samples_ahead=True,
    quantised_base=True,
    opens="perl.rollouts.open_engine:open_servers",
)

ENGINES: dict[str, Capabilities] = {engine.name: engine for engine in (TRANSFORMERS, VLLM, VLLM_SERVER)}
"""A row for each engine. ``auto`` has none."""

OF_TRL: Mapping[str, str] = MappingProxyType({"colocate": VLLM.name, "server": VLLM_SERVER.name})
"""TRL's ``vllm_mode`` -> the engine that it stands for here."""


def capabilities(backend: str) -> Capabilities:
    """What an engine can do; of ``auto`` what the engine can that is always there, transformers."""
    return ENGINES.get(backend, TRANSFORMERS)


def best_backend(*, on_gpu: bool, servers: bool = False) -> str:
    """What ``auto`` stands for.

    Args:
        on_gpu: Whether this machine has a GPU that can be used.
        servers: Whether addresses of servers are given.

    Returns:
        The servers where there are any, else vLLM in this process on a GPU where it is installed, else transformers.
    """
    if servers:
        return VLLM_SERVER.name
    return VLLM.name if on_gpu and VLLM.installed else TRANSFORMERS.name


def _added(backend: str) -> str:
    """The name of an engine that a package of the user's has added."""
    if backend not in ENGINES:
        raise ValueError(f"there is no engine {backend}")
    return backend


class StartedServers(Section):
    """vLLM servers that are started for the run, as actors of the Ray cluster that it runs on."""

    count: int = Field(ge=1, le=65_536, description="How many servers.")
    gpus_each: int | None = Field(
        None, ge=0, description="GPUs of each, over which it splits the base; None: one where the cluster has GPUs."
    )
    python: str | None = Field(
        None, min_length=1, description="Python that has vLLM, the same path on every node; None: the one that trains."
    )


class RolloutSection(Section, hide_input_in_errors=True):  # an address may hold a password
    """How completions are sampled while training, and by what."""

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="Softmax temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus: smallest set of tokens with this probability.")
    top_k: int = Field(0, ge=0, description="Sample among this many tokens; 0: all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the best one.")
    repetition_penalty: float = Field(1.0, gt=0, description="Above 1 discourages repeated tokens.")
    max_completion_length: int = Field(512, ge=1, description="Tokens after which a completion is cut off.")
    backend: Backend | Annotated[str, AfterValidator(_added)] = Field(
        "auto",
        description="transformers, or vLLM in this process (vllm) or on servers (vllm-server); auto: vllm on a GPU "
        "where it is installed, else transformers.",
    )
    servers: Annotated[
        Annotated[list[str | dict[str, str]], Tag("list")] | Annotated[StartedServers, Tag(STARTED)],
        Discriminator(lambda given: STARTED if isinstance(given, dict | StartedServers) else "list"),
    ] = Field(
        [],
        description="Addresses of vLLM servers, http://HOST:PORT, or {url: ..., key_env: NAME, ca_file: FILE} where "
        "the key is not in VLLM_API_KEY or the certificate is private; `perl rollout command` prints how to start one. "
        "On Ray also {count: N, gpus_each: M, python: PATH}, which starts them.",
    )
    server_timeout: float = Field(
        600.0, gt=0, description="Seconds to wait while no server answers; then a checkpoint, and the run fails."
    )
    sync: Literal["auto", "adapter", "merged"] = Field(
        "auto",
        description="What vLLM gets after each step: the adapter, or the weights it changes; auto: the adapter where "
        "it can be served exactly.",
    )
    sync_folder: str | None = Field(
        None, min_length=1, description="Folder through which servers get it, readable by all; None: in the run folder."
    )
    sync_folder_on_servers: str | None = Field(
        None, min_length=1, description="The same folder as servers see it; None: by the same path."
    )
    check_every: int = Field(
        50, ge=0, description="Compare vLLM's log-probabilities with the trainer's each N syncs; 0: only at first."
    )
    tolerance: float | None = Field(
        None, gt=0, description="Largest mean difference of theirs in nats; None: what rounding explains in its type."
    )
    prefetch: int = Field(
        0,
        ge=0,
        le=MOST_AHEAD,
        description="Sample so many steps ahead on the servers while training, with the policy of then; 0: on-policy.",
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Optimizer steps from the policy that sampled to the update, at most; None: any."
    )
    in_flight: Literal["finish", "continue"] = Field(
        "finish", description="At a sync requests finish with their adapter, or continue what they wrote with the new."
    )

    @model_validator(mode="after")
    def _check_servers(self) -> "RolloutSection":
        served = self.capabilities.needs_servers
        if served and not self.servers:
            raise SettingError("backend", "vllm-server needs servers, as in rollout.servers: [http://localhost:8000]")
        if self.servers and not served:
            raise SettingError("servers", f"are used by backend vllm-server only, not by {self.backend}")
        try:
            addresses = {address.url for address in self.addresses}
        except ValueError as error:
            raise SettingError("servers", str(error)) from None
        if self.started is None and len(addresses) < self.server_count:
            raise SettingError("servers", "the same server is named twice")
        what = f"needs backend vllm-server; {self.backend} and the training take turns"
        self.only_if(self.capabilities.samples_ahead, what, "prefetch")
        what = "continue needs servers that get adapters, rollout.sync: auto or adapter"
        self.only_if(self.sync != "merged", what, "in_flight")
        what = "continue needs rollout.prefetch: 1 or more, without which no request is under way at a sync"
        self.only_if(self.prefetch > 0, what, "in_flight")
        return self

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do; ``auto`` counts as transformers until it is decided."""
        return capabilities(self.backend)

    @property
    def decided(self) -> bool:
        """Whether an engine is named, not ``auto``."""
        return self.capabilities.name == self.backend

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        """The servers, each with what gives access to it; of servers that are started for the run none is known."""
        return () if self.started is not None else tuple(server_address(given) for given in self.servers)  # type: ignore[arg-type]

    @property
    def started(self) -> StartedServers | None:
        """The servers that are started for the run; None: they run already, or there are none."""
        return self.servers if isinstance(self.servers, StartedServers) else None

    @property
    def server_count(self) -> int:
        """How many servers there are."""
        return len(self.servers) if isinstance(self.servers, list) else self.servers.count
