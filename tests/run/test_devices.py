"""On a Mac: the CPU, with one line that says so; Apple's GPU by request: refused."""

import logging

import pytest
import torch
from accelerate.state import AcceleratorState
from trl import GRPOConfig

import perl.run.devices
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import PerlError, RecipeError
from perl.evaluation import request
from perl.evaluation.request import EvalSettings
from perl.recipe import load_recipe
from perl.rewards.process import model as process_model
from perl.run.devices import accelerator, check_device

MPS = torch.device("mps")


@pytest.fixture
def mac(monkeypatch):
    """What torch, accelerate and transformers are told by a Mac."""
    perl.run.devices._say_that_mps_is_not_used.cache_clear()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: MPS)
    monkeypatch.setattr("accelerate.state.is_mps_available", lambda *_: True)
    monkeypatch.setattr("transformers.training_args.is_torch_mps_available", lambda *_: True)
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def trls(folder):
    return GRPOConfig(
        str(folder), bf16=False, gradient_checkpointing=False, activation_checkpointing=False, report_to=[]
    )


@pytest.mark.usefixtures("mac")
def test_everything_on_a_mac_computes_on_its_cpu_and_one_line_says_so(tmp_path, caplog):
    assert trls(tmp_path).device == MPS
    with caplog.at_level(logging.WARNING, "perl"):
        runs = [PeftRLConfig(str(tmp_path), report_to=[]) for _ in range(2)]
        assert accelerator() is None
        devices = {request._device(EvalSettings()), process_model._device("auto"), *(args.device for args in runs)}
    assert {device.type for device in devices} == {"cpu"}
    assert {(args.bf16, args.gradient_checkpointing) for args in runs} == {(False, False)}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "on the CPU" in line
    assert "mps" in line


def test_without_an_accelerator_nothing_is_said_or_set(tmp_path, caplog):
    args = PeftRLConfig(str(tmp_path), report_to=[])
    assert not args.use_cpu
    assert not caplog.records


@pytest.mark.usefixtures("mac")
def test_apples_gpu_by_request_is_refused_and_other_devices_are_let_through(tmp_path):
    args = trls(tmp_path)
    with pytest.raises(RecipeError, match=r"mps.*use_cpu=True"):
        PeftGRPOTrainer("sandbox:base", lambda completions, **_: [0.0] * len(completions), args)
    with pytest.raises(PerlError, match=r"engine\.device.*auto"):
        load_recipe("quickstart", ["engine.device=mps"])
    for name in ("cpu", "cuda", "xpu"):
        check_device(torch.device(name))
