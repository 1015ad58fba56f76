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
from perl.evaluation.few_shot import shown_hash
from perl.evaluation.heldout_of_recipe import heldout_questions
from perl.evaluation.recounting.published_samples import LARGEST, read_published
from perl.evaluation.recounting.recount import Golds, KeptSamples, Recount, layout_mistakes, recount
from perl.evaluation.results import RESULTS, SAMPLES, Results, TaskResult, parse_results, read_results, results_file
from perl.evaluation.samples import SampleFile
from perl.evaluation.scorers import SCORERS
from perl.evaluation.task import MATH, Example, Question, all_tasks, questions_hash
from perl.evaluation.task_data import load_task_data
from perl.recipe import Recipe
from perl.recipe.sections import DATA_FILE_SUFFIXES
from perl.run.facts import RECIPE, run_above
from perl.run.files import parse_mapping
from perl.sandbox import is_sandbox


def recount_folder(path: str | Path, recipe: Recipe | None = None) -> Recount:
    """Counts the results of a folder again: an evaluation's, a run's, or one that was published.

    Args:
        path: The folder, as :func:`perl.evaluation.results.read_results` takes it.
        recipe: Of the run that it belongs to; None: the one that lies above it, if one does.

    Raises:
        PerlError: There are no results of ours, or the samples beside them cannot be read.
    """
    file = results_file(path)
    results = read_results(file)
    folder = file.parent
    recipe = recipe or recipe_above(folder)
    samples = kept_samples(folder, published=_is_published(folder / SAMPLES))
    return _counted(results, file.read_bytes(), samples, recipe, find_golds(results, recipe))


def recount_published(results: bytes, samples: bytes | None, where: str, *, known: bool = True) -> Recount:
    """Counts published results again, by nothing but these.

    Args:
        results: ``eval/results.json``, which may hold anything.
        samples: ``eval/samples.jsonl``; None: there is none.
        where: Names them in an error.
        known: Whether the problems must be those of the task as it is known here.

    Raises:
        PerlError: A file cannot be read.
    """
    found = parse_results(results, f"{where}/{RESULTS}")
    kept = None if samples is None else _published(samples, f"{where}/{SAMPLES}")
    return _counted(found, results, kept, None, find_golds(found) if known else {})


def has_samples(folder: Path) -> bool:
    """Whether there are samples beside results."""
    return (folder / SAMPLES).is_file() and (folder / SAMPLES).stat().st_size > 0


def kept_samples(folder: Path, *, published: bool) -> KeptSamples | None:
    """The samples beside results; None: there are none.

    Args:
        folder: Of the results.
        published: They are read as somebody published them, and not as an evaluation keeps them.

    Raises:
        PerlError: They were published and cannot be read.
    """
    file = folder / SAMPLES
    if not has_samples(folder):
        return None
    return _published(file.read_bytes(), str(file)) if published else KeptSamples(list(SampleFile(file).lines()))


def _counted(
    results: Results, content: bytes, samples: KeptSamples | None, recipe: Recipe | None, golds: Golds
) -> Recount:
    """Results and the layout of their file."""
    held_out = None if recipe is None else heldout_name(recipe.data)
    found = recount(results, samples, golds, held_out)
    whole = len(found.results.tasks) == len(results.tasks)
    layout = layout_mistakes(parse_mapping(content), found.results if whole else results)
    return replace(found, mistakes=(*found.mistakes, *layout))


def _is_published(file: Path) -> bool:
    """Whether samples lack their texts, as published ones do."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return b'"text"' not in opened.readline()


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
    if is_sandbox(name) or Path(name).suffix in DATA_FILE_SUFFIXES:
        return True
    return (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")).is_dir()


def recipe_above(folder: Path) -> Recipe | None:
    """The recipe of the run that results lie in, as ``RUN/eval``, ``RUN/evals/PRESET`` or ``RUN/best/eval``."""
    run = run_above(folder, 2)
    return None if run is None else Recipe.of_run(run / RECIPE)
