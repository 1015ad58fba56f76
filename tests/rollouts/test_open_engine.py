"""An engine in this process is opened in the type that the policy computes in."""

from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from perl.recipe.rollout_section import RolloutSection
from perl.rollouts import open_engine as opening
from perl.rollouts.open_engine import EngineSettings, open_engine
from tests.rollouts.test_parity_check import policy_with


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
