"""What an evaluation found, as a record and as files.

scores, protocol, what was evaluated -> Results -> results.json, table.md, problems.png

``results.json`` has lighteval's layout, and under ``perl`` what that has no place for: the base beside the adapter,
every problem, and the hashes that say what the numbers are numbers of.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perl.errors import PerlError
from perl.evaluation.metrics import Difference
from perl.evaluation.protocol import Protocol
from perl.evaluation.results_schema import Who as Who
from perl.evaluation.results_schema import checked
from perl.evaluation.score import Score
from perl.evaluation.task import MATH
from perl.run.files import parse_mapping, write_text

VERSION = 2
"""Of the part under ``perl``."""
HELD_OUT = " (held out)"
"""With which the titles of tasks end that are a run's own held-out problems."""

BESIDE = "-heldout"
"""With which their names end where a table has another task of the same name."""


def is_held_out(title: str) -> bool:
    """Whether a task's title says that its problems are a run's own."""
    return title.endswith(HELD_OUT)


_LARGEST_FILE = 50_000_000
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
        scorer: What judged the completions, see :attr:`perl.evaluation.scorers.Scorer.label`.
        few_shot: Examples before every question.
        examples: SHA-256 of these; None: there are none.
        asked_for: The scorer for which the problems were put, where another one judges now; None: it is the same.
    """

    name: str
    title: str
    protocol_hash: str
    max_new_tokens: int
    data: Mapping[str, str | None]
    base: Score | None = None
    adapter: Score | None = None
    difference: Difference | None = None
    problems: tuple[ProblemResult, ...] = ()
    lighteval: Mapping[str, OtherScore] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)
    scorer: str = MATH
    few_shot: int = 0
    examples: str | None = None
    asked_for: str | None = None

    @property
    def label(self) -> str:
        """As lighteval's readers know it: its name and the number of examples."""
        return f"{self.name}|{self.few_shot}"

    @property
    def score(self) -> Score:
        """Of what was evaluated: the adapter, or a base that was evaluated alone."""
        score = self.adapter or self.base
        if score is None:
            raise ValueError(f"{self.name} was not scored")
        return score

    @property
    def score_by_lighteval(self) -> OtherScore | None:
        """Lighteval's score of what was evaluated."""
        return self.lighteval.get("adapter" if self.adapter else "base")


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
    engine: Mapping[str, Any]
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
            "results": {task.label: _labels(task) for task in self.tasks},
            "versions": {},
            "config_tasks": {
                task.label: {
                    "name": task.name,
                    "hf_repo": task.data["source"],
                    "hf_revision": task.data["revision"],
                }
                for task in self.tasks
            },
            "summary_tasks": {},
            "summary_general": {},
            "perl": self.facts(),
        }

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "version": VERSION,
            "subject": dict(self.subject),
            "protocol": asdict(self.protocol),
            "engine": dict(self.engine),
            "versions": dict(self.versions),
            "verifier": self.verifier,
            "seconds": self.seconds,
            "tasks": {task.name: _plain(task) for task in self.tasks},
        }

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


def read_results(path: str | Path) -> Results:
    """Results from a file, or from the folder that it is in.

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
    return parse_results(content, str(file))


def parse_results(content: bytes, where: str, *, scored: bool = True) -> Results:
    """Results from what a file holds.

    Args:
        content: Of ``results.json``, which may hold anything.
        where: Names it in an error.
        scored: False: it may hold tasks without scores, whose completions are not judged yet.

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
    if (other := task.score_by_lighteval) is not None:
        ours |= {f"avg@n:n={score.k}": other.accuracy, f"avg@n:n={score.k}_stderr": other.stderr}
    return ours


def _plain(task: TaskResult) -> dict[str, Any]:
    facts = asdict(task)
    del facts["name"]
    if task.scorer == MATH:
        del facts["scorer"]
    if not task.few_shot:
        del facts["few_shot"], facts["examples"]
    if task.asked_for is None:
        del facts["asked_for"]
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
    facts = checked(found, scored=scored)
    names = ("subject", "protocol", "engine", "versions", "seconds", "verifier")
    tasks = tuple(_task(name, task) for name, task in facts["tasks"].items())
    return Results(**{name: facts[name] for name in names}, tasks=tasks)


def _task(name: str, facts: dict[str, Any]) -> TaskResult:
    rows = {id: {who: tuple(c == "1" for c in row) for who, row in f.items()} for id, f in facts["problems"].items()}
    problems = tuple(ProblemResult(id, row.get("base"), row.get("adapter")) for id, row in rows.items())
    lighteval = {who: OtherScore(**score) for who, score in facts["lighteval"].items()}
    return TaskResult(name=name, **{**facts, "problems": problems, "lighteval": lighteval})
