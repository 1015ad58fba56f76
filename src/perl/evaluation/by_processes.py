"""An evaluation by several processes of this machine: the command line of each, how they start and find each other.

request -> arguments of ``perl eval`` -> processes that share the completions, the same ones in the same folder
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from perl.errors import PerlError
from perl.evaluation.output_folder import usable
from perl.evaluation.questions import PreparedTask, prompts_hash
from perl.evaluation.request import EvalSettings, Evaluation
from perl.launch.agreement import check_machine, processes_here
from perl.launch.start import check_processes, start
from perl.launch.together import together
from perl.recipe.recipe import is_first_process, launched, world_size
from perl.recipe.sections import EngineSection
from perl.run.folder import differences
from perl.run.joint_work import Processes, joining

_GOES_ON = "the same command goes on"
_THE_SAME = "all processes must run the same"
# Packages that a sample or its verdict depends on, beside those of a run.
_PACKAGES = ("math-verify", "vllm")
# Settings that are switched off by an option of another name.
_OFF = {
    "with_base": "--no-base",
    "base_cache": "--no-base-cache",
    "lighteval": "--no-lighteval",
    "thinking": "--no-thinking",
}


def to_start(processes: int | None) -> int:
    """How many processes must be started for this: 0 where a launcher has done so, or this one suffices.

    Args:
        processes: Asked for; None: whatever there is.

    Raises:
        PerlError: A launcher has started another number.
    """
    if not launched():
        return processes if processes is not None and processes > 1 else 0
    if processes not in (None, world_size()):
        what = f"{world_size()} processes were started, and {processes} are asked for"
        raise PerlError(what, "--processes", "leave it out: the launcher says how many there are")
    return 0


def start_several(plans: Sequence[Evaluation], arguments: Sequence[str], processes: int) -> int:
    """Has several processes do what was planned.

    Args:
        plans: Of these arguments.
        arguments: Of ``perl eval``, from :func:`arguments_of`.
        processes: How many.

    Returns:
        The exit code; see :func:`perl.launch.start.start`.

    Raises:
        PerlError: There are not as many GPUs, or a process has failed.
    """
    _check_spread(plans[0], processes)
    try:
        check_processes(_engine_of(plans[0], processes))
    except PerlError as error:
        raise error.moved(lambda _: "--processes") from None
    return start(["eval", *arguments], processes, plans[0].folder, lambda: _GOES_ON)


@contextmanager
def sharing(plans: Sequence[Evaluation]) -> Iterator[Processes]:
    """The processes that a launcher has started, this one among them; they end together.

    Before weights are loaded they are compared: each must have planned the same, with the same versions, and see the
    output folders of the main process.

    Args:
        plans: Of this process.

    Raises:
        RecipeError: A process has planned something else; the line names it.
        RunFolderError: A process has another folder; likewise.
        PerlError: One of them has failed, or ended.
    """
    with together() as group:
        group.on_loss(lambda: _GOES_ON)
        if group.meeting is not None:
            _check_spread(plans[0], world_size())
            _check_gpus(plans[0])
            each = {f"{number} {plan.subject.name}": _settings(plan) for number, plan in enumerate(plans, 1)}
            group.compare(each if len(plans) > 1 else _settings(plans[0]), "evaluation", _PACKAGES)
            for plan in plans:
                with usable(plan.folder):
                    if is_first_process():
                        plan.folder.mkdir(parents=True, exist_ok=True)
                    group.find(plan.folder)
        with joining(on_cpu=plans[0].device.type == "cpu") as processes:
            yield processes


def check_same(processes: Processes, facts: Mapping[str, Any]) -> None:
    """Compares what the processes would draw, once weights are loaded and before anything is drawn.

    Args:
        processes: All of which call this at once, where they fail together.
        facts: What this process's samples depend on.

    Raises:
        PerlError: On the main process: another one differs; the line names it.
    """
    for rank, theirs in enumerate(processes.collected(dict(facts))):
        found = differences(facts, theirs)
        if found:
            what = f"rank {rank} would draw samples of another policy than rank 0: {'; '.join(found[:3])}"
            raise PerlError(what, "launcher", _THE_SAME)


def _check_spread(plan: Evaluation, processes: int) -> None:
    if plan.settings.device_map is not None and processes > 1:
        what = f"spreads the base over all GPUs, of which each of {processes} processes has one"
        raise PerlError(what, "--device-map", "leave out one of the two")


def _check_gpus(plan: Evaluation) -> None:
    try:
        check_machine(_engine_of(plan), processes_here())
    except PerlError as error:
        raise error.moved(lambda _: "--processes") from None


def _engine_of(plan: Evaluation, processes: int | None = None) -> EngineSection:
    return EngineSection(device="cpu" if plan.device.type == "cpu" else "auto", processes=processes)


def _settings(plan: Evaluation) -> dict[str, Any]:
    """What each process must have planned alike, found before weights are loaded."""
    subject, protocol = plan.subject, plan.protocol
    return {
        "adapter_sha256": subject.adapter_sha256,
        "config_sha256": subject.config_sha256,
        "base": subject.base.model_dump(mode="json", include={"revision", "dtype", "quantization"}),
        "with_base": plan.settings.with_base,
        "protocol": {**protocol.drawn(), "k": protocol.k, "seed": protocol.seed},
        "template": plan.template,
        "tasks": {task.request.task: _facts_of(task) for task in plan.tasks},
        "engine": plan.engine.backend,
        "device": plan.device.type,
        "batch_size": plan.settings.batch_size,
        "predict_only": plan.settings.predict_only,
        "attention": subject.base.attn_implementation,
    }


def _facts_of(task: PreparedTask) -> dict[str, Any]:
    request = task.request
    return {
        "data": task.data.sha256,
        "problems": len(request.asked),
        "prompts": prompts_hash(request),
        "max_new_tokens": request.max_new_tokens,
        "stop": list(request.stop),
        "ends": list(request.end_token_ids),
        "scorer": request.scorer.label,
    }


def arguments_of(
    adapters: Sequence[str],
    base: str | None,
    tasks: Sequence[str],
    k: int | None,
    data: str | Path | None,
    output: str | Path | None,
    settings: EvalSettings,
) -> list[str]:
    """What ``perl eval`` is told for the same evaluation; see :func:`perl.evaluation.evaluate.evaluate`."""
    named = {"base": base, "tasks": ",".join(tasks), "k": k, "data": data, "output": output}
    found = [f"--adapter={adapter}" for adapter in adapters]
    found += [f"--{name}={value}" for name, value in named.items() if value is not None]
    for setting in fields(EvalSettings):
        value = getattr(settings, setting.name)
        if value != setting.default:
            found += _option(setting.name, value)
    return found


def _option(name: str, value: Any) -> list[str]:  # noqa: ANN401 (whatever a setting is)
    """A setting as it is typed."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option if value else _OFF[name]]
    if name == "servers":
        return [f"--server={server}" for server in value]
    if name == "pass_at":
        value = ",".join(map(str, value))
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={part}" for key, part in value.items())
    return [f"{option}={value}"]
