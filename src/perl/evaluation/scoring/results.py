"""What an evaluation found, as a record and as files.

scores, protocol, what was evaluated -> Results -> results.json, table.md, problems.png

``results.json`` has lighteval's layout, and under ``perl`` what that has no place for: the base beside the adapter,
every problem, and the hashes that say what the numbers are numbers of.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from perl.errors import PerlError
from perl.evaluation.scoring.metrics import Difference
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.score import Score
from perl.evaluation.scoring.task import MATH
from perl.policy.name import policy_name
from perl.run.files import parse_mapping, write_text
from perl.zoo.intervals import Estimate

Who = Literal["base", "adapter"]
VERSION = 2
"""Of the part under ``perl``."""
HELD_OUT = " (held out)"
"""With which the titles of tasks end that are a run's own held-out problems."""


def is_held_out(title: str) -> bool:
    """Whether a task's title says that its problems are a run's own."""
    return title.endswith(HELD_OUT)


_LARGEST_FILE = 50_000_000
_MOST_COMPLETIONS, _MOST_EXAMPLES = 10_000, 1_000
RESULTS, SAMPLES, TABLE, FIGURE = "results.json", "samples.jsonl", "table.md", "problems.png"


@dataclass(frozen=True)
class ProblemResult:
    """One problem: which completions of base and adapter are right, in the order of their indices."""

    id: str
    base: tuple[bool, ...] | None
    adapter: tuple[bool, ...] | None


@dataclass(frozen=True)
class OtherScore:
    """lighteval's own score of the same completions.

    Attributes:
        accuracy: avg@k by its verdicts.
        stderr: Its standard error, clustered by problem; None for a single problem.
        only_ours: Completions that only our verifier calls right.
        only_lighteval: Completions that only lighteval calls right.
    """

    accuracy: float
    stderr: float | None
    only_ours: int
    only_lighteval: int

    @property
    def estimate(self) -> Estimate:
        """avg@k with its error."""
        return Estimate(self.accuracy, self.stderr)


@dataclass(frozen=True)
class TaskResult:
    """A task.

    Attributes:
        name: The task's.
        title: For people.
        protocol_hash: Two results with the same may be compared.
        max_new_tokens: Tokens after which completions were cut off here.
        data: Where the problems come from: source, revision, sha256.
        base: The base's score; None if it was not scored.
        adapter: The adapter's score; None where a base was evaluated alone.
        difference: Adapter less base, problem by problem.
        lighteval: ``base`` and ``adapter`` -> its own score; empty where lighteval is not installed.
        samples: ``base`` and ``adapter`` -> what their lines in ``samples.jsonl`` have as ``policy``.
        scorer: What judged the completions, see :attr:`perl.evaluation.scoring.scorers.Scorer.label`.
        few_shot: Examples before every question.
        examples: SHA-256 of these; None: there are none.
    """

    name: str
    title: str
    protocol_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    max_new_tokens: Annotated[int, Field(ge=1)]
    data: Mapping[str, str | None]
    base: Score | None = None
    adapter: Score | None = None
    difference: Difference | None = None
    problems: tuple[ProblemResult, ...] = ()
    lighteval: Mapping[Who, OtherScore] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)
    scorer: str = MATH
    few_shot: Annotated[int, Field(ge=0, le=_MOST_EXAMPLES)] = 0
    examples: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @property
    def label(self) -> str:
        """As lighteval's readers know it: its name and the number of examples."""
        return f"{self.name}|{self.few_shot}"

    @property
    def is_scored(self) -> bool:
        """Whether its completions are judged."""
        return self.base is not None or self.adapter is not None

    @property
    def score(self) -> Score:
        """Of what was evaluated: the adapter, or a base that was evaluated alone."""
        score = self.adapter or self.base
        if score is None:
            raise ValueError(f"{self.name} was not scored")
        return score


@dataclass(frozen=True)
class Results:
    """An evaluation.

    Attributes:
        subject: What was evaluated: its name, base, base_revision, base_sha256, adapter_sha256 (of its weights),
            adapter_config_sha256, policy (see :mod:`perl.policy.name`) and chat_template; base_quantization if the
            base was quantised as it was loaded.
        protocol: How.
        engine: What drew the completions: backend, dtype, device, logp_diff (version too, in results of 0.1).
        versions: Of packages.
        seconds: Wall time, earlier starts not counted.
        tasks: In the order requested.
        verifier: Which verifier gave the verdicts.
    """

    subject: Mapping[str, str | None]
    protocol: Protocol
    engine: Mapping[str, str | int | float | None]
    versions: Mapping[str, str]
    seconds: float
    tasks: tuple[TaskResult, ...]
    verifier: str

    def task(self, name: str) -> TaskResult:
        """The result of a task.

        Raises:
            KeyError: It was not evaluated.
        """
        return {task.name: task for task in self.tasks}[name]

    def as_dict(self) -> dict[str, Any]:
        """For ``results.json``."""
        model = {**self.subject, **self.protocol.drawn(), **self.engine}
        return {
            "config_general": {
                "model_name": self.subject["name"],
                "model_config": model,
                "total_evaluation_time_secondes": str(round(self.seconds, 3)),  # lighteval spells it so
            },
            "results": {task.label: _labels(task) for task in self.tasks if task.is_scored},
            "versions": {},
            "config_tasks": {
                task.label: {"name": task.name, "hf_repo": task.data["source"], "hf_revision": task.data["revision"]}
                for task in self.tasks
            },
            "summary_tasks": {},
            "summary_general": {},
            "perl": self.facts(),
        }

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        facts = {**vars(self), "protocol": asdict(self.protocol)}
        return {"version": VERSION, **facts, "tasks": {task.name: _plain(task) for task in self.tasks}}

    def with_tasks_of(self, earlier: "Results") -> "Results":
        """These, with the other tasks of earlier ones of the same policies under the same protocol and engine."""
        names = {task.name for task in self.tasks}
        tasks = (*self.tasks, *(task for task in earlier.tasks if task.name not in names))
        # Where nothing was left to draw, the engine was compared with the policy when all this was drawn.
        known = self.engine.get("logp_diff") is not None
        return replace(self, tasks=tasks, engine=self.engine if known else earlier.engine)

    def of_what(self) -> tuple[Any, ...]:
        """What two sets of tasks must share to be one result."""
        engine = {name: fact for name, fact in self.engine.items() if name != "logp_diff"}
        return dict(self.subject), self.protocol, engine, self.verifier

    def write(self, folder: Path) -> Path:
        """Writes ``results.json`` into a folder, whole or not at all."""
        path = folder / RESULTS
        write_text(path, json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return path


def results_file(path: str | Path) -> Path:
    """The results file that is named, or that lies in a folder or in its ``eval``.

    Raises:
        PerlError: There is none.
    """
    path = Path(path).expanduser()
    places = [path, path / RESULTS, path / "eval" / RESULTS]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise PerlError(f"no results: there is no {RESULTS}", str(path), "perl eval writes them")
    return file


def read_results(path: str | Path, *, scored: bool = True) -> Results:
    """Results from a file, or from the folder that it is in.

    Args:
        path: Of the file, or of the folder.
        scored: False: tasks may have no score yet, whose completions wait to be judged.

    Raises:
        PerlError: There is none, or it is not one of ours.
    """
    file = results_file(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"it has {file.stat().st_size:,} bytes, at most {_LARGEST_FILE:,} are read")
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise PerlError(f"holds no results of perl eval: {error}", str(file)) from None
    return parse_results(content, str(file), scored=scored)


def parse_results(content: bytes, where: str, *, scored: bool = True) -> Results:
    """Results from what a file holds.

    Args:
        content: Of ``results.json``, which may hold anything.
        where: Names it in an error.
        scored: As of :func:`read_results`.

    Raises:
        PerlError: It is not one of ours.
    """
    try:
        return _results(parse_mapping(content)["perl"], scored=scored)
    except (ValueError, KeyError) as error:
        reason = f"{error} is absent" if isinstance(error, KeyError) else str(error)
        raise PerlError(f"holds no results of perl eval: {reason}", where) from None


def _labels(task: TaskResult) -> dict[str, float | None]:
    """What lighteval's readers find: our metrics, and lighteval's own by the names it gives them."""
    score = task.score
    ours: dict[str, float | None] = {f"avg@{score.k}": score.accuracy, f"avg@{score.k}_stderr": score.stderr}
    for k, value in score.pass_at.items():
        ours |= {f"pass@{k}": value, f"pass@{k}_stderr": score.pass_at_stderr.get(k)}
    ours |= {f"maj@{score.k}": score.majority, f"maj@{score.k}_stderr": score.majority_stderr}
    if (other := task.lighteval.get("adapter" if task.adapter else "base")) is not None:
        ours |= {f"avg@n:n={score.k}": other.accuracy, f"avg@n:n={score.k}_stderr": other.stderr}
    return ours


def _plain(task: TaskResult) -> dict[str, Any]:
    facts = asdict(task)
    del facts["name"]
    facts["difference"] = task.difference.as_dict() if task.difference is not None else None
    facts["problems"] = {
        problem.id: {
            who: "".join("1" if r else "0" for r in row)
            for who, row in (("base", problem.base), ("adapter", problem.adapter))
            if row is not None
        }
        for problem in task.problems
    }
    return facts


def _results(found: Any, *, scored: bool) -> Results:  # noqa: ANN401 (JSON)
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(f"its version is {version}, known is {VERSION}")
    try:
        tasks = [_task(name, facts) for name, facts in found["tasks"].items()]
        results = _RESULTS.validate_python({**found, "tasks": tasks})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}") from None
    except (AttributeError, TypeError):
        raise ValueError("its tasks are not those of an evaluation") from None
    if not 1 <= results.protocol.k <= _MOST_COMPLETIONS:
        raise ValueError(f"it has {results.protocol.k:,} completions a problem, at most {_MOST_COMPLETIONS:,} are read")
    for task in results.tasks:
        _check_fit(task, scored=scored)
    subject = results.subject
    digests = (subject["base_sha256"], subject["adapter_sha256"], subject["adapter_config_sha256"])
    if not results.tasks or not isinstance(subject["name"], str) or not isinstance(subject["base"], str):
        raise ValueError("it names no policy, no base or no task")
    if any(digest is not None and _DIGEST.fullmatch(digest) is None for digest in digests):
        raise ValueError("a digest of its policy is not a SHA-256")
    if subject["policy"] != policy_name(str(digests[0]), *digests[1:]):
        raise ValueError("its policy is not the one that its digests name")
    return results


_RESULTS = TypeAdapter(Results)
_TASK_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_DIGEST, _RIGHTS = re.compile(r"[0-9a-f]{64}"), re.compile("[01]+")


def _task(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """A task's record as it is in memory: problems as rows of rights, and NaN where JSON has none."""
    if not all(_RIGHTS.fullmatch(marks) for row in facts["problems"].values() for marks in row.values()):
        raise ValueError(f"{name!r:.60}: what is right of a problem is not written in 0 and 1")
    problems = [
        {"id": id, **{who: [mark == "1" for mark in row[who]] if who in row else None for who in ("base", "adapter")}}
        for id, row in facts["problems"].items()
    ]
    difference = facts["difference"]
    if difference is not None:
        difference = {key: math.nan if value is None else value for key, value in difference.items()}
    return {**facts, "name": name, "problems": problems, "difference": difference}


def _check_fit(task: TaskResult, *, scored: bool) -> None:
    """Scores and problems are of the same policies, and there are as many of each as the scores say."""
    if _TASK_NAME.fullmatch(task.name) is None or ".." in task.name:
        raise ValueError(f"{task.name!r:.60} is not the name of a task")
    digest = task.data.get("sha256") or ""
    if not task.data.get("source") or "revision" not in task.data or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{task.name}: data lacks its source, revision or SHA-256")
    if not task.is_scored:
        if scored:
            raise ValueError(f"{task.name} was not scored, perl eval rescore judges its completions")
        return
    for who, score in (("base", task.base), ("adapter", task.adapter)):
        rows = [row for problem in task.problems if (row := getattr(problem, who)) is not None]
        count, k = (0, 0) if score is None else (score.n, score.k)
        whole = score is None or (count == len(task.problems) and min(count, k) > 0 and k in score.pass_at)
        if len(rows) != count or any(len(row) != k for row in rows) or not whole:
            raise ValueError(f"{task.name}: the score of the {who} is not of {count} problems with {k} completions")
    if task.difference is not None and None in (task.base, task.adapter):
        raise ValueError(f"{task.name}: there is a difference, though one policy only was scored")
