"""Results counted again from what lies beside them: their samples, and their problems where they are here.

folder -> Results, samples, gold answers -> Recount; samples.jsonl -> lines of eval/samples.jsonl -> KeptSamples

Problems count only if their hash is the one that the results name. Nothing that a results file names is asked for on a
network: of benchmarks only what is in the cache at the task's own revision is read.

Samples are published with verdicts, seeds and lengths, without their texts. An answer too long to be published is named
by a hash, so that maj@k can still be counted: where a problem's wrong answers that mean the same hold such a one, all
of them bear the same name. An untrusted file is read line by line, every field checked.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from pydantic import ConfigDict, TypeAdapter, ValidationError

from perl.data import heldout_name
from perl.errors import PerlError
from perl.evaluation.recounting.recount import WHO, Golds, KeptSamples, Recount, file_mistakes, recount
from perl.evaluation.scoring.metrics import answer_classes
from perl.evaluation.scoring.results import (
    HELD_OUT,
    RESULTS,
    SAMPLES,
    Results,
    TaskResult,
    parse_results,
    read_results,
    results_file,
)
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.scoring.score import HASHED, same_meaning
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH, WITH_TOOLS, Example, Question, all_tasks, questions_hash, shown_hash
from perl.evaluation.tasks.heldout import heldout_questions
from perl.evaluation.tasks.task_data import load_task_data
from perl.recipe import Recipe
from perl.recipe.sections import is_data_file
from perl.run.facts import RECIPE, run_above
from perl.run.files import parse_mapping
from perl.sandbox import is_sandbox
from perl.types import VerdictStatus

NO_SAMPLES = f"its scores cannot be counted again, there is no {SAMPLES}"
PUBLISHED = f"eval/{SAMPLES}"
LONGEST_ANSWER = 200
"""Characters; longer answers are published as a hash."""
LARGEST = 50_000_000
"""Bytes of a published file that are read."""


@dataclass(frozen=True)
class _PublishedLine:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    policy: str
    task: str
    problem: str
    index: int
    seed: int
    tokens: int
    truncated: bool
    status: VerdictStatus
    extracted: str | None


_LINE = TypeAdapter(_PublishedLine)


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
    kept = read_published(samples.read_bytes(), str(samples)) if published else None
    kept = kept or KeptSamples(list(SampleFile(samples).lines()))
    held_out = None if recipe is None else heldout_name(recipe.data)
    counted = recount(results, kept, find_golds(results, recipe), held_out)
    return _compared(counted, file.read_bytes())


def recount_published(results: bytes, samples: bytes | None, where: str, golds: Golds | None = None) -> Recount:
    """Counts published results again, by nothing but these.

    Args:
        results: ``eval/results.json``, which may hold anything.
        samples: ``eval/samples.jsonl``; None: there is none.
        where: Names them in an error.
        golds: Of tasks whose problems must be those that are known here.

    Raises:
        PerlError: A file cannot be read, or there are no samples.
    """
    found = parse_results(results, f"{where}/{RESULTS}")
    if samples is None:
        raise PerlError(NO_SAMPLES, f"{where}/{RESULTS}", f"perl push sends them, at most {LARGEST:,} bytes")
    counted = recount(found, read_published(samples, f"{where}/{SAMPLES}"), golds)
    return _compared(counted, results)


def _compared(counted: Recount, written: bytes) -> Recount:
    """With the mistakes of the layout of the results' file."""
    return replace(counted, mistakes=(*counted.mistakes, *file_mistakes(parse_mapping(written), counted.results)))


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
        tools = task.title == task.name + HELD_OUT and task.scorer.startswith(WITH_TOOLS)
        if tools and (recipe is None or recipe.agent.acts):
            continue  # whose verdicts take the run's tools
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
    if recipe is None or source is None:
        return
    here = is_sandbox(source.name) or is_data_file(source.name)
    if here or (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source.name, repo_type="dataset")).is_dir():
        # It is read without a download.
        for chat in (True, False):
            with contextlib.suppress(PerlError):
                yield heldout_questions(recipe, chat=chat)[:count], ()


def recipe_above(folder: Path) -> Recipe | None:
    """The recipe of the run that results lie in, as ``RUN/eval``, ``RUN/evals/PRESET`` or ``RUN/best/eval``."""
    run = run_above(folder, 2)
    return None if run is None else Recipe.of_run(run / RECIPE)


def published_samples(results: Results, file: Path) -> bytes | None:
    """The lines that results stand on, in their order, without texts; None: some are missing, or they are too many.

    Args:
        results: Name the policies and problems.
        file: ``samples.jsonl`` of the evaluation.
    """
    wanted = {task.samples[who] for task in results.tasks for who in WHO if who in task.samples}
    found: dict[tuple[str, str], dict[tuple[str, int], Sample]] = {}
    for policy, sample in SampleFile(file).lines():
        if policy in wanted:
            found.setdefault((policy, sample.task), {})[sample.problem, sample.index] = sample
    lines: list[str] = []
    for task in results.tasks:
        for who in WHO:
            if getattr(task, who) is None:
                continue
            policy = task.samples.get(who, "")
            there = found.get((policy, task.name), {})
            for problem in task.problems:
                places = [(problem.id, index) for index in range(results.protocol.k)]
                if any(place not in there for place in places):
                    return None
                samples = [there[place] for place in places]
                names = _names([one.extracted for one in samples if one.extracted and not one.right], task.scorer)
                for sample in samples:
                    facts = {"policy": policy, **vars(sample)}
                    del facts["text"]
                    if sample.extracted:
                        facts["extracted"] = _short(sample.extracted) if sample.right else names[sample.extracted]
                    lines.append(json.dumps(facts, ensure_ascii=False) + "\n")
    content = "".join(lines).encode(errors="backslashreplace")  # half a surrogate pair stays an escape of JSON
    return content if len(content) <= LARGEST else None


def read_published(content: bytes, where: str) -> KeptSamples:
    """Samples that somebody published.

    Args:
        content: Of the file, which may hold anything.
        where: Names it in an error.

    Raises:
        PerlError: It is too large, or a line is not a sample.
    """
    if len(content) > LARGEST:
        raise PerlError(f"has {len(content):,} bytes, read are {LARGEST:,} at most", where)
    lines = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            one = _LINE.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            reason = f"{field}: {first['msg']}" if field else first["msg"]
            raise PerlError(f"is not a sample: {reason[:200]}", f"{where}:{number}") from None
        facts = {name: fact for name, fact in vars(one).items() if name != "policy"}
        lines.append((one.policy, Sample(text="", **facts)))
    return KeptSamples(lines, texts=False)


def _names(answers: Sequence[str], scorer: str) -> Mapping[str, str]:
    """What a problem's wrong answers are published as."""
    if all(len(answer) <= LONGEST_ANSWER for answer in answers):
        return {answer: answer for answer in answers}
    names: dict[str, str] = {}
    by_text: dict[str, list[str]] = {}
    for answer in answers:
        by_text.setdefault(" ".join(answer.split()), []).append(answer)
    for texts in answer_classes(list(by_text), same_meaning([list(by_text)], scorer=scorer)):
        members = [answer for text in texts for answer in by_text[text]]
        one_name = _short(min(texts, key=len)) if any(len(a) > LONGEST_ANSWER for a in members) else None
        names |= {answer: one_name or answer for answer in members}
    return names


def _short(answer: str) -> str:
    if len(answer) <= LONGEST_ANSWER:
        return answer
    return HASHED + hashlib.sha256(answer.encode()).hexdigest()
