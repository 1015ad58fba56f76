"""lighteval's own verdicts on completions that are already there, given in a process of its own.

tasks, texts -> :mod:`perl.evaluation.lighteval.process` -> verdicts
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.errors import PerlError
from perl.evaluation.task import TaskData


def lighteval_installed() -> bool:
    """Whether lighteval can be found; imports nothing."""
    return importlib.util.find_spec("lighteval") is not None


def judge_with_lighteval(
    data: Sequence[TaskData], texts: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, list[list[bool]]]:
    """Has lighteval judge completions of its own tasks, with its prompts, golds and metrics; asks no network.

    It sees them without their reasoning. Unlike us it leaves reasoning that was never closed, or never opened because
    the prompt opened it.

    Args:
        data: The tasks, each one of lighteval's, and the questions that were asked.
        texts: Task -> question -> completion, questions in the order of ``data``.

    Returns:
        Task -> question -> whether each completion is right.

    Raises:
        PerlError: lighteval failed.
    """
    request = json.dumps({one.task.name: (_rows(one), texts[one.task.name]) for one in data})
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
    }
    command = [sys.executable, "-P", "-m", "perl.evaluation.lighteval.process"]
    done = subprocess.run(command, input=request, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 (ourselves)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise PerlError(f"lighteval's process ended with {done.returncode}: {last}", "lighteval")
    found: dict[str, list[list[bool]]] = json.loads(done.stdout)
    return found


def _rows(data: TaskData) -> list[dict[str, Any]]:
    """The columns that a task reads; others may hold what JSON cannot."""
    columns = {*data.task.problem, *data.task.answer, "solution"}
    return [{name: cell for name, cell in question.row.items() if name in columns} for question in data.questions]
