"""What verl trained comes back as a run like any other, and what it logged as rows like ours.

JOB, step -> RUN: recipe.yaml, run.json, adapter/ (proven on its base), metrics.jsonl, probe.json
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from perl.algorithms.named import ALGORITHMS, KEY
from perl.algorithms.train_fields import train_fields
from perl.errors import ModelError, RunFolderError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation, continued_adaptation, method_of, resolved_settings
from perl.policy.attach import adapter_tensors, attach_adapter, continue_adapter, load_adapter_tensors, own_method
from perl.policy.fingerprint import answering_fingerprint, base_dtype, is_the_base, source_fingerprint
from perl.policy.guards import check_saved_adapter
from perl.policy.model import base_identity, load_base, total_parameters, trainable_parameters
from perl.policy.probe import write_probe
from perl.policy.save_adapter import log_probs_in_float32, write_adapter
from perl.policy.saved.adapter import WEIGHTS, find_adapter
from perl.recipe import Recipe
from perl.run.facts import RECIPE
from perl.run.files import new_folder, sha256_of, write_text
from perl.run.folder import Run, installed_versions
from perl.verl.job_folder import ADAPTER, EARLIER, LOG, Job, find_job
from perl.verl.shards import files_of, read_shards
from perl.verl.table import TABLE

_SECOND_FACTOR = re.compile(r"\blora_(embedding_)?B\b")
# Rows and tokens on which the adapter that is written is compared with what came back.
_PROBE = (2, 32)
NAMES: Mapping[str, str] = TABLE["log"]
_PREFIX = "verl/"
_SURROGATE = "actor/pg_loss"  # the loss without its KL and entropy terms, which older versions log alone
_TOKENS = "perf/total_num_tokens"  # of a step; ours grow from step to step


@dataclass(frozen=True)
class Imported:
    """An imported run.

    Attributes:
        run: The run, done.
        step: verl's step of its adapter.
        logged: Steps that verl's log has.
        seconds: Wall seconds of these together.
    """

    run: Run
    step: int
    logged: int
    seconds: float


def import_job(job: str | Path, output: str | Path | None = None, step: int | None = None) -> Imported:
    """Makes a run folder of what verl trained of a job, whole or not at all.

    Args:
        job: Folder of the job, with verl's checkpoints and log in it.
        output: The run folder, which must be new or empty; None: ``JOB/run``.
        step: Of which checkpoint; None: the newest complete one.

    Raises:
        RunFolderError: The job or the checkpoint is absent, incomplete, malformed, or was changed since it was
            exported; or the run folder is not empty.
        ModelError: The checkpoint is of another base, or holds another adapter than the recipe makes.
        BrokenPromiseError: The adapter that was written does not give the log-probs of what came back.
    """
    found = find_job(job)
    target = Path(output).expanduser() if output is not None else found.path / "run"
    if not target.name:
        raise RunFolderError("is the folder that you are in", str(target), "name one to be made with --output")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise RunFolderError("is not empty", str(target), "choose another with --output")
    with new_folder(target) as staged:
        recipe = found.recipe
        recipe = replace(recipe, train=MappingProxyType({**recipe.train, "output_dir": str(target)}))
        write_text(staged / RECIPE, recipe.to_yaml())
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = add_to_run(found, Run(staged, {"status": "done", "created": created}), step)
        done.run.record(seconds=done.seconds)
    return replace(done, run=Run.read(target))


def add_to_run(job: Job, run: Run, step: int | None = None) -> Imported:
    """Writes what verl trained of a job into a run: adapter, log and facts, all of them once all is known to be right.

    Args:
        job: The job.
        run: Of the job's recipe.
        step: Of which checkpoint; None: the newest complete one.

    Raises:
        PerlError: As of :func:`import_job`.
    """
    number, actor = job.find_step(step)
    files, recipe = files_of(actor), job.recipe
    logs = [job.path / EARLIER, job.path / LOG]
    rows = rows_of_logs(logs, number, _weights(recipe), job.facts.steps_per_batch)
    model = load_base(recipe.model, torch.device("cpu"))
    policy = load_trained(job, actor, model)
    base, revision = base_identity(policy)
    write_adapter(policy, run.adapter, base, revision, source_fingerprint(policy))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, _PROBE, generator=torch.Generator().manual_seed(0))
    difference = check_saved_adapter(policy, run.adapter, ids)
    write_probe(run.path, ids, log_probs_in_float32(policy, ids))
    write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    means = [row["reward"] for row in rows if "reward" in row]
    run.record(
        steps=number * job.facts.steps_per_batch,
        **_facts(job, recipe, policy, len(files)),
        fingerprint={"base": answering_fingerprint(policy), "adapter": sha256_of(run.adapter / WEIGHTS)},
        reload_difference=difference,
        reward={"first": means[0], "last": means[-1]} if means else {},
    )
    return Imported(run, number, len(rows), round(sum(row.get("step_time", 0.0) for row in rows), 3))


def load_trained(job: Job, actor: Path, model: PreTrainedModel) -> PeftModel:
    """Puts what verl trained on the base.

    Args:
        job: The job.
        actor: Folder of the step's policy.
        model: The base, in any type.

    Raises:
        ModelError: The base is another than the job's, or the checkpoint holds another adapter than the recipe makes,
            one that is not trained, or non-finite numbers.
        RunFolderError: A file cannot be read.
    """
    expected = job.facts.base_fingerprint
    if expected is not None and not is_the_base(model, expected, "float32"):
        what = f"the job was made for other weights of {job.facts.base} (SHA-256 {expected[:12]})"
        raise ModelError(what, "model.name", "load the revision that the job's recipe names")
    peft = job.recipe.peft
    if peft.adapter is None:
        policy = attach_adapter(model, adaptation(peft))
    else:
        saved = find_adapter(str(job.path / ADAPTER))
        policy = continue_adapter(model, saved, continued_adaptation(peft, saved.config, own_method(saved)))
    begun, trained = adapter_tensors(policy), read_shards(actor)
    _check(begun, trained, actor)
    load_adapter_tensors(policy, trained)
    return policy.eval()


def _check(begun: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], actor: Path) -> None:
    """What was trained must be the recipe's adapter, finite, and have moved."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (begun, trained)]
    different = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
    if different:
        name = different[0]
        what = f"holds another adapter than the recipe makes: {len(different)} tensors differ, {name} is "
        what += f"{shapes[1].get(name, 'absent')} there, {shapes[0].get(name, 'absent')} here"
        raise ModelError(what, str(actor), "another rank, or other target modules?")
    for name, tensor in trained.items():
        if wrong := int((~torch.isfinite(tensor)).sum()):
            what = f"{wrong:,} of {tensor.numel():,} numbers of {name} are non-finite"
            raise ModelError(what, str(actor), "import an earlier step")
    # The second factor of a new LoRA is 0, that of one that is continued what it was.
    second = [name for name in begun if _SECOND_FACTOR.search(name)]
    if second and all(torch.equal(begun[name], trained[name].to(begun[name].dtype)) for name in second):
        what = "nothing was trained: every lora_B is as it began"
        raise ModelError(what, str(actor), "look at the rewards in verl's log: were all of a group's alike?")


def _facts(job: Job, recipe: Recipe, policy: PeftModel, processes: int) -> dict[str, Any]:
    """What is known of the training: what the recipe asked for, and who carried it out; nothing of this machine."""
    base, revision = base_identity(policy)
    row = ALGORITHMS.get(recipe.algorithm or "")
    version, strategy = job.facts.verl_version, job.facts.strategy
    by = {"program": "verl", "version": version, "strategy": strategy, "processes": processes}
    method = METHODS.get(recipe.peft.method)
    rate = recipe.train.get("learning_rate") or (method.learning_rate if method else None)
    if recipe.peft.adapter is None:
        asked = resolved_settings(recipe.peft)
    else:  # it has its settings from the one before
        config: Any = policy.peft_config[policy.active_adapter]
        targets = sorted(config.target_modules) if isinstance(config.target_modules, set) else config.target_modules
        asked = {"continues": recipe.peft.adapter, "rank": config.r, "alpha": config.lora_alpha}
        asked["target_modules"] = targets
    settings = {  # by the names that cards know
        **asked,
        **({"learning rate": f"{rate:g}"} if rate is not None else {}),
        "KL coefficient (beta)": _asked(recipe, "beta"),
        "sampling": f"temperature {recipe.rollout.temperature:g}, "
        f"at most {recipe.rollout.max_completion_length} tokens",
        "trained by": f"verl {version}, {strategy} on {processes} processes",
    }
    return {
        "trained_by": {**by, "rollout": job.facts.rollout},
        "versions": {"perl-rl": installed_versions()["perl-rl"], "verl": version},
        "base": base,
        "revision": revision,
        "quantization": None,
        "base_dtype": base_dtype(policy),
        "repo_id": recipe.hub.repo_id,
        "method": recipe.peft.method if recipe.peft.adapter is None else method_of(policy.active_peft_config).name,
        "seed": _asked(recipe, "seed"),
        "trainable_parameters": trainable_parameters(policy),
        "total_parameters": total_parameters(policy),
        "settings": settings,
        "loss": _asked(recipe, "loss_type"),
        "ratio_level": _asked(recipe, "importance_sampling_level"),
        **({KEY: row.name, "overridden": row.overridden(recipe.train)} if row is not None else {}),
        "rewards": _weights(recipe),
        **({"planned_steps": recipe.train["max_steps"]} if "max_steps" in recipe.train else {}),
    }


def _asked(recipe: Recipe, name: str) -> Any:  # noqa: ANN401 (of any argument)
    """What the recipe has for a field of the trainer, else the field's default."""
    return recipe.train.get(name, train_fields()[name].default)


def _weights(recipe: Recipe) -> dict[str, float]:
    """Rewards by the names that a run has for them -> weight."""
    return {name.rpartition(":")[2]: float(setting.weight) for name, setting in recipe.rewards.items()}


def rows_of_logs(
    paths: Sequence[Path], step: int, rewards: Mapping[str, float], steps_per_batch: int = 1
) -> list[dict[str, Any]]:
    """The steps of verl's logs up to one; of a step that was logged twice the later row.

    A step of verl is a batch of rollouts. Its row is that of the first optimizer step on them, as in our runs.

    Args:
        paths: verl's files, in order; no rows where there are none.
        step: The last that counts, of verl's.
        rewards: Name -> weight; a reward that is alone has its mean from the weighted sum, which is all that verl logs.
        steps_per_batch: Optimizer steps of one of verl's.

    Raises:
        RunFolderError: None of a file's lines is verl's.
    """
    logged: dict[int, dict[str, float]] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        found = dict(logged_in(text))
        if text.strip() and not found:
            raise RunFolderError("is malformed: none of its lines is of verl's file logger", str(path))
        logged |= found
    rows, tokens = [], 0.0
    for number in sorted(number for number in logged if 0 < number <= step):  # step 0 is verl's validation before
        data = logged[number]
        tokens += data.get(_TOKENS, 0.0)
        first = (number - 1) * steps_per_batch + 1
        row: dict[str, Any] = {"step": first}
        row |= {NAMES.get(name, _PREFIX + name): value for name, value in data.items() if name != _TOKENS}
        if "loss" not in row and _PREFIX + _SURROGATE in row:
            row["loss"] = row.pop(_PREFIX + _SURROGATE)
        if "rollout/seconds" in row:  # ours hold the policy's way to the engine
            row["rollout/seconds"] += row.get("sync/seconds", 0.0)
        for name, weight in rewards.items() if len(rewards) == 1 and "reward" in row else ():
            row |= {f"rewards/{name}/mean": row["reward"] / weight} if weight else {}
        rows.append(row | ({"num_tokens": tokens} if _TOKENS in data else {}))
    return rows


def logged_in(text: str) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and numbers of each line; nothing of a line that a kill cut short."""
    for line in text.splitlines():
        try:
            found = json.loads(line)
            step, data = int(found["step"]), found["data"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield step, {name: float(value) for name, value in data if type(value) in (int, float) and math.isfinite(value)}
