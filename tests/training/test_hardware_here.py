"""The GPU that is here, by the name and the memory that CUDA says."""

from types import SimpleNamespace

import pytest
import torch

from perl.training.hardware import GIB, HARDWARE, this_machine


@pytest.mark.parametrize(
    ("seen", "memory", "capability", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, (8, 0), "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), "A100 40GB"),
        ("NVIDIA A10", 22.0, (8, 6), "A10"),
        ("NVIDIA L4", 22.0, (8, 9), "L4"),
        ("NVIDIA L40S", 44.4, (8, 9), None),
        ("Tesla T4", 14.6, (7, 5), "T4"),
        ("NVIDIA GeForce RTX 4090", 23.6, (8, 9), "RTX 4090"),
        ("NVIDIA GeForce RTX 3060", 11.6, (8, 6), None),
        ("Tesla V100-SXM2-16GB", 15.8, (7, 0), None),
        ("NVIDIA H100 80GB HBM3", 79.1, (9, 0), "H100"),
    ],
)
def test_a_card_is_known_by_whole_words_and_has_the_memory_that_is_there(monkeypatch, seen, memory, capability, row):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: seen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    properties = SimpleNamespace(total_memory=memory * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    found = this_machine()
    assert found.name == (row or seen)
    assert found.memory == pytest.approx(memory * GIB)
    assert found.bfloat16 == (capability >= (8, 0))
    assert row is None or found.bandwidth == HARDWARE[row].bandwidth
