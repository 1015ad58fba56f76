"""Scores in the two forms that the Hub reads: a card's model-index, and files in ``.eval_results``.

Results -> EvalResults of a card; path -> YAML; files of a repository -> those that are not what the results give
"""

import functools
from dataclasses import dataclass

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml

from perl.errors import Mistake, PerlError
from perl.evaluation.scoring.results import RESULTS, Results, TaskResult
from perl.evaluation.scoring.task import MATH, Task, all_tasks
from perl.hub.card.published import SCORES, Files, content_of, shown
from perl.hub.gate import is_simple_name
from perl.recipe.plain_yaml import PlainDumper

TASK_TYPE, TASK_NAME = "text-generation", "Text Generation"
LEADERBOARDS = ".eval_results/"
"""Folder with scores for the Hub's leaderboards."""
_OURS = "perl eval"


@dataclass(frozen=True)
class Benchmark:
    """A data set that the Hub keeps a leaderboard of.

    Attributes:
        task_id: Of the leaderboard, as in the data set's ``eval.yaml``.
        problems: All of it; a score on fewer is not one of the benchmark.
        subset: Of the data set; None: it does not matter.
    """

    task_id: str
    problems: int
    subset: str | None = None


# From the data sets' own eval.yaml, and the files of published models that the Hub shows.
BENCHMARKS = {
    "openai/gsm8k": Benchmark("gsm8k", 1319, "main"),
    "Idavidrein/gpqa": Benchmark("diamond", 198, "gpqa_diamond"),
    "MathArena/aime_2026": Benchmark("MathArena/aime_2026", 30),
    "cais/hle": Benchmark("hle", 2500),
    "TIGER-Lab/MMLU-Pro": Benchmark("mmlu_pro", 12032),
}


def in_percent(share: float) -> float:
    """As the Hub shows scores, with two decimals."""
    return round(100 * share, 2)


def model_index(results: Results) -> list[EvalResult]:
    """Every task's avg@k and pass@k as a card's metadata has them, in percent."""
    entries = []
    for task in results.tasks:
        definition, source, score = _definition(task), str(task.data["source"]), task.score
        if definition is not None and source != definition.repository:
            source = definition.file
        known = definition if definition is not None and definition.repository == source else None
        judge = {} if task.scorer == MATH else {"scorer": task.scorer}
        facts = {"k": score.k, "n": score.n, "protocol": task.protocol_hash, **judge, **_base_of(results)}
        error = {} if score.stderr is None else {"stderr": in_percent(score.stderr)}
        metrics = [("accuracy", f"avg@{score.k}", score.accuracy, facts | error)]
        metrics += [("pass@k", f"pass@{k}", value, {**facts, "k": k}) for k, value in score.pass_at.items() if k > 1]
        entries += [
            EvalResult(
                task_type=TASK_TYPE,
                task_name=TASK_NAME,
                dataset_type=source,
                dataset_name=task.title,
                dataset_config=known.subset if known else None,
                dataset_split=known.split if known else None,
                dataset_revision=task.data["revision"],
                metric_type=kind,
                metric_name=name,
                metric_value=in_percent(value),
                metric_args=arguments,
            )
            for kind, name, value, arguments in metrics
        ]
    return entries


def eval_result_files(results: Results) -> dict[str, str]:
    """Files with the scores on benchmarks that the Hub keeps leaderboards of.

    Args:
        results: Of an adapter.

    Returns:
        Path in the repository -> YAML; empty where no such benchmark was asked in full, as its task is defined here.

    Raises:
        PerlError: A task's name cannot be a file's.
    """
    files, of_base = {}, "".join(f"; base quantised to {value}" for value in _base_of(results).values())
    for task in results.tasks:
        if "/" in task.name or not is_simple_name(task.name.replace(":", "-")):  # a results file may come from anywhere
            raise PerlError(f"{task.name[:80]!r} is not a valid name of a task", RESULTS)
        definition = _definition(task)
        benchmark = BENCHMARKS.get(definition.repository) if definition is not None else None
        if definition is None or benchmark is None or task.score.n != benchmark.problems:
            continue
        if benchmark.subset and definition.subset != benchmark.subset:
            continue
        revision = task.data["revision"]
        if task.data["source"] != definition.repository or definition.revision not in (None, revision):
            continue  # problems of a file, or of another commit, may be any
        entry = EvalResultEntry(
            dataset_id=definition.repository,
            task_id=benchmark.task_id,
            value=in_percent(task.score.accuracy),
            dataset_revision=revision,
            notes=f"avg@{task.score.k}; {results.protocol}; {_OURS}, protocol {task.protocol_hash}{of_base}",
        )
        written = eval_result_entries_to_yaml([entry])
        files[f"{LEADERBOARDS}{task.name}.yaml"] = yaml.dump(written, Dumper=PlainDumper, sort_keys=False)
    return files


def leaderboard_mistakes(files: Files, results: Results | None) -> tuple[list[Mistake], list[str]]:
    """Scores for leaderboards that are not those of the results.

    Args:
        files: All that lies in the repository.
        results: Of the adapter; None: there are none.

    Returns:
        The mistakes, and the names of files with scores of others.
    """
    found, others = [], []
    expected = eval_result_files(results) if results is not None else {}
    claims = [_OURS.encode(), *(str(task.data["source"]).encode() for task in (results.tasks if results else ()))]
    for name, text in expected.items():
        if content_of(files, name) != text.encode():
            found.append(Mistake(f"is not what {SCORES} gives", name, "perl push writes it"))
    for name in sorted(name for name in files if name.startswith(LEADERBOARDS) and name not in expected):
        content = content_of(files, name)
        task = name.removeprefix(LEADERBOARDS).removesuffix(".yaml")
        if content is None or task in _definitions() or any(claim in content for claim in claims):
            found.append(Mistake(f"shows scores that {SCORES} does not give", shown(name), "perl push takes it away"))
        else:
            others.append(shown(name))
    return found, others


def _definition(task: TaskResult) -> Task | None:
    """The benchmark that results are of; None: they are of a run's own problems, or of no task that is known here."""
    found = _definitions().get(task.name)
    return found if found is not None and task.title == found.title else None


@functools.cache
def _definitions() -> dict[str, Task]:
    return all_tasks()


def _base_of(results: Results) -> dict[str, str]:
    """What a score must say of its base: that it was quantised, and is another one than its name says."""
    quantization = results.subject.get("base_quantization")
    return {"base_quantization": quantization} if quantization else {}
