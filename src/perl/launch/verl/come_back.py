"""What verl trained comes back as a run like any other.

JOB, step -> RUN: recipe.yaml, run.json, adapter/ (proven on its base), metrics.jsonl, probe.json

Nothing is written unless all of it is right: the folder is made beside its place and then moved there.
"""

import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel

from perl.algorithms.named import ALGORITHMS, KEY
from perl.errors import RunFolderError
from perl.launch.verl.found_job import FoundJob, find_job, find_step
from perl.launch.verl.log import rows_of_logs, seconds_of
from perl.launch.verl.trained import Trained, check_present, load_trained
from perl.methods.registry import METHODS
from perl.methods.settings import method_of, resolved_settings
from perl.policy.guards import check_saved_adapter
from perl.policy.model import (
    answering_fingerprint,
    base_dtype,
    base_identity,
    load_base,
    source_fingerprint,
    total_parameters,
    trainable_parameters,
)
from perl.policy.probe import write_probe
from perl.policy.save_adapter import log_probs_in_float32, write_adapter
from perl.policy.saved.adapter import WEIGHTS
from perl.recipe import Recipe
from perl.recipe.train_fields import train_fields
from perl.run.facts import RECIPE
from perl.run.files import new_folder, replace_folder, sha256_of, write_text
from perl.run.folder import Run, installed_versions
from perl.run.logs import append_row

TRAINED_BY = "trained by"
"""Among a run's settings: what trained it, if that was not this package."""
_DEFAULT_PLACE, _STAGED = "run", ".imported"
# What a run that has handed its job over knows better than what comes back.
_OF_START = ("status", "created", "seconds", "updated")
# Rows and tokens on which the adapter that is written is compared with what came back.
_PROBE = (2, 32)
_KEY = re.compile(r"[^\w.@/-]")
_MOST_SHOWN = 4


@dataclass(frozen=True)
class CameBack:
    """An imported run.

    Attributes:
        run: The run, done.
        step: The step of its adapter.
        tensors: Of the adapter.
        compared: Tensors of the base that the checkpoint held too, each the same as here; 0: it held none.
        logged: Steps that verl's log has.
    """

    run: Run
    step: int
    tensors: int
    compared: int
    logged: int


def come_back(job: str | Path, output: str | Path | None = None, step: int | None = None) -> CameBack:
    """Makes a run folder of what verl trained of a job.

    Args:
        job: Folder of the job, with verl's checkpoints and log in it.
        output: The run folder, which must be new or empty; None: ``JOB/run``.
        step: Of which checkpoint; None: the newest complete one.

    Raises:
        RunFolderError: The job or the checkpoint is absent, incomplete, malformed, or was changed since it was sent; or
            the run folder is not empty.
        ModelError: The checkpoint is of another base, or holds another adapter than the recipe makes.
        BrokenPromiseError: The adapter that was written does not give the log-probs of what came back.
    """
    found = find_job(job)
    number, actor = find_step(found, step)
    target = Path(output).expanduser() if output is not None else found.path / _DEFAULT_PLACE
    _check_new(target)
    check_present(found, actor)
    rows = rows_of_logs(found.logs, number, _weights(found.recipe), found.sent.steps_per_batch)
    trained = load_trained(found, actor, load_base(found.recipe.model, torch.device("cpu")))
    with new_folder(target) as staged:
        run = Run(staged)
        facts = {
            "status": "done",
            "steps": number * found.sent.steps_per_batch,
            **_facts(found, trained),
            **_proven(run, trained.policy),
        }
        for row in rows:
            append_row(run.metrics, row)
        recipe = replace(found.recipe, train=MappingProxyType({**found.recipe.train, "output_dir": str(target)}))
        write_text(staged / RECIPE, recipe.to_yaml())
        run.record(**facts, seconds=seconds_of(rows), reward=_ends(rows))
    count = sum(1 for name, _ in trained.policy.named_parameters() if "lora_" in name)
    return CameBack(Run.read(target), number, count, trained.compared, len(rows))


def come_into(job: str | Path, run: Run) -> CameBack:
    """Adds what verl trained of a job to the run that has handed it over, whose own facts of its start stay.

    Args:
        job: Folder of the job.
        run: Open, and of the job's recipe.

    Raises:
        PerlError: As of :func:`come_back`; the run is as it was.
    """
    staged = run.path / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    done = come_back(job, staged)
    for path in (done.run.adapter, done.run.metrics, *staged.glob("probe*")):
        if path.is_dir():
            replace_folder(path, run.path / path.name)
        elif path.exists():
            path.replace(run.path / path.name)
    shutil.rmtree(staged)
    run.record(**{name: value for name, value in done.run.facts.items() if name not in _OF_START})
    return replace(done, run=run)


def _check_new(target: Path) -> None:
    if target.resolve() == Path.cwd():
        raise RunFolderError("is the current folder, which no other can replace", str(target), "-o DIR with a new one")
    if target.is_dir() and any(target.iterdir()):
        raise RunFolderError("is not empty", str(target), "choose another with --output")
    if target.exists() and not target.is_dir():
        raise RunFolderError("is a file, not a folder", str(target), "choose another with --output")


def _proven(run: Run, policy: PeftModel) -> dict[str, Any]:
    """Writes the adapter and compares it, loaded by plain PEFT on a clean base, with what came back."""
    base, revision = base_identity(policy)
    write_adapter(policy, run.adapter, base, revision, source_fingerprint(policy))
    vocabulary = policy.get_base_model().get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, _PROBE, generator=torch.Generator().manual_seed(0))
    difference = check_saved_adapter(policy, run.adapter, ids)
    write_probe(run.path, ids, log_probs_in_float32(policy, ids))
    digests = {"base": answering_fingerprint(policy), "adapter": sha256_of(run.adapter / WEIGHTS)}
    return {"fingerprint": digests, "reload_difference": difference}


def _facts(job: FoundJob, trained: Trained) -> dict[str, Any]:
    """What is known of the training: what the recipe asked for, and who carried it out; nothing of this machine."""
    recipe, sent, policy = job.recipe, job.sent, trained.policy
    base, revision = base_identity(policy)
    planned = recipe.train.get("max_steps")
    row = ALGORITHMS.get(recipe.algorithm or "")
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "trained_by": {
            "program": "verl",
            "version": sent.verl_version,
            "strategy": sent.strategy,
            "processes": trained.processes,
            "rollout": sent.rollout,
            "job_sha256": job.sha256,
            "compared_tensors_of_the_base": trained.compared,
            "further_overrides": job.further,
            "start_changed": job.start_changed,
        },
        "versions": {"perl-rl": installed_versions()["perl-rl"], "verl": sent.verl_version},
        "base": base,
        "revision": revision,
        "quantization": None,
        "base_dtype": base_dtype(policy),
        "repo_id": recipe.hub.repo_id,
        "method": _method(recipe, policy),
        "seed": _asked(recipe, "seed"),
        "trainable_parameters": trainable_parameters(policy),
        "total_parameters": total_parameters(policy),
        "settings": _settings(job, trained),
        "loss": _asked(recipe, "loss_type"),
        "ratio_level": _asked(recipe, "importance_sampling_level"),
        **({KEY: row.name, "overridden": row.overridden(recipe.train)} if row is not None else {}),
        "rewards": _weights(recipe),
        **({"planned_steps": planned} if isinstance(planned, int) and planned > 0 else {}),
    }


def _settings(job: FoundJob, trained: Trained) -> dict[str, Any]:
    """The settings that a person reads, by the names that cards know."""
    recipe, sent = job.recipe, job.sent
    where = f"{sent.strategy} on {trained.processes} processes" if trained.processes else sent.strategy
    asked = resolved_settings(recipe.peft) if recipe.peft.adapter is None else _continued(recipe, trained.policy)
    method = METHODS.get(recipe.peft.method)
    rate = recipe.train.get("learning_rate") or (method.learning_rate if method else None)
    temperature, longest = recipe.rollout.temperature, recipe.rollout.max_completion_length
    return {
        **asked,
        **({"learning rate": f"{rate:g}"} if rate is not None else {}),
        "KL coefficient (beta)": _asked(recipe, "beta"),
        "sampling": f"temperature {temperature:g}, at most {longest} tokens",
        TRAINED_BY: f"verl {sent.verl_version}, {where}{_otherwise(job)}",
    }


def _otherwise(job: FoundJob) -> str:
    """What a card says of a start that was not the exported one; the values of overrides are in ``run.json``."""
    keys = dict.fromkeys(_KEY.sub("", line.partition("=")[0].lstrip("+~")) for line in job.further)
    shown = [key for key in keys if key][:_MOST_SHOWN]
    more = [f"{len(keys) - len(shown)} more"] if len(keys) > len(shown) else []
    told = f", told otherwise: {' '.join([*shown, *more])}" if job.further else ""
    return told + (", run.sh changed" if job.start_changed else "")


def _continued(recipe: Recipe, policy: PeftModel) -> dict[str, Any]:
    """The settings of an adapter that was continued, which has them from the one before."""
    config: Any = policy.peft_config[policy.active_adapter]
    targets = config.target_modules
    shown = sorted(targets) if isinstance(targets, set) else targets
    return {"continues": recipe.peft.adapter, "rank": config.r, "alpha": config.lora_alpha, "target_modules": shown}


def _asked(recipe: Recipe, name: str) -> Any:  # noqa: ANN401 (of any argument)
    """What the recipe has for a field of the trainer, else the field's default."""
    return recipe.train.get(name, train_fields()[name].default)


def _method(recipe: Recipe, policy: PeftModel) -> str:
    """That of the recipe, or of the adapter that was continued."""
    return recipe.peft.method if recipe.peft.adapter is None else method_of(policy.active_peft_config).name


def _weights(recipe: Recipe) -> dict[str, float]:
    """Rewards by the names that a run has for them -> weight."""
    return {name.rpartition(":")[2]: float(setting.weight) for name, setting in recipe.rewards.items()}


def _ends(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The first and the last mean reward that was logged."""
    means = [row["reward"] for row in rows if "reward" in row]
    return {"first": means[0], "last": means[-1]} if means else {}
