"""Lets lighteval score completions that are already there, in its own pipeline, with its own tasks and metrics.

request.json -> rows as a local data set, completions as a model -> lighteval's Pipeline -> answer.json

Runs in a process of its own, started by :mod:`perl.evaluation.lighteval.score` in an empty folder: importing the
pipeline switches autograd off, and the time limits of its metrics need the main thread. Ends when its standard input
closes.
"""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from datasets import Dataset
from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.metrics.metrics_sample import AvgAtN, PassAtK, SamplingMetric
from lighteval.metrics.utils.metric_utils import Metric, SampleLevelMetric
from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.registry import Registry
from lighteval.tasks.requests import Doc, SamplingMethod
from lighteval.utils.utils import remove_reasoning_tags

from perl.evaluation.lighteval.mending import NoCache, let_xxhash_take_text
from perl.evaluation.lighteval.score import ANSWER, REQUEST
from perl.evaluation.lighteval.tasks import lighteval_config, lighteval_row
from perl.evaluation.task import all_tasks
from perl.rewards.answers import REASONING_END, REASONING_START

Scoring = Callable[..., float]

# lighteval switches autograd off for whoever imports it, a tool that imports every module included.
torch.set_grad_enabled(True)


class _SavedCompletions(LightevalModel):
    """A model that has already answered: completions by the number of their question's row."""

    def __init__(self, name: str, texts: Sequence[Sequence[str]]) -> None:
        """Takes the completions as they are to be judged."""
        self.config = ModelConfig(model_name=name)
        self._cache = NoCache()
        self._texts = texts

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 (lighteval's interface; nothing asks for one)
        raise NotImplementedError

    @property
    def add_special_tokens(self) -> bool:
        return False

    @property
    def max_length(self) -> int:
        return sys.maxsize

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """The completions of each question; lighteval shuffles questions, their ids are row numbers."""
        return [ModelResponse(input=doc.query, text=list(self._texts[int(doc.id)])) for doc in docs]

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        raise NotImplementedError

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        raise NotImplementedError


def main() -> None:
    """Reads the request in the current folder, writes the answer beside it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable(logging.WARNING)
    let_xxhash_take_text()
    request = json.loads(Path(REQUEST).read_text(encoding="utf-8"))
    answer = {}
    for number, asked in enumerate(request["tasks"]):
        folder = Path(f"task-{number}")
        folder.mkdir()
        with contextlib.chdir(folder):
            answer[asked["name"]] = _score(asked["name"], asked["rows"], asked["texts"], request["model"])
    Path(ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _score(name: str, rows: list[dict[str, Any]], texts: list[list[str]], model: str) -> dict[str, Any]:
    """One task in the current folder, so that no path of this machine enters the results."""
    task = all_tasks()[name]
    config = lighteval_config(task)
    # A folder of the repository's name: lighteval loads it in place of the one on the Hub, and results name it.
    data = Path(config.hf_repo) / "data"
    data.mkdir(parents=True)
    local = Dataset.from_list([lighteval_row(task, row) for row in rows])
    local.to_parquet(data / f"{task.split}-00000-of-00001.parquet")
    texts = [[remove_reasoning_tags(text, [(REASONING_START, REASONING_END)]) for text in row] for row in texts]
    count = len(texts[0])
    metrics, verdict = _metrics(config, count)
    config = dataclasses.replace(config, hf_subset="default", metrics=metrics)
    with _only_task(config):
        pipeline = Pipeline(
            tasks=f"{name}|0",
            pipeline_parameters=PipelineParameters(launcher_type=ParallelismManager.CUSTOM),
            evaluation_tracker=EvaluationTracker(
                output_dir="out", results_path_template="{output_dir}", save_details=False
            ),
            model=_SavedCompletions(model, texts),
        )
        pipeline.evaluate()
        pipeline.save_and_push_results()
    docs = {int(doc.id): doc for docs in pipeline.documents_dict.values() for doc in docs}
    (written,) = Path("out").glob("results_*.json")
    results = json.loads(written.read_text(encoding="utf-8"))
    return {
        "metrics": results["results"][f"{name}|0"],
        "right": [[verdict(docs[i], text) for text in row] for i, row in enumerate(texts)],
        "results": results,
    }


def _metrics(config: LightevalTaskConfig, count: int) -> tuple[list[Metric], Callable[[Doc, str], bool]]:
    """avg@n and pass@k with the scoring of the task's first metric, and that scoring of one completion alone."""
    first = config.metrics[0]
    function = first.sample_level_fn
    sampling = isinstance(function, SamplingMetric)
    scoring = _once(function.compute_score if sampling else function.compute)
    strip = function.strip_strings if sampling else True

    def pass_at(k: int, n: int) -> PassAtK:
        return PassAtK(strip_strings=strip, sample_scoring_function=scoring, k=k, n=n)

    def metric(name: str, level: SamplingMetric, parameters: dict[str, int]) -> Metric:
        return SampleLevelMetric(
            metric_name=name,
            sample_level_fn=level,
            category=SamplingMethod.GENERATIVE,
            corpus_level_fn=numpy.mean,
            higher_is_better=True,
        )(sample_params=parameters)

    metrics = [metric("avg@n", AvgAtN(sample_scoring_function=scoring), {"n": count})]
    name = first.metric_name.split(":")[0] if sampling else "pass@k"
    metrics += [metric(name, pass_at(k, count), {"k": k, "n": count}) for k in sorted({1, count})]
    alone = pass_at(1, 1)
    return metrics, lambda doc, text: bool(alone.compute(doc, ModelResponse(text=[text])) == 1.0)


def _once(scoring: Scoring) -> Scoring:
    """The same scoring, which compares the same completion with the same gold once for all metrics."""
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}

    def remembered(doc: Doc, model_response: ModelResponse) -> float:
        pair = tuple(doc.get_golds()), tuple(model_response.final_text)
        if pair not in known:
            known[pair] = scoring(doc=doc, model_response=model_response)
        return known[pair]

    return remembered


@contextlib.contextmanager
def _only_task(config: LightevalTaskConfig) -> Iterator[None]:
    """Makes this task the only one lighteval knows: looking for all of them imports modules that ask the network."""
    original = Registry.__dict__["load_all_task_configs"]
    Registry.load_all_task_configs = staticmethod(lambda **_: {config.name: config})
    try:
        yield
    finally:
        Registry.load_all_task_configs = original


if __name__ == "__main__":
    main()
