"""Checkpoints that verl 0.9.1's own code has written, of LoRAs that its own FSDP has trained, come back exactly.

Where verl is: the environment named by ``PERL_VERL_ENV``, else ``.venv-verl`` of the checkout.
"""

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import perl
from perl.cli.main import run_commands
from perl.hub.run_card import write_card
from perl.launch.verl.come_back import come_back
from perl.policy.model import load_base
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe.sections import ModelSection
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.sandbox import BASE_FOLDER
from tests.conftest import CHECKOUT
from tests.launch.verl_jobs import ALPHA, RANK, TARGETS, a_job, a_recipe, log_steps

pytestmark = pytest.mark.nightly

ENVIRONMENT = Path(os.environ.get("PERL_VERL_ENV", CHECKOUT / ".venv-verl"))
PROGRAM = Path(__file__).with_name("verl_training.py")
IDS = torch.arange(5, 29).reshape(1, 24)
LAST, PROCESSES = 3, 2
KINDS = {
    "lora, fsdp2, adapter alone": ("lora", "fsdp2", True),
    "rslora, fsdp2, adapter alone": ("rslora", "fsdp2", True),
    "rslora, fsdp2, with the base": ("rslora", "fsdp2", False),
    "lora, fsdp, with the base": ("lora", "fsdp", False),
}


@pytest.fixture(scope="module")
def torchrun() -> Path:
    """verl's."""
    command = ENVIRONMENT / "bin" / "torchrun"
    if not command.is_file():
        pytest.skip(f"no environment with verl in {ENVIRONMENT}: make verl-env, or PERL_VERL_ENV")
    return command


@pytest.fixture(scope="module")
def trained_by_verl(torchrun, tmp_path_factory) -> Callable[..., Path]:
    """Jobs of which verl has trained three steps on two processes, each made once."""

    @functools.cache
    def make(method: str, strategy: str, lora_only: bool) -> Path:
        job = a_job(tmp_path_factory.mktemp("verl") / "job", a_recipe(method, train=TRAIN), strategy=strategy)
        alpha = ALPHA * (RANK**0.5 if method == "rslora" else 1.0)
        command = [str(torchrun), "--standalone", "--nproc_per_node", str(PROCESSES), str(PROGRAM)]
        command += [str(BASE_FOLDER), str(job / "checkpoints"), str(RANK), repr(alpha), strategy, str(int(lora_only))]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([*command, *TARGETS], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        log_steps(job, LAST)
        return job

    return make


TRAIN = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "max_steps": LAST,
    "learning_rate": 1e-3,
    "beta": 0.01,
    "save_strategy": "no",
}


def logits(folder):
    base = load_base(ModelSection(name="sandbox:base"), torch.device("cpu"))
    with torch.no_grad():
        return PeftModel.from_pretrained(base, str(folder)).eval()(IDS).logits


def farthest(one, other):
    return (one - other).abs().max().item()


@pytest.mark.parametrize(("method", "strategy", "lora_only"), KINDS.values(), ids=KINDS)
def test_every_number_is_the_one_that_verl_trained(
    trained_by_verl, tmp_path, record_property, method, strategy, lora_only
):
    job = trained_by_verl(method, strategy, lora_only)
    for step in (2, LAST):
        done = come_back(job, tmp_path / f"run-{step}", step=step)
        there = job / "checkpoints" / f"global_step_{step}"
        expected, written = load_file(there / "whole.safetensors"), load_file(done.run.adapter / WEIGHTS)
        assert written.keys() == expected.keys()
        tensors = max(farthest(written[name], tensor) for name, tensor in expected.items())
        theirs = torch.load(there / "logits.pt", weights_only=True)
        record_property(f"step {step}", f"tensors {tensors}, logits {farthest(logits(done.run.adapter), theirs)}")
        assert tensors == 0.0
        assert farthest(logits(done.run.adapter), theirs) == 0.0
        base = load_base(ModelSection(name="sandbox:base"), torch.device("cpu"))
        assert done.compared == (0 if lora_only else len(dict(base.named_parameters())))
        assert done.run.facts["trained_by"]["processes"] == PROCESSES


def test_the_run_is_scored_continued_and_published(trained_by_verl, hub, record_property):
    """What the command line makes of it: import, evaluation, three more steps here, a push."""
    job = trained_by_verl("rslora", "fsdp2", True)
    assert run_commands(["import-verl", str(job), "-o", "back"], "perl") == 0
    run = Run.read("back")
    assert run.facts["steps"] == LAST
    scored = run_commands(["eval", "--adapter", "back", "--tasks", "heldout", "--limit", "20", "-k", "1"], "perl")
    assert scored == 0
    further = perl.train(a_recipe(peft={"adapter": "back/adapter"}, train=TRAIN), output_dir="more")
    assert (further.status, further.facts["steps"]) == ("done", LAST)
    rows = read_log(further.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["kl"] >= 0.0
    before, after = load_file("back/adapter/" + WEIGHTS), load_file("more/adapter/" + WEIGHTS)
    moved = max(farthest(before[name], tensor) for name, tensor in after.items())
    assert 0.0 < moved < 0.05  # three steps at a rate of 1e-3
    write_card(run)
    pushed = perl.push(run, "user/from-verl")
    assert b"verl 0.9.1, fsdp2 on 2 processes" in hub.repo("user/from-verl").files("main")["README.md"]
    assert pushed.changed
    record_property("continued", f"kl {[row['kl'] for row in rows]}, moved at most {moved:.4f}")
