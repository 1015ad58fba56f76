"""An engine in this process is opened in the type that the policy computes in, and passes the parity check then."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from perl.errors import BrokenPromiseError
from perl.recipe.rollout_section import RolloutSection
from perl.rollouts import open_engine as opening
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.rollouts.parity_check import ParityCheck
from tests.rollouts.test_parity_check import PROMPT, policy_with, written


@pytest.fixture(autouse=True)
def _no_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("weights", "mixed_precision", "expected"),
    [("float32", "no", "float32"), ("float32", "bf16", "bfloat16"), ("bfloat16", "no", "bfloat16")],
)
def test_vllm_in_this_process_computes_in_the_type_that_the_policy_computes_in(
    monkeypatch, weights, mixed_precision, expected
):
    monkeypatch.setattr(opening, "InProcessEngine", lambda *_, **options: options)
    policy = Accelerator(mixed_precision=mixed_precision, cpu=True).prepare_model(policy_with(dtype=weights))
    how = RolloutSection(backend="vllm")
    assert open_engine(how, None, policy, EngineSettings("run", Path("sync")))["dtype"] == expected


def test_a_right_engine_passes_beside_a_policy_under_autocast_and_a_wrong_one_does_not():
    right, wrong = policy_with(scale=0.05), policy_with(scale=0.2)
    torch.manual_seed(0)
    policy = policy_with(scale=0.0)
    policy.load_state_dict(right.state_dict())
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(policy)
    parity = ParityCheck(prepared, PROMPT)
    # What rounding is between an engine in float32 and autocast is more than between two in bfloat16.
    assert parity.check({"exact": written(right, parity)}) <= parity.tolerance
    with pytest.raises(BrokenPromiseError, match="wrong does not answer like the policy"):
        parity.check({"wrong": written(wrong, parity)})
