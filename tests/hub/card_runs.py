"""Run folders for tests of cards: what a training leaves behind, without the training."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel

from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import Results
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation, resolved_settings
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import answering_fingerprint, base_fingerprint, source_fingerprint
from perl.policy.model import load_base
from perl.policy.name import adapter_config_digest, policy_name
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import CONFIG, WEIGHTS, find_adapter
from perl.recipe import Recipe, load_recipe
from perl.recipe.sections import ModelSection, PeftSection
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.sandbox import BASE_NAME
from tests.evaluations import results, task_result
from tests.hub.scored import write_scored
from tests.saved_adapters import clean_base

ADAPTERS = [name for name, method in METHODS.items() if method.config]
TASK = "sandbox:addition"
BASE_MARKS, ADAPTER_MARKS = ["0000", "1000", "1100", "1111"] * 5, ["1100", "1110", "1111", "1111"] * 5


def _few(method: str) -> dict[str, object]:
    """Settings of few layers and parameters, where the method lets one choose."""
    row = METHODS[method]
    chosen: dict[str, object] = {"rank": 4} if "rank" in row.settings else {}
    return chosen | (
        {"target_modules": ["q_proj", "down_proj"]} if row.settings["target_modules"] == "all-linear" else {}
    )


def policy_of(method: str = "lora", size: float = 0.05, quantization: str | None = None) -> PeftModel:
    """A policy that is no longer the base; of few layers and parameters where the method lets one choose."""
    torch.manual_seed(0)
    quantised = ModelSection(quantization=quantization)
    base = load_base(quantised, torch.device("cpu")) if quantization else clean_base()
    policy = attach_adapter(base, adaptation(PeftSection(method=method, **_few(method))))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape)
    return policy.eval()


@functools.cache
def _trained(method: str) -> PeftModel:
    """A policy of the method that nobody may change."""
    return policy_of(method)


def scores(adapter: Path | str, *tasks, **protocol) -> Results:
    """Of that adapter's folder, or of weights of that digest, on the sandbox's base."""
    chosen = {"preset": "recipe", "temperature": 1.0, "max_new_tokens": 16, "k": 4, **protocol}
    found = tasks or (heldout(),)
    known = {"base": BASE_NAME, "base_revision": None, "name": "a-run", "chat_template": "0" * 12}
    if isinstance(adapter, Path):
        config = adapter_config_digest((adapter / CONFIG).read_text())
        known |= {"adapter_sha256": sha256_of(adapter / WEIGHTS), "adapter_config_sha256": config}
        known["base_sha256"] = find_adapter(str(adapter)).base_fingerprint
    else:
        known["adapter_sha256"] = adapter
    made = results(*found, protocol=Protocol(**chosen), **known)
    made.engine.update(dtype="float32", backend="transformers", device="cpu")
    return made


def heldout(base=BASE_MARKS, adapter=ADAPTER_MARKS, **changes):
    """A result on a run's own held-out problems."""
    data = {"source": TASK, "revision": None, "sha256": "a" * 64}
    return task_result(TASK, base, adapter, title=f"{TASK} (held out)", data=data, max_new_tokens=16, **changes)


def make_run(folder: Path, method: str = "lora", policy: PeftModel | None = None, **recipe) -> Run:
    """A run that is done, with scores of its adapter and a log.

    Args:
        folder: Its folder.
        method: Of the adapter.
        policy: What was trained; None: :func:`policy_of` the method.
        **recipe: Sections of its recipe, or single settings as ``{"data": {...}}``.
    """
    folder.mkdir(parents=True)
    peft = {"method": method, **_few(method)}
    rewards = {"accuracy": {}, "format": {"weight": 0.2}}
    train = {"seed": 3, "max_steps": 50, "loss_type": "dapo", "learning_rate": 1e-5}
    asked = {"peft": peft, "data": {"train": {"name": TASK}}, "rewards": rewards, "train": train}
    written = load_recipe({**asked, **recipe})
    (folder / "recipe.yaml").write_text(written.to_yaml())
    run = Run(folder)
    policy = policy or _trained(method)
    fingerprint = source_fingerprint(policy) or base_fingerprint(policy)
    write_adapter(policy, run.adapter, BASE_NAME, None, fingerprint)
    digest = sha256_of(run.adapter / WEIGHTS)
    run.record(
        status="done", steps=50, base=BASE_NAME, revision=None, repo_id=None, method=method, seed=3,
        trainable_parameters=1234, total_parameters=800_000, fingerprint={"base": fingerprint, "adapter": digest},
        settings={**resolved_settings(PeftSection(**peft)), **asked_settings(written)}, loss="dapo",
        ratio_level="token", rewards={"accuracy": 1.0, "format": 0.2}, data={"train": None, "eval": None},
        hardware={"device": "A Processor", "count": 2}, reload_difference=1.5e-6, seconds=36.4,
        versions={"perl-rl": "0.1.0", "torch": "2.13.0"},
    )  # fmt: skip
    rows = [{"step": step, "reward": step / 100, "num_tokens": 1000.0 * step} for step in range(1, 51)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.samples.write_text(json.dumps({"step": 1, "prompt": [{"role": "user", "content": "1+1="}]}) + "\n")
    write_scored(folder / "eval", scores(run.adapter), BASE_MARKS, ADAPTER_MARKS)
    return run


def asked_settings(recipe: Recipe) -> dict[str, object]:
    """What a training says of its settings beside those of its adapter."""
    return {
        "learning rate": "1e-05",
        "KL coefficient (beta)": recipe.train.get("beta", 0.0),
        "batch": str(recipe.batch),
        "sampling": f"temperature 1, at most {recipe.rollout.max_completion_length} tokens",
    }


def make_quantised_run(folder: Path) -> Run:
    """The same, trained and scored on the base in 4 bits, as a training with ``model.quantization=nf4`` leaves it."""
    policy = policy_of(quantization="nf4")
    model = {"name": BASE_NAME, "quantization": "nf4"}
    run = make_run(folder, policy=policy, model=model)
    answering, known = answering_fingerprint(policy), run.facts["fingerprint"]
    fingerprint = {**known, "base": answering, "source": known["base"]}
    settings = {**run.facts["settings"], "base loaded as": "nf4"}
    run.record(quantization="nf4", fingerprint=fingerprint, settings=settings)
    found = scores(run.adapter)
    subject = {**found.subject, "base_sha256": answering, "base_quantization": "nf4"}
    named = (answering, subject["adapter_sha256"], subject["adapter_config_sha256"])
    subject["policy"] = policy_name(*named)
    shutil.rmtree(folder / "eval")
    write_scored(folder / "eval", replace(found, subject=subject), BASE_MARKS, ADAPTER_MARKS)
    return run
