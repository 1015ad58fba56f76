"""Six methods that stand for all of them in ``make test``; the others run beside them at night."""

from collections.abc import Iterable

import pytest

from perl.methods.registry import METHODS

# Two factors; with magnitudes; that start on the base's weights; rotations; products of no low rank; shared factors.
A_FEW = ("lora", "dora", "pissa", "oft", "lokr", "vera")


def few_layers(method: str) -> dict[str, list[str]]:
    """Settings with which a method adapts few layers, where it lets one choose."""
    free = METHODS[method].settings["target_modules"] == "all-linear"
    return {"target_modules": ["q_proj", "down_proj"]} if free else {}


def each(methods: Iterable[str]) -> list:
    """All of these methods as parameters of a test, of which the six run by day."""
    return [pytest.param(name, marks=() if name in A_FEW else pytest.mark.nightly) for name in methods]
