"""What a checkpoint keeps of an optimizer, a schedule and random numbers: by name, exactly, and without pickles."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers.optimization import Adafactor

from perl.errors import ModelError, PerlError
from perl.trainer.resume_state import redivided
from perl.trainer.step.optimizer_state import (
    load_named_state,
    load_random_state,
    named_state,
    read_state,
    save_random_state,
    seed_random_state,
    write_state,
)

CPU = torch.device("cpu")


class Odd(torch.optim.SGD):
    """Keeps what optimizers in the wild keep: half-precision averages, numbers, tuples, tables by number, None."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["average"] = p.detach().to(torch.bfloat16) * 0.3
                state["codes"] = (p.detach() * 10).to(torch.uint8)
                state["nested"] = {"table": {1: torch.tensor(0.1, dtype=torch.float64), "x": (1, 2.5, None)}}
                state["limit"] = float("inf")
        super().step(closure)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False),
    "odd": lambda groups: Odd(groups, lr=1e-2),
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, dtype=torch.float32))


def optimizer_of(policy: nn.Module, kind: str, *, reverse: bool = False) -> torch.optim.Optimizer:
    """Weights and biases in groups of their own, in the one order or the other, and an empty group."""
    weights, biases = ([p for n, p in policy.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    groups = [{"params": weights[::-1] if reverse else weights, "weight_decay": 0.1}, {"params": biases}]
    return OPTIMIZERS[kind]([*groups[:: -1 if reverse else 1]])


def steps(policy: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        policy(torch.randn(6, 5, generator=generator)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit_whatever_the_order_of_its_parameters(tmp_path, kind):
    policy = model()
    optimizer = optimizer_of(policy, kind)
    steps(policy, optimizer, 3, seed=2)
    write_state(tmp_path / "optimizer.safetensors", named_state(optimizer, policy))

    again = copy.deepcopy(policy)
    other = optimizer_of(again, kind, reverse=True)
    load_named_state(other, again, read_state(tmp_path / "optimizer.safetensors"))
    for ours, theirs in zip(policy.parameters(), again.parameters(), strict=True):
        assert repr(other.state[theirs]) == repr(optimizer.state[ours])  # types and every nested value
    steps(policy, optimizer, 3, seed=4)
    steps(again, other, 3, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_the_tensors_have_the_parameters_names_and_nothing_is_a_pickle(tmp_path):
    policy = model()
    optimizer = optimizer_of(policy, "adamw")
    steps(policy, optimizer, 1, seed=2)
    write_state(tmp_path / "o.safetensors", named_state(optimizer, torch.compile(policy)))
    with safe_open(tmp_path / "o.safetensors", framework="pt") as file:
        assert "state/0.weight/exp_avg" in file.keys()  # noqa: SIM118
        groups = json.loads(file.metadata()["value"])["groups"]
    assert groups[0]["params"] == ["0.weight", "1.weight"]
    assert groups[0]["betas"] == {"tuple": [0.9, 0.999]}


def test_what_is_no_plain_value_and_what_is_of_other_parameters_is_refused(tmp_path):
    policy = model()
    optimizer = optimizer_of(policy, "adamw")
    optimizer.param_groups[0]["generator"] = torch.Generator()
    with pytest.raises(PerlError, match=r"groups/0/generator is a torch.*Generator.*without pickles"):
        write_state(tmp_path / "o.safetensors", named_state(optimizer, policy))
    saved = named_state(optimizer_of(policy, "adamw"), policy)
    with pytest.raises(ModelError, match="other parameters, or in other groups"):
        load_named_state(torch.optim.AdamW(policy.parameters()), policy, saved)


def numbers() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_random_numbers_go_on_and_those_of_unknown_processes_start_anew_and_differ(tmp_path):
    numbers()  # an odd count of normal numbers: one is left over
    save_random_state(tmp_path, 0, CPU)
    expected = [numbers(), numbers()]
    assert load_random_state(tmp_path, 0, CPU)
    assert [numbers(), numbers()] == expected
    assert not load_random_state(tmp_path, 1, CPU)
    drawn = []
    for seed, rank, step in ((5, 1, 2), (5, 1, 2), (5, 2, 2), (5, 1, 3), (6, 1, 2)):
        seed_random_state(seed, rank, step)
        drawn.append(tuple(numbers()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


def window(rank: int, widths: list[int], rows: int = 2) -> list[dict[str, torch.Tensor]]:
    """Micro-batches whose rows are numbered over all processes and micro-batches."""
    batches = []
    for i, width in enumerate(widths):
        number = torch.arange(rows) + 100 * rank + 10 * i
        ids = number[:, None] * torch.ones(1, width, dtype=torch.int64)
        batches.append(
            {"prompt_ids": ids, "completion_ids": ids + 1, "advantages": number.float(), "total": torch.tensor(9)}
        )
    return batches


def test_rollouts_are_divided_anew_so_that_each_step_has_the_same_rows():
    windows = [window(0, [3, 4, 2, 2]), window(1, [5, 1, 2, 6])]  # two optimizer steps of two micro-batches
    for processes, micro_batches in ((1, 4), (1, 8), (4, 2), (2, 4), (2, 2)):
        parts = [
            redivided(windows, 2, rank=rank, processes=processes, micro_batches=micro_batches)
            for rank in range(processes)
        ]
        for step in range(2):
            each = micro_batches // 2
            batches = [batch for part in parts for batch in part[step * each : (step + 1) * each]]
            found = torch.cat([batch["advantages"] for batch in batches]).tolist()
            expected = [float(100 * r + 10 * i + k) for r in range(2) for i in (2 * step, 2 * step + 1) for k in (0, 1)]
            assert sorted(found) == expected
            assert all(batch["total"] == 9 for batch in batches)
    prompt, completion = parts[0][0]["prompt_ids"], parts[0][0]["completion_ids"]
    assert prompt.shape == (4, 5)
    assert prompt[3].tolist() == [0, 11, 11, 11, 11]  # on the left
    assert completion[3].tolist() == [12, 12, 12, 12, 0]  # on the right


def test_rollouts_that_cannot_be_divided_exactly_are_not():
    windows = [window(0, [3, 3]), window(1, [3, 3])]
    assert redivided(windows, 1, rank=0, processes=3, micro_batches=1) is None
    windows[1][0]["total"] = torch.tensor(8)
    assert redivided(windows, 1, rank=0, processes=1, micro_batches=2) is None
    assert redivided([], 1, rank=0, processes=1, micro_batches=2) is None
