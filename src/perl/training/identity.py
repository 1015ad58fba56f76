"""What a run is: its base, its settings and what they are expected to cost, as ``run.json`` has them.

Plan, base -> facts of the run
"""

from contextlib import suppress
from typing import Any

from transformers import PreTrainedModel

from perl.algorithms.named import named_facts
from perl.errors import (
    PerlError,
    RunFolderError,
)
from perl.policy.model import (
    answering_fingerprint,
    base_dtype,
    base_identity,
    source_fingerprint,
)
from perl.policy.quantised import quantisation_of
from perl.policy.teacher import teacher_settings
from perl.recipe.recipe import is_first_process
from perl.run.devices import processor_name
from perl.run.folder import Run
from perl.trainer.shown_settings import shown_algorithm
from perl.training.forecast import forecast_of
from perl.training.forecast_text import forecast_lines
from perl.training.plan import Plan


def record_identity(plan: Plan, model: PreTrainedModel, run: Run) -> None:
    """Records what the run is, before it trains.

    Raises:
        RunFolderError: The run was started with other weights of the base.
    """
    base, revision = base_identity(model)
    fingerprint, source = answering_fingerprint(model), source_fingerprint(model)
    known, dtype = run.facts.get("fingerprint", {}).get("base", fingerprint), base_dtype(model)
    if known != fingerprint:
        raise _other_weights(plan, run, dtype)
    fingerprints = {"base": fingerprint} | ({"source": source} if source not in (None, fingerprint) else {})
    run.record(
        base=base,
        revision=revision,
        quantization=quantisation_of(model),
        base_dtype=dtype,
        repo_id=plan.recipe.hub.repo_id,
        method=plan.method.name,
        seed=plan.arguments.seed,
        trainable_parameters=plan.trainable_parameters,
        total_parameters=plan.total_parameters,
        fingerprint={**run.facts.get("fingerprint", {}), **fingerprints},
        settings=_settings(plan),
        loss=plan.arguments.loss_type,
        ratio_level=plan.arguments.importance_sampling_level,
        **named_facts(plan.arguments),
        rewards={reward.name: reward.weight for reward in plan.rewards},
        data={"train": plan.problems.train_version, "eval": plan.problems.heldout_version},
        hardware={"device": processor_name(plan.arguments.device), "count": plan.arguments.world_size},
        planned_steps=plan.steps,
        forecast=_forecast_lines(plan),
    )


def _forecast_lines(plan: Plan) -> list[str]:
    """What ``perl plan`` says of the run on what is here, for who looks at it later; nothing where it cannot tell."""
    if not is_first_process():
        return []
    # A run does not end for want of an estimate, as of a model that is built like none that we know.
    with suppress(PerlError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return list(forecast_lines(forecast_of(plan)))
    return []


def _other_weights(plan: Plan, run: Run, dtype: str) -> RunFolderError:
    """Why a run cannot go on with the base that was loaded; ``dtype: auto`` depends on the device."""
    what = f"was started with other weights of {plan.recipe.model.name}"
    then = run.facts.get("base_dtype", dtype)
    if then == dtype:
        return RunFolderError(what, str(run.path), "choose another with --output")
    hint = f"model.dtype={then}, or choose another with --output"
    return RunFolderError(f"{what}: they were loaded in {then}, here in {dtype}", str(run.path), hint)


def _settings(plan: Plan) -> dict[str, Any]:
    """The run's settings, for a person to read."""
    recipe, arguments = plan.recipe, plan.arguments
    quantization = recipe.model.quantization
    return {
        **plan.settings,
        **({"base loaded as": quantization} if quantization is not None else {}),
        **(teacher_settings(recipe.teacher, plan.teacher) if recipe.teacher.acts else {}),
        **({"prompts": recipe.prompts.shown} if recipe.prompts.acts else {}),
        "optimizer": arguments.optim.value,
        "learning rate": f"{arguments.learning_rate:g}",
        "KL coefficient (beta)": arguments.beta,
        **shown_algorithm(arguments, plan.method),
        "batch": str(recipe.batch),
        "sampling": f"temperature {arguments.temperature:g}, at most {arguments.max_completion_length} tokens",
    }


def run_title(run: Run) -> str:
    """Over its pictures."""
    return f"{run.path.name}: {run.facts['method']} on {run.facts['base']}"
