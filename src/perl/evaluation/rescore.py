"""Completions that are there, judged again or for the first time, without a model.

folder with samples -> verdicts of now -> Results, and the files of the folder
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.argument_types import names_of
from perl.evaluation.draw import RenderedProblem, TaskRequest
from perl.evaluation.drawn_samples import Groups
from perl.evaluation.few_shot import shown_hash
from perl.evaluation.heldout import beside_another, held_out_by_run, holds_problems_out
from perl.evaluation.kept_samples import stored_samples
from perl.evaluation.output_folder import read_drawn, usable
from perl.evaluation.own_tasks import check_threshold, file_task, is_file_name, named_tasks, with_folder
from perl.evaluation.policies import Who
from perl.evaluation.protocol import Protocol, asking_of
from perl.evaluation.questions import protocol_hash, scorer_of
from perl.evaluation.recounting.folder import candidates, recipe_above
from perl.evaluation.recounting.recount import WHO, with_figures
from perl.evaluation.reporting import scored_by_lighteval, write_results
from perl.evaluation.results import SAMPLES, Results, TaskResult, is_held_out
from perl.evaluation.reward_scorer import check_judged, check_scorer_timeout
from perl.evaluation.samples import SampleFile
from perl.evaluation.scorers import SCORERS, Scorer
from perl.evaluation.task import Task, TaskData, all_tasks, questions_hash
from perl.evaluation.task_data import load_task_data
from perl.recipe.eval_section import SCORER_SECONDS
from perl.recipe.sections import DATA_FILE_SUFFIXES
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
    """Judges every completion that a folder's results, or its predictions, stand on, and counts the scores anew.

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
    drawn = read_drawn(folder)
    with usable(folder), FileLock(folder / ".lock", timeout=0):
        named = _Named(names_of(tasks), columns, scorer)
        named.check(drawn)
        known = {one.name: _data_of(one, drawn.protocol.seed, folder, data, named) for one in drawn.tasks}
        judges = {t.name: scorer_of(d, named.spec(t, d), scorer_timeout) for t, d in _with(drawn.tasks, known)}
        drawn = replace(
            drawn, tasks=tuple(_judged_by(t, judges[t.name], drawn, d) for t, d in _with(drawn.tasks, known))
        )
        file = SampleFile(folder / SAMPLES)
        samples: dict[str, dict[Who, Groups]] = {task.name: {} for task in drawn.tasks}
        for task in drawn.tasks:
            for who in (who for who in WHO if who in task.samples):
                found_there = _judged(task, who, drawn.protocol, known[task.name], judges[task.name], file)
                samples[task.name][who] = found_there
        scored = [_scored(task, samples[task.name], pass_at) for task in drawn.tasks]
        if lighteval:
            scored = _beside_lighteval(scored, samples, known)
        found = replace(drawn, tasks=tuple(scored), verifier=verifier_version())
        places = [(task.name, p.id, i) for task in scored for p in task.problems for i in range(drawn.protocol.k)]
        return write_results(found, folder, places)


@dataclass(frozen=True)
class _Named:
    """Files of the user's own that they name again, and what is to judge them."""

    tasks: Sequence[str]
    columns: Mapping[str, str] | None
    scorer: str | None
    read: dict[str, list[Task]] = field(default_factory=dict)

    def check(self, drawn: Results) -> None:
        """Refuses files that were not asked, and options that are about none."""
        for option, given in (("--columns", self.columns), ("--scorer", self.scorer)):
            if given and not self.tasks:
                raise PerlError("is about files of your own, and none is named", option, "as in --tasks my.jsonl")
        check_threshold(self.scorer)
        asked = [task.name for task in drawn.tasks]
        for name in self.tasks:
            if not is_file_name(name):
                raise PerlError(f"{name!r} is no file", "--tasks", "files of your own, or a recipe; others are found")
            if not any(self._of_file(name, task) for task in drawn.tasks):
                raise PerlError(f"no task of {name} was asked", "--tasks", f"there are {', '.join(asked)}")

    def find(self, task: TaskResult) -> Task | None:
        """The definition of a task of the user's own, asked as it was; None: they name no file of it."""
        found = [one for name in self.tasks if is_file_name(name) for one in self._of_file(name, task)]
        return found[0] if found else None

    def spec(self, task: TaskResult, data: TaskData) -> str:
        """What judges a task now: what is named, else what judged it then; a reward only as its own file has it."""
        then = task.scorer if task.scorer in SCORERS else data.task.scorer
        return self.scorer if self.scorer is not None and data.task.path is not None else then

    def _of_file(self, name: str, task: TaskResult) -> list[Task]:
        found = self._tasks_of(name)
        if not name.endswith(tuple(DATA_FILE_SUFFIXES)):
            found = [*found, *(beside_another(one) for one in found if holds_problems_out(one))]
            called = task.name, is_held_out(task.title)
            return [one for one in found if (one.name, is_held_out(one.title)) == called]
        [one] = found
        if task.name not in (one.name, with_folder(name)):
            return []
        one = replace(one, name=task.name, title=task.name)
        asked_for, judge = task.asked_for or task.scorer, self.scorer or task.scorer
        if asked_for in SCORERS:
            return [file_task(name, self.columns, asked_for, name=task.name)]
        if self.scorer is None and judge not in SCORERS:  # no code is run because a results file names it
            raise PerlError(f"{one.name} was judged by {task.scorer}", "--scorer", "name the reward's file")
        return [file_task(name, self.columns, "exact" if judge in SCORERS else judge, name=task.name)]

    def _tasks_of(self, name: str) -> list[Task]:
        """What a file defines; read, and its code run, once."""
        if name not in self.read:
            is_data = name.endswith(tuple(DATA_FILE_SUFFIXES))
            self.read[name] = named_tasks([name], columns=self.columns if is_data else None)
        return self.read[name]


def _with(tasks: Sequence[TaskResult], known: Mapping[str, TaskData]) -> list[tuple[TaskResult, TaskData]]:
    return [(task, known[task.name]) for task in tasks]


def _judged_by(task: TaskResult, scorer: Scorer, drawn: Results, data: TaskData) -> TaskResult:
    """The task with the scorer that judges it now, and with the protocol's hash that goes with that."""
    name = scorer.label
    if name == task.scorer:
        return task
    hashed = protocol_hash(drawn.protocol, data, task.max_new_tokens, name, asking_of(drawn.subject))
    asked_for = task.asked_for or task.scorer
    # All rewards ask in the same words, whatever their code says.
    same = asked_for == name or not {asked_for, scorer.name} & SCORERS.keys()
    return replace(task, scorer=name, protocol_hash=hashed, asked_for=None if same else asked_for)


def _data_of(task: TaskResult, seed: int, folder: Path, data: str | Path | None, named: _Named) -> TaskData:
    """The problems that were asked, with their gold answers."""
    sha256, revision = str(task.data["sha256"]), task.data["revision"]
    own = named.find(task)
    known = own or (None if is_held_out(task.title) else all_tasks().get(task.name))
    held_out = held_out_by_run(task.name)
    for questions, shown in candidates(task, recipe_above(folder), seed) if data is None and own is None else ():
        if questions_hash(questions) == sha256 and shown_hash(shown) == task.examples:
            return TaskData(known or held_out, questions, str(task.data["source"]), revision, sha256, (), shown)
    if known is None:
        hint = "a run's own problems are found where its recipe.yaml lies above the folder"
        hint = hint if is_held_out(task.title) else f"name their file: --tasks {task.data['source']}"
        raise PerlError(f"the problems of {task.name} are not here", str(folder), hint)
    place = Path(data).expanduser() if data else None
    at = replace(known, revision=revision or known.revision)
    found = load_task_data(at, place, len(task.problems), task.few_shot, seed)
    if found.sha256 != sha256 or shown_hash(found.examples) != task.examples:
        message = f"the problems of {task.name} in {found.source} are not those that were asked"
        if own is not None:
            raise PerlError(message, "--tasks", "name the file, and its --columns, of then")
        raise PerlError(message, "--data" if data else str(folder), "name the folder with the data of then by --data")
    return found


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


def _scored(task: TaskResult, groups: Mapping[Who, Groups], pass_at: Sequence[int]) -> TaskResult:
    shown = {k for score in (task.base, task.adapter) if score is not None for k in score.pass_at}
    k = len(next(iter(groups.values()))[0])
    wrong = [n for n in pass_at if not 1 <= n <= k]
    raise_all(PerlError, [Mistake(f"there is no pass@{n} of {k} completions", "--pass-at", f"1 to {k}") for n in wrong])
    return with_figures(replace(task, lighteval={}), groups, sorted({*shown, *pass_at}))


def _beside_lighteval(
    tasks: Sequence[TaskResult],
    samples: Mapping[str, Mapping[Who, Groups]],
    known: Mapping[str, TaskData],
) -> list[TaskResult]:
    """The tasks with lighteval's own scores of the same completions."""
    own = {
        who: scored_by_lighteval(
            [known[task.name] for task in tasks if who in samples[task.name]],
            {name: groups[who] for name, groups in samples.items() if who in groups},
        )
        for who in WHO
    }
    return [
        replace(task, lighteval={who: scores[task.name] for who, scores in own.items() if task.name in scores})
        for task in tasks
    ]
