"""Adapters beside their base on benchmark tasks: the stages of ``perl eval``, called in order.

adapters, tasks, settings -> Results, and a folder: results.json, samples.jsonl, table.md, problems.png

Whatever is wrong with the request is found before weights are loaded; an evaluation that was stopped goes on.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import torch
from filelock import FileLock

from perl.errors import PerlError, warn
from perl.evaluation.comparing.evaluations import compare_adapters
from perl.evaluation.comparing.text import as_markdown
from perl.evaluation.drawing.drawn_samples import draw_samples
from perl.evaluation.drawing.policies import BaseInMemory, Policies
from perl.evaluation.drawing.request import Evaluation, naming_options, plan_adapters
from perl.evaluation.drawing.settings import EvalSettings, checked_arguments, names_of
from perl.evaluation.reporting import write_found
from perl.evaluation.scoring.found_results import usable
from perl.evaluation.scoring.results import SAMPLES, TABLE, Results
from perl.evaluation.scoring.samples import SampleFile
from perl.evaluation.scoring.task import DEFAULT_TASKS
from perl.run.devices import threads_kept, use_threads
from perl.run.files import write_text
from perl.run.joint_work import Processes

logger = logging.getLogger("perl")

_ARGUMENTS = {
    "adapter": str | tuple[str, ...] | None,
    "base": str | None,
    "tasks": str | tuple[str, ...],
    "k": int | None,
    "data": str | None,
    "output": str | None,
}


@overload
def evaluate(
    adapter: str | Path | None = None,
    base: str | Path | None = None,
    tasks: str | Path | Sequence[str | Path] = DEFAULT_TASKS,
    k: int | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
    settings: EvalSettings | None = None,
) -> Results: ...


@overload
def evaluate(
    adapter: list[str | Path] | tuple[str | Path, ...],
    base: str | Path | None = None,
    tasks: str | Path | Sequence[str | Path] = DEFAULT_TASKS,
    k: int | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
    settings: EvalSettings | None = None,
) -> list[Results]: ...


def evaluate(
    adapter: str | Path | list[str | Path] | tuple[str | Path, ...] | None = None,
    base: str | Path | None = None,
    tasks: str | Path | Sequence[str | Path] = DEFAULT_TASKS,
    k: int | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
    settings: EvalSettings | None = None,
) -> Results | list[Results]:
    """Scores adapters on benchmark tasks, and their base beside them under the same protocol.

    Args:
        adapter: A run folder, a checkpoint or an adapter's folder, or a Hub id with an optional ``@revision``; None:
            the base alone. A list of these: each is scored, each base is drawn once, and a list of results comes back.
        base: Hub id with an optional ``@revision``, or folder; None: the one that the adapter names.
        tasks: As ``--tasks`` takes them: names from ``perl eval --list-tasks``, data files, ``my_tasks.py[:NAME]``, and
            recipes, whose held-out problems are asked; ``heldout``: those of the adapter's run. A single one needs no
            list.
        k: Completions a problem; None: the preset's.
        data: Folder with the tasks' data as JSON lines; None: the Hub.
        output: Folder for the results, in which an evaluation that was stopped goes on and other tasks are added; of
            several adapters each has a folder of its name in it. None: ``RUN/evals/PRESET`` for a run, else
            ``evals/NAME/PRESET``.
        settings: Everything else.

    Raises:
        PerlError: The request cannot be done; nothing was started.
        RolloutError: No server answers any more; when one does, the same call goes on.
        BrokenPromiseError: The engine does not answer like the policy.
    """
    given = {"adapter": adapter, "base": base, "tasks": tasks, "k": k, "data": data, "output": output}
    call = checked_arguments("perl.evaluate", given, _ARGUMENTS)
    settings = EvalSettings() if settings is None else settings
    if not isinstance(settings, EvalSettings):
        raise PerlError(f"must be EvalSettings(...), not {settings!r:.60}", "perl.evaluate(settings)")
    several = isinstance(call["adapter"], tuple)
    if several and not call["adapter"]:
        raise PerlError("an empty list names no adapter", "adapter", "or None and a base")
    adapters = names_of(call["adapter"]) if adapter is not None else []
    asked = names_of(call["tasks"]), call["k"], call["data"], call["output"]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # an adapter draws before it is filled
        found = carry_out_all(plan_adapters(adapters, call["base"], *asked, settings))
    return found if several else found[0]


def carry_out_all(plans: Sequence[Evaluation], processes: Processes | None = None) -> list[Results]:
    """Does what was planned for each adapter, each base loaded once; see :func:`carry_out`.

    Args:
        plans: From :func:`perl.evaluation.drawing.request.plan_adapters`.
        processes: That share the work; None: this one does it alone.

    Returns:
        In the order of the plans. A folder that holds all of theirs has the table of all adapters too.
    """
    bases = BaseInMemory(kept=len(plans) > 1)
    bases_of = [plan.subject.base for plan in plans]
    by_base = sorted(range(len(plans)), key=lambda i: bases_of.index(bases_of[i]))
    done = {i: carry_out(plans[i], processes=processes, bases=bases) for i in by_base}
    found = [done[i] for i in range(len(plans))]
    above = {plan.folder.parent for plan in plans}
    scored = not any(plan.settings.predict_only for plan in plans)
    if len(plans) > 1 and len(above) == 1 and scored and (processes is None or processes.main):
        write_text(above.pop() / TABLE, as_markdown(compare_adapters(found)))
    return found


def carry_out(
    plan: Evaluation,
    policies: Policies | None = None,
    processes: Processes | None = None,
    bases: BaseInMemory | None = None,
) -> Results:
    """Does what was planned.

    Args:
        plan: From :func:`perl.evaluation.drawing.request.plan_evaluation`, or a run's.
        policies: Base and trained policy, where they are in memory already; None: they are loaded.
        processes: That share the work, all of which call this at once with the same plan; None: this one does it alone.
        bases: Loads them, and may have the base from an adapter before; None: all is loaded.

    Returns:
        What was written into ``plan.folder``; tasks have no score where completions were only drawn.

    Raises:
        PerlError: As :func:`evaluate`.
    """
    started, processes = time.monotonic(), processes or Processes()
    with processes.failing_together(), _locked(plan.folder, processes), threads_kept():
        if plan.threads is not None:
            use_threads(plan.threads)
        for line in plan.lines() if processes.main and not plan.within_run else ():
            logger.info("%s", line)
        if policies is None:
            with naming_options():
                policies = (bases or BaseInMemory()).policies(plan.subject, plan.device, plan.settings.device_map)
        samples = SampleFile(plan.folder / SAMPLES)
        broken = samples.unreadable() if processes.main else 0
        if broken:
            warn("PRL303", "%s: %d malformed lines are left out", samples.path, broken)
        drawn = draw_samples(plan, policies, processes)
        return processes.by_main(lambda: write_found(plan, policies, drawn, time.monotonic() - started))


@contextmanager
def _locked(folder: Path, processes: Processes) -> Iterator[None]:
    """The folder, made and held by the main process alone."""
    lock = FileLock(folder / ".lock", timeout=0)
    if processes.main:
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    try:
        processes.meet()
        yield
    finally:
        lock.release()
