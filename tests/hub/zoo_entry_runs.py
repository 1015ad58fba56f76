"""A tiny run with scores, trained once a process, and copies of it to change."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import perl

SETTINGS = [
    *("train.max_steps=2", "eval.limit=32", "eval.k=2", "train.prompts_per_step=2", "train.num_generations=4"),
    "model.dtype=bfloat16",  # not what a base is loaded in here by default: an entry is verified in its own type
    *("train.per_device_train_batch_size=8", "train.save_strategy='no'", "train.report_to=[]"),
]


@functools.cache
def trained(seed: int = 0) -> Path:
    """The run's folder; nobody may write to it."""
    folder = Path(tempfile.mkdtemp(prefix="perl-curation-")) / f"tiny-{seed}"
    perl.train("quickstart", [*SETTINGS, f"train.seed={seed}"], folder)
    return folder


def copied(run: Path, folder: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(run, folder)
    return folder


def change(file: Path, edit: Callable[[Any], object]) -> None:
    """Edits a JSON file in place."""
    facts = json.loads(file.read_text())
    edit(facts)
    file.write_text(json.dumps(facts))
