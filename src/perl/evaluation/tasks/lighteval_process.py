"""lighteval's verdicts on completions of its own tasks, by its prompt functions, golds and metrics.

rows, completions as JSON on standard input -> Doc -> the metric of lighteval's task -> verdicts as JSON

Runs in a process of its own, started by :mod:`perl.evaluation.reporting`: the time limits of lighteval's metrics
need a main thread, and what its import changes stays here.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lighteval.metrics.metrics_sample import PassAtK, SamplingMetric
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.utils.utils import remove_reasoning_tags

from perl.evaluation.scoring.task import Task, all_tasks
from perl.evaluation.tasks.task_data import question_of
from perl.rewards.answers import REASONING_END, REASONING_START

# Where lighteval 0.13 defines the tasks that we ask as it does.
_MODULES = {"aime24": "aime", "aime25": "aime", "math_500": "math_500", "gsm8k": "gsm8k"}


def main() -> None:
    """Judges what standard input asks."""
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # whatever lighteval says
        answer = {name: verdicts(all_tasks()[name], *asked) for name, asked in request.items()}
    json.dump(answer, sys.stdout)


def lighteval_config(task: Task) -> LightevalTaskConfig:
    """Lighteval's own definition of a task that bears its name."""
    module = importlib.import_module(f"lighteval.tasks.tasks.{_MODULES[str(task.lighteval)]}")
    config: LightevalTaskConfig = getattr(module, str(task.lighteval))
    return config


def lighteval_row(task: Task, row: Mapping[str, Any]) -> dict[str, Any]:
    r"""A row as the prompt function of :func:`lighteval_config` reads it.

    Where local data lacks what the Hub's has, it is put together: the solution of MATH-500 from its answer, as
    ``\boxed{answer}``, and the answer of GSM8K from solution and number.
    """
    problem = next(row[name] for name in task.problem if name in row)
    answer = str(next(row[name] for name in task.answer if name in row))
    solution = row.get("solution")
    if task.lighteval == "gsm8k" and "####" not in answer:
        answer = f"{solution or ''}\n#### {answer}"
    solution = solution or f"\\boxed{{{question_of(task, row, '').gold}}}"
    return {"problem": problem, "question": problem, "answer": answer, "solution": solution}


def verdicts(task: Task, rows: Sequence[Mapping[str, Any]], texts: Sequence[Sequence[str]]) -> list[list[bool]]:
    """Whether each completion is right, one row a problem.

    lighteval removes what stands between ``<think>`` and ``</think>`` for pass@k but forgets to for avg@n; here its own
    function is applied before either.
    """
    config = lighteval_config(task)
    function = config.metrics[0].sample_level_fn
    sampling = isinstance(function, SamplingMetric)
    alone = PassAtK(
        strip_strings=function.strip_strings if sampling else True,
        sample_scoring_function=function.compute_score if sampling else function.compute,
        k=1,
        n=1,
    )
    found = []
    for row, completions in zip(rows, texts, strict=True):
        doc = config.prompt_function(lighteval_row(task, row), task.name)
        plain = [remove_reasoning_tags(text, [(REASONING_START, REASONING_END)]) for text in completions]
        right = {text: bool(alone.compute(doc, ModelResponse(text=[text])) == 1.0) for text in dict.fromkeys(plain)}
        found.append([right[text] for text in plain])
    return found


if __name__ == "__main__":
    main()
