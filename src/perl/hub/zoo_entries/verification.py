"""Evaluates an entry of the zoo again, and says whether it scores what the entry says.

Entry -> adapter, evaluated under the entry's own protocol -> scores then and now
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perl.errors import PerlError, did_you_mean
from perl.evaluation.evaluate import carry_out
from perl.evaluation.policies import load_policies
from perl.evaluation.protocol import PRESETS, Protocol
from perl.evaluation.recounting.folder import recount_folder
from perl.evaluation.request import EvalSettings, Evaluation, plan_evaluation
from perl.evaluation.results import Results, TaskResult
from perl.evaluation.score import Score
from perl.evaluation.task import all_tasks
from perl.hub.zoo_entries.scores import checked_scores, protocol_facts
from perl.policy.name import adapter_config_digest
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.download import fetch_adapter, zoo_adapter
from perl.recipe.engines import Backend
from perl.run.files import sha256_of
from perl.zoo.catalogue import Zoo
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import interval

Verdict = Literal["identical", "agrees", "differs", "unclear"]

# How often chance may take a score further apart than is said to be chance. Adapter, base and gain are looked at, by
# errors that are estimates themselves: together one time in twenty at most.
_WRONG_OF_A_SCORE = 0.01
# A preset that leaves nothing to the base's generation settings, for protocols that name none of ours.
_NEUTRAL = "perl-paper"


@dataclass(frozen=True)
class Remeasured:
    """A score then and now.

    Attributes:
        task: Name.
        metric: As the entry has it.
        then: In the entry.
        now: Measured now.
        stderr: Of the difference; None: it cannot be known.
        reach: How far apart chance takes them 99 times in 100; None: it cannot be known.
        base_then: The base's score in the entry; None: it has none.
        base_now: Measured now; None: it is not compared.
        differs: Which of ``adapter``, ``base`` and ``gain`` are further apart than that.
        verdict: ``identical``: the very same number, of base and adapter; ``agrees``: not further apart than chance
            takes them; ``differs``; ``unclear``: there is no standard error.
    """

    task: str
    metric: str
    then: float
    now: float
    stderr: float | None
    reach: float | None
    base_then: float | None
    base_now: float | None
    differs: tuple[str, ...]
    verdict: Verdict

    def __str__(self) -> str:
        """One line."""
        chance = "" if self.reach is None else f", chance takes them {100 * self.reach:.1f} apart"
        change = f"{100 * (self.now - self.then):+.1f}{chance}"
        line = f"{self.task}: {self.verdict}, {100 * self.then:.1f} then, {100 * self.now:.1f} now ({change})"
        if self.base_then is None or self.base_now is None:
            return line
        base = f"the base {100 * self.base_then:.1f} then, {100 * self.base_now:.1f} now"
        others = [of for of in self.differs if of != "adapter"]
        return f"{line}; {base}" + (f"; not the same: {' and '.join(others)}" if others else "")


@dataclass(frozen=True)
class Verification:
    """An entry, evaluated again.

    Attributes:
        name: The entry's.
        scores: One a task.
        notes: What was not the same.
        results: What was measured.
    """

    name: str
    scores: tuple[Remeasured, ...]
    notes: tuple[str, ...]
    results: Results

    @property
    def agrees(self) -> bool:
        """Whether no score differs."""
        return all(score.verdict != "differs" for score in self.scores)

    def lines(self) -> Iterator[str]:
        """For a person to read."""
        yield from map(str, self.scores)
        yield from self.notes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        scores = [asdict(score) for score in self.scores]
        return {"name": self.name, "agrees": self.agrees, "scores": scores, "notes": list(self.notes)}


def verify(
    zoo: Zoo,
    name: str,
    tasks: Sequence[str] | None = None,
    k: int | None = None,
    limit: int | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
    backend: Backend = "auto",
) -> Verification:
    """Evaluates an entry's adapter again under the entry's own protocol.

    With the same seed, engine and type of weights the same completions are drawn, so that the score should be
    identical. Otherwise the difference, of adapter, base and gain, is compared with what chance alone makes of it: the
    chance of the completions where the problems are the same, of both scores where they are not.

    Args:
        zoo: Where the entry is.
        name: With or without ``zoo:``.
        tasks: Some of the entry's; None: all.
        k: Completions a problem; None: the entry's.
        limit: Only the first so many problems.
        data: Folder with the tasks' data; None: the Hub.
        output: Folder for the results; None: a temporary one.
        backend: What draws completions.

    Raises:
        PerlError: The entry has no such score, its adapter is unreachable or not the one it names, or its tasks are
            not ours.
    """
    entry = zoo.entry(name)
    scores = _wanted(entry, tasks)
    settings = EvalSettings(backend=backend, lighteval=False, base_cache=False)
    with tempfile.TemporaryDirectory() as temporary:
        adapter = zoo_adapter(entry.name, zoo)
        results = _evaluate(entry, scores, adapter, k, data, Path(output or temporary).expanduser(), settings, limit)
    return compare(entry, scores, results)


def reproduced(entry: Entry, folder: Path) -> Entry:
    """A reported entry of an adapter on the Hub, evaluated here: with the scores that were found.

    Args:
        entry: Names repository, commit and SHA-256 of the adapter's files.
        folder: For the results.

    Raises:
        PerlError: As :func:`verify`.
    """
    if entry.adapter.repo is None:
        raise PerlError("names no repository", entry.name)
    place = entry.adapter
    adapter = fetch_adapter(str(place.repo), place.revision, place.subfolder, place.sha256)
    scores = _wanted(entry, None)
    results = _evaluate(entry, scores, adapter, None, None, folder, EvalSettings(lighteval=False, base_cache=False))
    found = compare(entry, scores, results)
    reported = ", ".join(f"{100 * score.then:.1f} on {score.task}" for score in found.scores)
    config = (adapter / CONFIG).read_bytes()
    return entry.model_copy(
        update={
            "provenance": "reproduced",
            "scores": checked_scores(recount_folder(folder), place.sha256[WEIGHTS], config, entry.name),
            "protocol": _named_as_then(protocol_facts(results), entry),
            "base_sha256": results.subject.get("base_sha256"),
            "policy": results.subject.get("policy"),
            "notes": [f"Evaluated here; its author reports {reported}.", *entry.notes[1:]],
        }
    )


def compare(entry: Entry, scores: Sequence[TaskScore], results: Results) -> Verification:
    """What an entry says beside what was measured.

    Args:
        entry: Says then.
        scores: Those of its scores that were measured again.
        results: Say now.
    """
    notes = []
    now = results.subject.get("base_sha256")
    same_base = entry.base_sha256 is None or entry.base_sha256 == now
    if not same_base:
        notes.append(f"the base is another one: {str(entry.base_sha256)[:12]} then, {str(now)[:12]} now")
    if not entry.protocol:
        notes.append(f"the entry does not say how it was evaluated; now: {results.protocol}")
    if any(score.stderr is None for score in scores):
        notes.append("a score without a standard error is taken to have the one that was measured now")
    here = {name: results.engine.get(name) for name in ("backend", "dtype")}
    then = {name: entry.protocol.get(name) for name in here}
    if entry.protocol and here != then:
        words = [" ".join(str(facts[name]) for name in here) for facts in (then, here)]
        notes.append(f"the engine is another one: {words[0]} then, {words[1]} now")
    again = tuple(_remeasured(score, results.task(score.task)) for score in scores)
    return Verification(entry.name, again, tuple(notes), results)


def _wanted(entry: Entry, tasks: Sequence[str] | None) -> list[TaskScore]:
    """Scores that can be measured again."""
    ours = all_tasks()
    for task in tasks or ():
        if entry.score(task) is None:
            hint = did_you_mean(task, [s.task for s in entry.scores])
            raise PerlError(f"has no score on {task!r}", entry.name, hint)
    wanted = [score for score in entry.scores if not tasks or score.task in tasks]
    known = [score for score in wanted if score.task in ours]
    if not known or (tasks and len(known) < len(wanted)):
        unknown = next((score.task for score in wanted if score.task not in ours), None)
        what = f"cannot be evaluated on {unknown!r}, which is not a task of perl eval" if unknown else "has no scores"
        raise PerlError(what, entry.name, "perl eval --list-tasks")
    return known


def _evaluate(
    entry: Entry,
    scores: Sequence[TaskScore],
    adapter: Path,
    k: int | None,
    data: str | Path | None,
    folder: Path,
    settings: EvalSettings,
    limit: int | None = None,
) -> Results:
    """Measures scores under the entry's protocol; tasks with the same number of problems at a time."""
    base = f"{entry.base}@{entry.base_revision}" if entry.base_revision else entry.base
    results, policies = None, None
    for count in dict.fromkeys(score.n for score in scores):
        some = [score for score in scores if score.n == count]
        limits = [number for number in (limit, count) if number is not None]
        shown = {score.task: score.few_shot for score in some if score.few_shot}
        chosen = _as_then(entry, replace(settings, limit=min(limits) if limits else None, few_shot=shown))
        then = _protocol(entry).k if entry.protocol else next((score.k for score in some if score.k), None)
        completions = k or then
        plan = plan_evaluation(str(adapter), base, [score.task for score in some], completions, data, folder, chosen)
        plan = replace(plan, subject=replace(plan.subject, name=f"zoo:{entry.name}"))
        if limit is None and k is None:
            _check_protocol(entry, some, plan)
        policies = policies or load_policies(plan.subject, plan.device)
        results = carry_out(plan, policies)
    if results is None:
        raise ValueError("there are no scores to measure")
    now = (sha256_of(adapter / WEIGHTS), adapter_config_digest((adapter / CONFIG).read_bytes()))
    if tuple(results.subject.get(f"{of}_sha256") for of in ("adapter", "adapter_config")) != now:
        raise PerlError("changed while it was evaluated", str(adapter))
    return results


def _as_then(entry: Entry, settings: EvalSettings) -> EvalSettings:
    """Settings that give the entry's protocol; of an entry that has none the usual ones."""
    if not entry.protocol:
        return settings
    protocol = _protocol(entry)
    if entry.protocol.get("chat_template_given"):
        raise PerlError("was asked with a chat template that the entry does not hold", entry.name)
    switch = entry.protocol.get("thinking")
    return replace(
        settings,
        thinking=None if switch is None else switch == "on",
        top_k=protocol.top_k,
        min_p=protocol.min_p,
        repetition_penalty=protocol.repetition_penalty,
        preset=protocol.preset if protocol.preset in PRESETS else _NEUTRAL,
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        max_new_tokens=protocol.max_new_tokens,
        system_prompt=protocol.system_prompt,
        seed=protocol.seed,
    )


def _named_as_then(protocol: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """The protocol with the preset that the entry names, whose settings it has, and not what they were looked up in."""
    return {**protocol, "preset": _protocol(entry).preset} if entry.protocol else protocol


def _protocol(entry: Entry) -> Protocol:
    fields = Protocol.__dataclass_fields__
    try:
        return Protocol(**{name: value for name, value in entry.protocol.items() if name in fields})
    except TypeError as error:
        raise PerlError(f"its protocol cannot be read: {error}", entry.name) from None


def _check_protocol(entry: Entry, scores: Sequence[TaskScore], plan: Evaluation) -> None:
    """Refuses what cannot be evaluated as it was, before weights are loaded."""
    if entry.protocol:
        asked, then = plan.protocol.drawn(), _protocol(entry).drawn()
        other = [f"{name} {then[name]} then, {asked[name]} now" for name in then if then[name] != asked[name]]
        if other:
            raise PerlError(f"cannot be evaluated as it was: {'; '.join(other)}", entry.name)
    now = {task.request.task: task.protocol_hash for task in plan.tasks}
    for score in scores:
        if score.protocol_hash is not None and now[score.task] != score.protocol_hash:
            what = "cannot be evaluated as it was: the task, its data or the longest completion changed since"
            raise PerlError(f"{score.task} {what}", entry.name, "--data with the data of then")


def _remeasured(score: TaskScore, found: TaskResult) -> Remeasured:
    measured = found.score
    same_problems = score.protocol_hash == found.protocol_hash or (score.n == measured.n and score.k is not None)
    rows = [row for row in (problem.adapter for problem in found.problems) if row is not None]
    stderr, reach = _chance(score, score.adapter, score.stderr, measured, rows if same_problems else [])
    apart = {"adapter": (measured.accuracy - score.adapter, reach)}
    base = found.base if score.base is not None else None
    if base is not None and score.base is not None:
        rows = [row for row in (problem.base for problem in found.problems) if row is not None]
        _, base_reach = _chance(score, score.base, score.base_stderr, base, rows if same_problems else [])
        apart["base"] = base.accuracy - score.base, base_reach
        of_both = None if reach is None or base_reach is None else math.hypot(reach, base_reach)
        apart["gain"] = apart["adapter"][0] - apart["base"][0], of_both
    differs = tuple(of for of, (distance, far) in apart.items() if far is not None and abs(distance) > far)
    equal = all(distance == 0 for distance, _ in apart.values())
    if equal and (measured.n, measured.k) == (score.n, score.k):
        verdict: Verdict = "identical"
    elif differs:
        verdict = "differs"
    else:
        verdict = "unclear" if reach is None else "agrees"
    now = None if base is None else base.accuracy
    return Remeasured(
        score.task, score.metric, score.adapter, measured.accuracy, stderr, reach, score.base, now, differs, verdict
    )


def _chance(
    score: TaskScore, then: float, stderr: float | None, measured: Score, rows: Sequence[Sequence[bool]]
) -> tuple[float | None, float | None]:
    """Standard error of now less then, and how far apart chance takes them 99 times in 100; None: nobody knows.

    Where the same problems were asked, only the completions were drawn anew: the variance of a problem's share of right
    answers is p(1-p)/k, estimated without bias from k >= 2 completions by p(1-p)/(k-1). Problems that all came out
    alike have none, which is no certainty: each score has the interval of :mod:`perl.zoo.intervals`, and two are
    put together as in :func:`perl.zoo.ranking.differ`.

    Args:
        score: Of the entry: how much was asked then.
        then: The score, or the base's.
        stderr: Its standard error.
        measured: The same now.
        rows: Rights and wrongs of each problem now; empty where other problems were asked then.
    """
    if score.k and measured.k > 1 and rows:
        shares = [statistics.fmean(row) for row in rows]
        one = sum(p * (1 - p) for p in shares) * measured.k / (measured.k - 1) / len(shares) ** 2
        errors = math.sqrt(one / measured.k), math.sqrt(one / score.k)
        counts = len(rows) * measured.k, len(rows) * score.k
    elif measured.stderr is None:
        return None, None
    else:
        errors = measured.stderr, measured.stderr if stderr is None else stderr
        counts = measured.n, score.n or measured.n
    if min(counts) < 2:
        return math.hypot(*errors), None
    means = measured.accuracy, then
    ends = [
        interval(mean, min(error, math.sqrt(mean * (1 - mean) / (count - 1))), count, 1 - _WRONG_OF_A_SCORE)
        for mean, error, count in zip(means, errors, counts, strict=True)
    ]
    toward = (0, 1) if then < measured.accuracy else (1, 0)
    reach = math.hypot(measured.accuracy - ends[0][toward[0]], then - ends[1][toward[1]])
    return math.hypot(*errors), reach
