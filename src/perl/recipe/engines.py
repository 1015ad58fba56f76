"""The engines that rollouts can come from, and what each can do. The only file that knows them by name.

backend, as a recipe names it -> Capabilities

A new engine is a class behind ``rollouts/engine.py``, a name in :data:`Backend` and a row in :data:`ENGINES`; the other
rooms ask for a capability. Imports nothing heavy, so that a recipe is checked without torch.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Backend = Literal["auto", "transformers", "vllm", "vllm-server"]
"""What a recipe may name; ``auto`` is decided by :func:`best_backend`."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do and needs.

    Attributes:
        name: As a recipe names it.
        takes_updates: Samples from its own copy of the base, and is given the policy after each step. False: it samples
            from the model in the trainer's memory, which is the policy.
        log_probs: Rollouts come with the log-probabilities they were drawn with, which the loss corrects for.
        needs_servers: Runs on servers: recipes name their addresses, and they outlive a run.
        in_process: Each process of a run has one of its own, which takes a share of the device's memory.
        samples_ahead: Can sample while the policy trains (``rollout.prefetch``).
        quantised_base: Can hold a base that is quantised.
        package: Python package that must be installed where the run is; None: no further one.
    """

    name: Backend
    takes_updates: bool = False
    log_probs: bool = False
    needs_servers: bool = False
    in_process: bool = False
    samples_ahead: bool = False
    quantised_base: bool = False
    package: str | None = None

    @property
    def installed(self) -> bool:
        """Whether the package it needs can be imported; the package is not imported for it."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


TRANSFORMERS = Capabilities("transformers", quantised_base=True)
VLLM = Capabilities("vllm", takes_updates=True, log_probs=True, in_process=True, package="vllm")
VLLM_SERVER = Capabilities(
    "vllm-server", takes_updates=True, log_probs=True, needs_servers=True, samples_ahead=True, quantised_base=True
)

ENGINES: Mapping[Backend, Capabilities] = MappingProxyType({e.name: e for e in (TRANSFORMERS, VLLM, VLLM_SERVER)})
"""A row for each engine. ``auto`` has none."""

OF_TRL: Mapping[str, Backend] = MappingProxyType({"colocate": VLLM.name, "server": VLLM_SERVER.name})
"""TRL's ``vllm_mode`` -> the engine that it stands for here."""


def capabilities(backend: Backend) -> Capabilities:
    """What an engine can do; of ``auto`` what the engine can that is always there, transformers."""
    return ENGINES.get(backend, TRANSFORMERS)


def best_backend(*, on_gpu: bool, servers: bool = False) -> Backend:
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
