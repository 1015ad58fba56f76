"""Runs that can be published: with a probe of their policy, and checkpoints."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch

from perl.policy.checkpoint import seal
from perl.policy.probe import write_probe
from perl.policy.reference import token_log_probs
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.run.folder import Run
from tests.hub.card_runs import make_run, policy_of
from tests.local_hub import LocalHub
from tests.saved_adapters import save_adapter

REPO = "user/adapter"
# What is published of such a run, in order.
FILES = [
    *("README.md", "adapter_config.json", "adapter_model.safetensors", "eval/results.json", "eval/samples.jsonl"),
    *("metrics.jsonl", "perl_recipe.yaml", "perl_run.json"),
]


@functools.cache
def _made() -> Path:
    folder = Path(tempfile.mkdtemp()) / "made"
    policy = policy_of()
    run = make_run(folder, policy=policy)
    ids = torch.arange(40).reshape(2, 20) % 60
    with torch.no_grad():
        write_probe(folder, ids, token_log_probs(policy, ids, torch.ones_like(ids)))
    return run.path


def publishable(folder: str | Path = "run") -> Run:
    """A run whose adapter is the policy of its probe."""
    shutil.copytree(_made(), folder)
    return Run.read(folder)


def add_checkpoint(run: Run, step: int, seed: int | None = None) -> Path:
    """A complete checkpoint; of a seed always the same."""
    folder = run.checkpoints / f"checkpoint-{step}"
    save_adapter(folder, seed=step if seed is None else seed)
    (folder / "optimizer.pt").write_bytes(b"\x80\x04")
    seal(folder)
    return folder


def add_best(run: Run, step: int = 20) -> Path:
    """Another adapter that scored better between steps."""
    folder = run.path / "best" / "adapter"
    save_adapter(folder, seed=7)
    record = {"step": step, "metric": "m", "value": 1.0, "metrics": {"eval/m": 1.0}}
    (run.path / "best" / "best.json").write_text(json.dumps(record))
    return folder


def weights_and_config(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (WEIGHTS, CONFIG)}


def files_of(hub: LocalHub, revision: str = "main") -> dict[str, bytes]:
    """What its repository holds, but for what the Hub itself puts there."""
    return {name: data for name, data in hub.repo(REPO).files(revision).items() if name != ".gitattributes"}
