"""A base that one process holds and hands to others: bit by bit the base, once in memory, until the last one ends."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import perl
from perl.errors import ModelError
from perl.policy.held_base import handed_over, hold
from perl.policy.mapped_base import MappedBase, mapped
from perl.policy.model import base_fingerprint, load_base
from perl.recipe.sections import ModelSection

# As the process that starts cells does it, with the CPU in the place of the GPU: who holds the base, then who asks.
NURSERY = """
import json, os, sys, time
from pathlib import Path
import torch
from perl.policy import model as models
from perl.policy.mapped_base import MappedBase, mapped
from perl.policy.model import base_fingerprint, load_base
from perl.recipe.sections import ModelSection
from perl.run import devices
from perl.training.studies.nursery import Job, _fork

folder = Path(sys.argv[1])
base, cpu, alive = MappedBase(folder, ModelSection()), torch.device("cpu"), os.pipe()
looked = []

def accelerator():
    looked.append(os.getpid())
    return cpu

def loaded(section, device):
    assert looked == [os.getpid()], "a fork of a process that has looked for a GPU cannot use it"
    return load_base(section, device)

devices.accelerator, models.load_base = accelerator, loaded
_fork(Job("base", (), str(folder / "log"), str(folder), None, str(folder), base.section.model_dump()), None, alive)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, (folder / "log").read_text()

def shared(place):
    size = proportional = 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(word, 16) for word in words[0].split("-"))
            here = begin <= place < end
        elif here and words[0] in ("Rss:", "Pss:"):
            size += int(words[1]) * 1024 * (words[0] == "Rss:")
            proportional += int(words[1]) * 1024 * (words[0] == "Pss:")
    return size, proportional

meet = [os.pipe() for _ in range(4)]
for cell in range(2):
    if os.fork() == 0:
        with mapped(base):
            model = load_base(base.section, cpu)
        logits = model(torch.arange(3, 60)[None]).logits
        numbers = {"fingerprint": base_fingerprint(model), "logits": logits.double().sum().item()}
        os.write(meet[cell][1], b"!")  # both have it now
        os.read(meet[2 + cell][0], 1)
        size, proportional = shared(next(model.parameters()).data_ptr())
        numbers |= {"rss": size, "pss": proportional}
        numbers["own"] = len({p.untyped_storage().data_ptr() for p in model.parameters()})
        (folder / f"cell-{cell}.json").write_text(json.dumps(numbers))
        os.write(meet[cell][1], b"!")
        os.read(meet[2 + cell][0], 1)
        os._exit(0)
for _ in range(2):
    for cell in range(2):
        os.read(meet[cell][0], 1)
    for cell in range(2):
        os.write(meet[2 + cell][1], b"!")
for _ in range(2):
    os.wait()
print((folder / "holder").read_text())
"""


@pytest.fixture(scope="module")
def two_cells(tmp_path_factory):
    """What two processes found that were handed one base, and where its holder was asked."""
    folder = tmp_path_factory.mktemp("base")
    done = subprocess.run([sys.executable, "-c", NURSERY, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"cell-{cell}.json").read_text()) for cell in range(2)], done.stdout.strip(), folder


def test_a_base_that_is_handed_over_is_the_base_bit_by_bit_and_once_in_memory(two_cells):
    cells, _, _ = two_cells
    own = load_base(ModelSection(), torch.device("cpu"))
    size = sum(p.nbytes for p in own.parameters())
    logits = own(torch.arange(3, 60)[None]).logits.double().sum().item()
    for cell in cells:
        assert cell["fingerprint"] == base_fingerprint(own)
        np.testing.assert_array_equal(cell["logits"], logits)
        assert cell["own"] == 1  # one block
        assert cell["rss"] >= size
        # The holder and two cells have it: a third is each one's.
        assert cell["pss"] == pytest.approx(cell["rss"] / 3, rel=0.2)


def test_the_holder_ends_with_those_who_ask_and_then_each_loads_its_own(two_cells, caplog):
    _, address, folder = two_cells
    end = time.monotonic() + 600.0
    while Path(address).exists():  # of the processes that asked none is left
        assert time.monotonic() < end
        time.sleep(0.1)
    with pytest.raises(ModelError, match="the base was not handed over"):
        handed_over(folder, torch.device("cpu"))
    with mapped(MappedBase(folder, ModelSection())):
        found = load_base(ModelSection(), torch.device("cpu"))
    assert "the base cannot be shared, this cell loads it" in caplog.text
    assert base_fingerprint(found) == base_fingerprint(load_base(ModelSection(), torch.device("cpu")))


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    """The folder of a base that a thread of this process holds."""
    folder, alive, there = tmp_path_factory.mktemp("held"), os.pipe(), threading.Event()
    cpu = torch.device("cpu")
    arguments = (lambda device: load_base(ModelSection(), device), cpu, folder, alive[0], there.set)
    thread = threading.Thread(target=hold, args=arguments)
    thread.start()
    assert there.wait(600.0)
    yield folder
    os.close(alive[1])
    thread.join()


def test_cells_that_train_the_base_itself_leave_the_one_that_others_compute_with(holder, tmp_path):
    small = ("train.max_steps=1", "train.prompts_per_step=2", "train.num_generations=2", "eval.enabled=false")
    settings = (*small, "rollout.max_completion_length=8", "peft.method=full", "model.dtype=float32")
    _, block = handed_over(holder, torch.device("cpu"))
    before = block.clone()
    with mapped(MappedBase(holder, ModelSection())):
        run = perl.train("quickstart", settings, tmp_path / "run")
        shared = load_base(ModelSection(), torch.device("cpu"))
    assert run.status == "done"
    torch.testing.assert_close(block, before, rtol=0, atol=0)
    assert sum(parameter.requires_grad for parameter in shared.parameters()) == 0  # so that no optimizer takes them


def test_one_who_asks_and_hangs_keeps_nobody_waiting(holder):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect((holder / "holder").read_text())
        entries, block = handed_over(holder, torch.device("cpu"))
    assert block.numel() >= sum(torch.Size(entry["shape"]).numel() for entry in entries.values())
