"""How much of what was sampled the importance correction has bounded."""

import pytest
import torch
from accelerate import Accelerator

from perl.algorithms.importance import SamplingCorrection, sampling_ratio
from perl.algorithms.metrics import CORRECTED, SamplingMetrics

OLD = torch.tensor([[-1.0, -1.0, -1.0, 0.0], [-1.0, -1.0, 0.0, 0.0]])
SAMPLING = torch.tensor([[-1.0, -2.5, -0.9, 0.0], [-1.0, float("nan"), 5.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def logged(mode, low=None, high=3.0):
    correction = SamplingCorrection(mode, low, high)
    metrics = SamplingMetrics(torch.device("cpu"), corrects=True)
    metrics.add(OLD, SAMPLING, sampling_ratio(OLD, SAMPLING, MASK, correction), MASK)
    return dict(metrics.values(Accelerator(cpu=True)))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_of_tokens_those_outside_the_bounds_count(mode):
    assert logged(mode)[CORRECTED] == pytest.approx(1 / 5)  # exp(1.5) of five tokens; NaN counts as equal
    assert logged(mode, low=0.95)[CORRECTED] == pytest.approx(2 / 5)  # exp(-0.1) too
    assert logged(mode, high=10.0)[CORRECTED] == 0.0


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_of_rows_those_outside_the_bounds_count(mode):
    assert logged(mode)[CORRECTED] == pytest.approx(1 / 2)  # exp(1.4), and 1
    assert logged(mode, high=4.1)[CORRECTED] == 0.0
