"""lighteval's own score of completions that are already there, computed by lighteval in a process of its own.

tasks, texts -> request -> :mod:`perl.evaluation.lighteval.process` -> LightevalScore

A process of its own because importing lighteval's pipeline switches autograd off, its time limits need a main thread
and it has to be patched. It never asks a network.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.errors import EXIT_FAILED, MissingExtraError, PerlError, missing_extra
from perl.evaluation.task import TaskData

REQUEST, ANSWER, CACHE = "request.json", "answer.json", "cache"


class LightevalError(PerlError):
    """lighteval failed on completions that are there: our own score stands, lighteval's is missing; exit 1."""

    code = "PRL213"
    exit_code = EXIT_FAILED


@dataclass(frozen=True)
class LightevalScore:
    """What lighteval says of the completions of one task.

    Attributes:
        metrics: lighteval's names and values, as ``avg@n:n=4``, ``pass@k:k=1&n=4``, and from two problems on
            each with ``_stderr``.
        right: Its verdicts, one row a problem, one entry a completion.
        results: Its results file as it wrote it.
    """

    metrics: dict[str, float]
    right: tuple[tuple[bool, ...], ...]
    results: dict[str, Any]


def lighteval_installed() -> bool:
    """Whether lighteval can be found; imports nothing."""
    return importlib.util.find_spec("lighteval") is not None


def score_with_lighteval(
    data: Sequence[TaskData], texts: Mapping[str, Sequence[Sequence[str]]], model_name: str
) -> dict[str, LightevalScore]:
    """Lets lighteval judge completions with its own tasks, prompts, golds and metrics.

    It sees them without their reasoning: lighteval removes what stands between ``<think>`` and ``</think>`` for pass@k
    but forgets to for avg@n, so its own function is applied before either. Unlike ours it leaves reasoning that was
    never closed, or never opened because the prompt opened it.

    Args:
        data: The tasks and the questions that were asked.
        texts: Task -> question -> completion, questions in the order of ``data``, equally many completions each.
        model_name: As results name it.

    Returns:
        Task -> score.

    Raises:
        ValueError: The texts do not belong to the questions.
        MissingExtraError: lighteval is not installed.
        LightevalError: lighteval failed.
    """
    _check_shape(data, texts)
    if not lighteval_installed():
        missing = missing_extra("lighteval", "eval", "lighteval's own score")
        raise MissingExtraError(missing.message, hint=missing.hint)
    request = {
        "model": model_name,
        "tasks": [
            {"name": one.task.name, "rows": _rows(one), "texts": [list(row) for row in texts[one.task.name]]}
            for one in data
        ],
    }
    with tempfile.TemporaryDirectory(prefix="perl-lighteval-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        _run(folder)
        answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    return {
        task: LightevalScore(one["metrics"], tuple(tuple(row) for row in one["right"]), one["results"])
        for task, one in answer.items()
    }


def _check_shape(data: Sequence[TaskData], texts: Mapping[str, Sequence[Sequence[str]]]) -> None:
    for one in data:
        name, rows = one.task.name, texts[one.task.name]
        if len(rows) != len(one.questions):
            raise ValueError(f"{name} has {len(one.questions)} questions but completions of {len(rows)}")
        if len({len(row) for row in rows}) != 1 or not rows[0]:
            raise ValueError(f"every question of {name} needs equally many completions, one at least")


def _rows(data: TaskData) -> list[dict[str, Any]]:
    """The columns that a task reads; others may hold what JSON cannot."""
    task = data.task
    columns = {*task.problem, *task.answer, *task.choices, "solution"}
    return [{name: cell for name, cell in question.row.items() if name in columns} for question in data.questions]


def _run(folder: Path) -> None:
    """Runs the process in a folder; it ends by itself when this process does, since its standard input then closes."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / CACHE),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
    }
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "perl.evaluation.lighteval.process"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
        )
        try:
            status = process.wait()
        finally:
            process.kill()
            process.communicate()
        if status != 0:
            stderr.seek(0)
            output = stderr.read()
            sys.stderr.write(output)
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            raise LightevalError(f"lighteval's process ended with {status}: {last}", "lighteval")
