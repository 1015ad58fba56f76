"""Chosen prompts and refills, whole and gone on with: one process, DDP, ZeRO-2, FSDP2."""

import importlib.util

import pytest
import torch

from tests.oracles.two_trainers import relative_difference
from tests.trainer.test_resumed_processes import CLOSE, PROCESSES, adapter, dealt, job, run

# A step draws 4 of 20 prompts, of which a third have no variance; two updates a generation batch in the second.
CHOICES = {
    "memory": {"prompt_memory": True, "prompt_explore": 0.1},
    "refill": {"prompt_refill": 2.0},
    "both": {"prompt_memory": True, "prompt_refill": 1.0, "num_iterations": 2},
}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
STRATEGIES = [name for name in PROCESSES if name != "zero2" or HAS_DEEPSPEED]


def by_processes(folder, jobs):
    """Runs jobs by name of their strategy."""
    for count in (1, 2):
        if wanted := [one for name, one in jobs if PROCESSES[name] == count]:
            run(folder, count, wanted)


@pytest.mark.nightly
def test_a_run_that_was_stopped_chooses_and_ends_like_one_that_was_not(tmp_path):
    cells = [(choice, name) for choice in CHOICES for name in STRATEGIES]
    whole = [(name, job(f"{choice}-{name}", "lora", name, **CHOICES[choice])) for choice, name in cells]
    by_processes(tmp_path, whole)
    resumed = [
        (name, job(f"{choice}-{name}-on", "lora", name, tmp_path / f"{choice}-{name}/checkpoint-2", **CHOICES[choice]))
        for choice, name in cells
    ]
    # Memory alone chooses the same for any number of processes.
    crossed = [
        (end, job(f"memory-{begin}-{end}", "lora", end, tmp_path / f"memory-{begin}/checkpoint-2", **CHOICES["memory"]))
        for begin, end in (("one", "ddp"), ("ddp", "one"))
    ]
    by_processes(tmp_path, resumed + crossed)
    for choice, name in cells:
        found, expected = adapter(tmp_path, f"{choice}-{name}-on"), adapter(tmp_path, f"{choice}-{name}")
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), (choice, name)
        steps = dealt(tmp_path, f"{choice}-{name}")
        assert dealt(tmp_path, f"{choice}-{name}-on") == steps[-len(dealt(tmp_path, f"{choice}-{name}-on")) :]
    for name in STRATEGIES:
        assert dealt(tmp_path, f"memory-{name}") == dealt(tmp_path, "memory-one")
        assert relative_difference(adapter(tmp_path, f"memory-{name}"), adapter(tmp_path, "memory-one")) <= CLOSE
    for _, one in crossed:
        assert relative_difference(adapter(tmp_path, one["name"]), adapter(tmp_path, "memory-one")) <= CLOSE
    assert len(dealt(tmp_path, "refill-one")) > 5  # some steps sampled more than once
