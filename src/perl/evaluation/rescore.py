"""Completions that are there, judged again or for the first time, without a model.

folder with samples -> verdicts of now -> Results, and the files of the folder
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from perl.errors import DataError, PerlError
from perl.evaluation.drawing.drawn_samples import Groups, stored_samples
from perl.evaluation.drawing.policies import Who
from perl.evaluation.drawing.request import check_pass_at
from perl.evaluation.drawing.settings import names_of
from perl.evaluation.recounting.files import candidates, recipe_above
from perl.evaluation.recounting.recount import WHO, with_figures
from perl.evaluation.reporting import scored_by_lighteval, write_results
from perl.evaluation.scoring.found_results import usable
from perl.evaluation.scoring.protocol import Protocol, asking_of
from perl.evaluation.scoring.results import SAMPLES, Results, TaskResult, is_held_out, read_results
from perl.evaluation.scoring.reward_scorer import check_judged, check_scorer_timeout
from perl.evaluation.scoring.samples import SampleFile
from perl.evaluation.scoring.scorers import SCORERS, Scorer
from perl.evaluation.scoring.task import Task, TaskData, all_tasks, questions_hash, shown_hash
from perl.evaluation.tasks.draw import RenderedProblem, TaskRequest
from perl.evaluation.tasks.heldout import held_out_by_run
from perl.evaluation.tasks.own_tasks import file_task, is_file_name, named_tasks
from perl.evaluation.tasks.questions import protocol_hash, scorer_of
from perl.evaluation.tasks.task_data import load_task_data
from perl.recipe.eval_section import SCORER_SECONDS
from perl.recipe.sections import is_data_file
from perl.rewards.verifier import verifier_version

_DRAW = "perl eval, or perl eval --predict-only, draws them"


def rescore(
    folder: str | Path,
    data: str | Path | None = None,
    pass_at: Sequence[int] = (),
    tasks: str | Path | Sequence[str | Path] = (),
    columns: Mapping[str, str] | None = None,
    scorer: str | None = None,
    *,
    lighteval: bool = True,
    scorer_timeout: float = SCORER_SECONDS,
) -> Results:
    """Judges every completion that a folder's results stand on, and counts the scores anew.

    Args:
        folder: Of an evaluation, or of ``perl eval --predict-only``.
        data: Folder with the tasks' data as JSON lines; None: what is cached of the Hub, else the Hub.
        pass_at: Further numbers for pass@k, beside the powers of two up to k.
        tasks: The user's own files that were asked, as ``perl eval --tasks`` had them.
        columns: Of these that are data files, likewise.
        scorer: Judges these, in place of the scorer of then; None: that one.
        lighteval: Report lighteval's own score of the same completions, where it is installed.
        scorer_timeout: Seconds that a reward may take for a completion; 0: there is no limit.

    Returns:
        What is in the folder's ``results.json`` now; results by another verifier are in ``earlier/`` there.

    Raises:
        PerlError: There are no completions, some are missing, or their problems are not here.
        RewardError: The user's reward that judges failed too often; the folder's files are what they were.
    """
    check_scorer_timeout(scorer_timeout)
    folder = Path(folder).expanduser()
    drawn = read_results(folder, scored=False)
    with usable(folder), FileLock(folder / ".lock", timeout=0):
        own = _own_tasks(names_of(tasks), columns, scorer, drawn)
        file, scored, samples = SampleFile(folder / SAMPLES), list[TaskResult](), list[dict[Who, Groups]]()
        known = [_data_of(task, drawn.protocol.seed, folder, data, own.get(task.name, [])) for task in drawn.tasks]
        judges = []
        for task, of in zip(drawn.tasks, known, strict=True):
            # What is named, else what judged it then; a reward only as its own file has it.
            own_scorer = scorer if of.task.path is not None else None
            named = own_scorer or (task.scorer if task.scorer in SCORERS else of.task.scorer)
            if own_scorer is None and named != task.scorer and named in SCORERS:
                # No code is run because a results file names it.
                raise PerlError(f"{task.name} was judged by {task.scorer}", "--scorer", "name the reward's file")
            judges.append(scorer_of(of, named, scorer_timeout))
        for task, of, judge in zip(drawn.tasks, known, judges, strict=True):
            groups = {who: _judged(task, who, drawn.protocol, of, judge, file) for who in WHO if who in task.samples}
            samples.append(groups)
            check_pass_at(pass_at, drawn.protocol.k)
            shown = {k for score in (task.base, task.adapter) if score is not None for k in score.pass_at}
            if judge.label != task.scorer:
                asked = asking_of(drawn.subject)
                hashed = protocol_hash(drawn.protocol, of, task.max_new_tokens, judge.label, asked)
                task = replace(task, scorer=judge.label, protocol_hash=hashed)
            scored.append(with_figures(replace(task, lighteval={}), groups, sorted({*shown, *pass_at})))
        by_task = {task.name: groups for task, groups in zip(scored, samples, strict=True)}
        own_scores = scored_by_lighteval(known, by_task) if lighteval else {}
        scored = [replace(task, lighteval=own_scores.get(task.name, {})) for task in scored]
        found = replace(drawn, tasks=tuple(scored), verifier=verifier_version())
        places = [(task.name, p.id, i) for task in scored for p in task.problems for i in range(drawn.protocol.k)]
        return write_results(found, folder, places)


def _own_tasks(
    names: Sequence[str], columns: Mapping[str, str] | None, scorer: str | None, drawn: Results
) -> dict[str, list[Task]]:
    """Task -> how the user's files may have asked it; a data file may have been asked for any scorer.

    Raises:
        PerlError: A name is no file, or of no task that was asked.
    """
    for option, given in (("--columns", columns), ("--scorer", scorer)):
        if given and not names:
            raise PerlError("is about files of your own, and none is named", option, "as in --tasks my.jsonl")
    asked = {task.name for task in drawn.tasks}
    own: dict[str, list[Task]] = {}
    for name in names:
        if not is_file_name(name):
            raise PerlError(f"{name!r} is no file", "--tasks", "files of your own, or a recipe; others are found")
        found = [file_task(name, columns, one) for one in SCORERS] if is_data_file(name) else named_tasks([name])
        if not asked & {one.name for one in found}:
            raise PerlError(f"no task of {name} was asked", "--tasks", f"there are {', '.join(sorted(asked))}")
        for one in found:
            own.setdefault(one.name, []).append(one)
    return own


def _data_of(task: TaskResult, seed: int, folder: Path, data: str | Path | None, own: Sequence[Task]) -> TaskData:
    """The problems that were asked, with their gold answers."""
    sha256, revision, held_out = str(task.data["sha256"]), task.data["revision"], is_held_out(task.title)
    known = [] if held_out or task.name not in all_tasks() else [all_tasks()[task.name]]
    for questions, shown in candidates(task, recipe_above(folder), seed) if data is None and not own else ():
        if questions_hash(questions) == sha256 and shown_hash(shown) == task.examples:
            of = known[0] if known else held_out_by_run(task.name)
            return TaskData(of, questions, str(task.data["source"]), revision, sha256, (), shown)
    definitions = own or known
    if not definitions:
        hint = "a run's own problems are found where its recipe.yaml lies above the folder"
        hint = hint if held_out else f"name their file: --tasks {task.data['source']}"
        raise PerlError(f"the problems of {task.name} are not here", str(folder), hint)
    place, count = Path(data).expanduser() if data else None, len(task.problems)
    for one in definitions:  # of a single one what is wrong with it is raised
        with contextlib.suppress(*[DataError] * (len(definitions) > 1)):
            found = load_task_data(replace(one, revision=revision or one.revision), place, count, task.few_shot, seed)
            if found.sha256 == sha256 and shown_hash(found.examples) == task.examples:
                return found
    message = f"the problems of {task.name} in {task.data['source']} are not those that were asked"
    if own:
        raise PerlError(message, "--tasks", "name the file, and its --columns, of then")
    raise PerlError(message, "--data" if data else str(folder), "name the folder with the data of then by --data")


def _judged(task: TaskResult, who: Who, protocol: Protocol, data: TaskData, scorer: Scorer, file: SampleFile) -> Groups:
    """The samples of each problem, with the verdicts of now, which the file has too then."""
    key = task.samples[who]
    asked = tuple(RenderedProblem(question.id, (), question.gold, question) for question in data.questions)
    request = TaskRequest(task.name, asked, task.max_new_tokens, (), (), scorer)
    found = stored_samples(file.read(key), request, protocol)
    missing = [place for place in request.places(protocol.k) if place not in found.samples]
    if missing:
        what = f"{len(missing)} of {len(asked) * protocol.k} completions of the {who} on {task.name} are missing"
        raise PerlError(what, str(file.path), _DRAW)
    check_judged(scorer, found.samples.values(), task.name)
    file.correct(key, found.samples, ())
    return [[found.samples[task.name, one.problem, i] for i in range(protocol.k)] for one in asked]
