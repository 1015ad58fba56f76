"""An evaluation by several processes of this machine: how they start, and that they were asked for the same.

Evaluation -> processes that share the completions, the same ones in the same folder
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from perl.errors import PerlError
from perl.evaluation.drawing.request import Evaluation
from perl.evaluation.scoring.found_results import usable
from perl.launch.meeting import check_machine, processes_here
from perl.launch.start import start
from perl.launch.together import together
from perl.recipe.recipe import is_first_process, launched, world_size
from perl.recipe.sections import EngineSection
from perl.run.folder import differences
from perl.run.joint_work import Processes, joining

_GOES_ON = "the same command goes on"
# Packages that a sample or its verdict depends on, beside those of a run.
_PACKAGES = ("math-verify", "vllm")


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


def start_several(plan: Evaluation, arguments: Sequence[str], processes: int) -> int:
    """Has several processes do what was planned.

    Args:
        plan: The first one of these arguments.
        arguments: Of the command line.
        processes: How many.

    Returns:
        The exit code; see :func:`perl.launch.start.start`.

    Raises:
        PerlError: There are not as many GPUs, or a process has failed.
    """
    _check_machine(plan, processes, processes)
    return start(arguments, processes, plan.folder, lambda: _GOES_ON)


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
        if group.watch is not None:
            _check_machine(plans[0], world_size(), processes_here())
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
        if found := differences(facts, theirs):
            what = f"rank {rank} would draw samples of another policy than rank 0: {'; '.join(found[:3])}"
            raise PerlError(what, "launcher", "all processes must run the same")


def _check_machine(plan: Evaluation, processes: int, here: int) -> None:
    """Refuses more processes than there are GPUs here, and several of a base that is spread over all of them."""
    if plan.settings.device_map is not None and processes > 1:
        what = f"spreads the base over all GPUs, of which each of {processes} processes has one"
        raise PerlError(what, "--device-map", "leave out one of the two")
    try:
        check_machine(EngineSection(device="cpu" if plan.device.type == "cpu" else "auto"), here)
    except PerlError as error:
        raise error.moved(lambda _: "--processes") from None


def _settings(plan: Evaluation) -> dict[str, Any]:
    """What each process must have planned alike; the samples' keys are compared once weights are loaded."""
    subject = plan.subject
    return {
        "adapter_sha256": subject.adapter_sha256,
        "config_sha256": subject.config_sha256,
        "base": subject.base.model_dump(mode="json", include={"revision", "dtype", "quantization"}),
        "protocol": asdict(plan.protocol),
        "settings": asdict(plan.settings),
        "tasks": {task.request.task: [task.protocol_hash, len(task.request.asked)] for task in plan.tasks},
    }
