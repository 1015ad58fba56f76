"""Results counted again from what lies beside them: their samples, and their problems where they are here.

folder -> Results, samples, gold answers -> Recount

Problems count only if their hash is the one that the results name. Nothing that a results file names is asked for on a
network: of benchmarks only what is in the cache at the task's own revision is read.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from perl.data import heldout_name
from perl.errors import PerlError
from perl.evaluation.recounting.published_samples import LARGEST, read_published
from perl.evaluation.recounting.recount import Golds, KeptSamples, Recount, file_mistakes, recount
from perl.evaluation.scoring.results import (
    RESULTS,
    SAMPLES,
    Results,
    TaskResult,
    parse_results,
    read_results,
    results_file,
)
from perl.evaluation.scoring.samples import SampleFile
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH, Example, Question, all_tasks, questions_hash
from perl.evaluation.tasks.few_shot import shown_hash
from perl.evaluation.tasks.heldout import heldout_questions
from perl.evaluation.tasks.task_data import load_task_data
from perl.recipe import Recipe
from perl.recipe.sections import is_data_file
from perl.run.facts import RECIPE, run_above
from perl.run.files import parse_mapping
from perl.sandbox import is_sandbox

NO_SAMPLES = f"its scores cannot be counted again, there is no {SAMPLES}"


def recount_folder(path: str | Path, recipe: Recipe | None = None) -> Recount:
    """Counts the results of a folder again: an evaluation's, a run's, or one that was published.

    Args:
        path: The folder, as :func:`perl.evaluation.scoring.results.read_results` takes it.
        recipe: Of the run that it belongs to; None: the one that lies above it, if one does.

    Raises:
        PerlError: There are no results of ours, or no samples beside them, or these cannot be read.
    """
    file = results_file(path)
    results, samples = read_results(file), file.parent / SAMPLES
    if not samples.is_file() or not samples.stat().st_size:
        raise PerlError(NO_SAMPLES, str(file.parent), "perl eval draws them")
    recipe = recipe or recipe_above(file.parent)
    with samples.open("rb") as opened:
        published = b'"text"' not in opened.readline()
    kept = _published(samples.read_bytes(), str(samples)) if published else None
    kept = kept or KeptSamples(list(SampleFile(samples).lines()))
    return _counted(results, file.read_bytes(), kept, recipe, find_golds(results, recipe))


def recount_published(results: bytes, samples: bytes | None, where: str, *, known: bool = True) -> Recount:
    """Counts published results again, by nothing but these.

    Args:
        results: ``eval/results.json``, which may hold anything.
        samples: ``eval/samples.jsonl``; None: there is none.
        where: Names them in an error.
        known: Whether the problems must be those of the task as it is known here.

    Raises:
        PerlError: A file cannot be read, or there are no samples.
    """
    found = parse_results(results, f"{where}/{RESULTS}")
    if samples is None:
        raise PerlError(NO_SAMPLES, f"{where}/{RESULTS}", f"perl push sends them, at most {LARGEST:,} bytes")
    kept = _published(samples, f"{where}/{SAMPLES}")
    return _counted(found, results, kept, None, find_golds(found) if known else {})


def _counted(results: Results, content: bytes, samples: KeptSamples, recipe: Recipe | None, golds: Golds) -> Recount:
    """Results and the layout of their file."""
    found = recount(results, samples, golds, None if recipe is None else heldout_name(recipe.data))
    return replace(found, mistakes=(*found.mistakes, *file_mistakes(parse_mapping(content), found.results)))


def _published(content: bytes, where: str) -> KeptSamples:
    if len(content) > LARGEST:
        raise PerlError(f"has {len(content):,} bytes, read are {LARGEST:,} at most", where)
    return read_published(content, where)


def find_golds(results: Results, recipe: Recipe | None = None) -> Golds:
    """The gold answers of every task whose problems are here.

    Args:
        results: Of an evaluation.
        recipe: Of the run that it belongs to: says what was held out, and where a task's data lies.

    Returns:
        Of a sandbox task always, so that results of other problems under its name show.
    """
    found: dict[str, dict[str, str | Question]] = {}
    defined = all_tasks()
    for task in results.tasks:
        for questions, examples in candidates(task, recipe, results.protocol.seed):
            if questions_hash(questions) == task.data.get("sha256"):
                if shown_hash(examples) != task.examples:
                    found[task.name] = {}
                    break
                scorer = defined[task.name].scorer if task.name in defined else MATH
                if scorer in SCORERS:  # a reward's code is not run on completions of others
                    found[task.name] = {one.id: one.gold if scorer == MATH else one for one in questions}
                break
        else:
            if is_sandbox(task.name) and task.name in all_tasks():
                found[task.name] = {}
    return found


def candidates(
    task: TaskResult, recipe: Recipe | None, seed: int
) -> Iterator[tuple[tuple[Question, ...], tuple[Example, ...]]]:
    """What a task's problems, and the examples before them, may be; what is absent is left out."""
    count = len(task.problems)
    known = all_tasks().get(task.name)
    if known is not None and count:
        folder = Path(recipe.eval.data).expanduser() if recipe is not None and recipe.eval.data else None
        for place in (folder, None):
            with contextlib.suppress(PerlError):
                data = load_task_data(known, place, count, task.few_shot, seed, cached=True)
                yield data.questions, data.examples
    source = None if recipe is None else recipe.data.eval or recipe.data.train
    if recipe is not None and source is not None and _is_here(source.name):
        for chat in (True, False):
            with contextlib.suppress(PerlError):
                yield heldout_questions(recipe, chat=chat)[:count], ()


def _is_here(name: str) -> bool:
    """Whether a data set can be read without a download."""
    if is_sandbox(name) or is_data_file(name):
        return True
    return (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")).is_dir()


def recipe_above(folder: Path) -> Recipe | None:
    """The recipe of the run that results lie in, as ``RUN/eval``, ``RUN/evals/PRESET`` or ``RUN/best/eval``."""
    run = run_above(folder, 2)
    return None if run is None else Recipe.of_run(run / RECIPE)
