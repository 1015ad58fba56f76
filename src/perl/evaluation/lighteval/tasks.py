"""Our tasks as lighteval's: configurations with the same prompt and gold, rows as its own prompt functions read them.

Task -> LightevalTaskConfig; Task, row -> row

Imports lighteval's tasks and metrics but not its pipeline, which would switch autograd off.
"""

import contextlib
import dataclasses
import importlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

from perl.evaluation.choices import LETTERS
from perl.evaluation.task import Task
from perl.evaluation.task_data import load_task_data, question_of
from perl.sandbox import PREFIX, is_sandbox

_DIGITS = 12
# Where lighteval 0.13 defines the tasks that we ask as it does.
_MODULES = {"aime24": "aime", "aime25": "aime", "math_500": "math_500", "gsm8k": "gsm8k"}


def tasks_table(tasks: Sequence[Task]) -> list[LightevalTaskConfig]:
    """The ``TASKS_TABLE`` of a task module: our own ways of asking; lighteval refuses names that it has itself.

    Problems of the sandbox, which no Hub has, are written into a folder where lighteval finds them.
    """
    own = [(task, _own_config(task)) for task in tasks if task.lighteval is None]
    return [
        dataclasses.replace(config, hf_repo=str(_sandbox_folder(task))) if is_sandbox(task.repository) else config
        for task, config in own
    ]


def _sandbox_folder(task: Task) -> Path:
    """A folder with the task's problems as a data set, in the cache of ``datasets``; written once."""
    data = load_task_data(task)
    place = Path(datasets.config.HF_DATASETS_CACHE) / "perl-sandbox" / data.sha256[:_DIGITS]
    folder = place / task.repository.replace(PREFIX, "")
    if not folder.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as written:
            rows = datasets.Dataset.from_list([dict(question.row) for question in data.questions])
            whole = Path(written) / "whole" / "data"
            whole.mkdir(parents=True)
            rows.to_parquet(whole / f"{task.split}-00000-of-00001.parquet")
            with contextlib.suppress(OSError):  # another process was first
                whole.parent.rename(folder)
    return folder


def lighteval_config(task: Task) -> LightevalTaskConfig:
    """The definition of lighteval itself where the task is one, else ours."""
    if task.lighteval is None:
        return _own_config(task)
    return getattr(importlib.import_module(f"lighteval.tasks.tasks.{_MODULES[task.lighteval]}"), task.lighteval)


def lighteval_row(task: Task, row: Mapping[str, Any]) -> dict[str, Any]:
    r"""A row as the prompt function of :func:`lighteval_config` reads it.

    Where local data lacks what the Hub's has, it is put together: the solution of MATH-500 from its answer, as
    ``\boxed{answer}``, and the answer of GSM8K from solution and number.
    """
    if task.lighteval is None:
        return dict(row)
    question = question_of(task, row, "")
    problem = next(row[name] for name in task.problem if name in row)
    answer = str(next(row[name] for name in task.answer if name in row))
    solution = row.get("solution")
    if task.lighteval == "gsm8k" and "####" not in answer:
        answer = f"{solution or ''}\n#### {answer}"
    return {
        "problem": problem,
        "question": problem,
        "answer": answer,
        "solution": solution or f"\\boxed{{{question.gold}}}",
    }


def _own_config(task: Task) -> LightevalTaskConfig:
    letters = bool(task.choices)
    pass_at_k = Metrics.gpqa_instruct_pass_at_k if letters else Metrics.pass_at_k_math
    metrics = [pass_at_k(sample_params={"k": 1, "n": 1})]
    if not letters:
        metrics.append(Metrics.avg_at_n_math(sample_params={"n": 1}))

    def prompt(line: Mapping[str, Any], task_name: str | None = None) -> Doc:
        question = question_of(task, line, "")
        # In a box, since lighteval reads few formulas without one.
        choices = list(LETTERS[: len(task.choices)]) if letters else [f"\\boxed{{{question.gold}}}"]
        place = LETTERS.index(question.gold) if letters else 0
        named = next((str(line[name]) for name in task.identifier if line.get(name) not in (None, "")), None)
        identifier = line.get("__index", "") if named is None else named
        specific = {"perl_problem": str(identifier)}
        return Doc(task_name=task_name, query=question.text, choices=choices, gold_index=place, specific=specific)

    return LightevalTaskConfig(
        name=task.name,
        prompt_function=prompt,
        # The sandbox is on no Hub; with a folder in between the name is a path, not the address of another protocol.
        hf_repo=task.repository.replace(PREFIX, "sandbox/"),
        hf_subset=task.subset or "default",
        hf_revision=task.revision,
        hf_avail_splits=[task.split],
        evaluation_splits=[task.split],
        generation_size=task.max_new_tokens,
        stop_sequence=list(task.stop),
        metrics=metrics,
        version=task.version,
    )
