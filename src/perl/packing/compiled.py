"""Layers and functions compiled by torch: fewer passes over memory, for rows of any length.

model -> why its layers are not compiled, or None and they are; function -> the same, compiled

A layer is compiled for packed rows alone, whose attention stays outside of the graphs (:mod:`perl.packing.attention`):
no graph depends on a layout or a length. Rollouts and padded rows run it as it was written.
"""

import copy
import copyreg
import functools
from collections.abc import Callable
from subprocess import SubprocessError
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from perl.errors import ModelError, first_line

_BACKEND = "inductor"


class _CompiledKind(type):
    """The kind of classes whose layers run compiled: copies have the same class, pickles the one that is written."""


# A pickle names a class by its module and name, under which the written class is found. Whoever loads it compiles anew.
copyreg.pickle(_CompiledKind, lambda kind: (copy.copy, (kind.__base__,)))  # a class is its own copy


def check_compiler(device: torch.device) -> None:
    """Compiles a function of one operation.

    Raises:
        ModelError: torch cannot compile here, for want of a C++ compiler or of Triton.
    """
    try:
        compiled(torch.neg)(torch.ones(2, device=device))
    # torch makes most errors of its compilers RuntimeErrors; the others are those that it does not wrap.
    except (RuntimeError, OSError, ImportError, AssertionError, SubprocessError) as error:
        inner = getattr(error, "inner_exception", error)  # torch wraps what the compiler behind it raises
        problem = f"torch cannot compile on this machine ({type(inner).__name__}: {first_line(inner)})"
        raise ModelError(problem, "train.compile_layers", "install a C++ compiler, or leave it out") from error


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled once for tensors of any size; asked once more, the same one."""
    return _compiled(function, _BACKEND)


@functools.cache
def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:  # noqa: ANN401 (a name or a function)
    return torch.compile(function, backend=backend, dynamic=True)


def compile_layers(model: nn.Module, *, packed: bool, whole: bool = True) -> str | None:
    """Compiles a model's layers for packed rows; once more changes nothing.

    Parameters, their names and what is done with them stay as they are: a graph takes them as its inputs, so that an
    adapter that is switched off or whose tensors are exchanged has other results, and saved names are the layers' own.

    Args:
        model: A model of transformers, without wrappers; its layers are changed in place.
        packed: Whether its rows are packed.
        whole: Whether every process holds each parameter whole.

    Returns:
        Why nothing is compiled; None if all layers are.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not packed:
        return "its rows are padded"
    if not whole:
        return "its parameters are in shards"
    if getattr(model, "hf_quantizer", None) is not None:
        return "its base is quantised"
    if not layers:
        return "it has none that transformers knows as such"
    for layer in layers:
        # Another class and not another ``forward`` on the instance: a copy of the layer then runs its own tensors, and
        # hooks stay where they are.
        kind: Any = type(layer)
        layer.__class__ = _compiled_class(kind, _BACKEND)
    return None


@functools.cache
def _compiled_class(
    kind: type[GradientCheckpointingLayer],
    backend: Any,  # noqa: ANN401 (a name or a function)
) -> type[GradientCheckpointingLayer]:
    """A subclass of the same name whose forward pass is compiled if it is given a layout; one for all its layers."""
    if hasattr(kind, "runs_compiled"):
        return kind
    # transformers wraps each class's ``forward`` into gradient checkpointing, ours too: the graph is what is run again.
    plain = kind.forward.__wrapped__
    graphs = _compiled(plain, backend)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the layer's own)
        run = plain if kwargs.get("packed_layout") is None else graphs
        return run(self, *args, **kwargs)

    return _CompiledKind(
        kind.__name__, (kind,), {"forward": forward, "runs_compiled": True, "__module__": kind.__module__}
    )
