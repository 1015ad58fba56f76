"""Evaluates an entry of the zoo again, and says whether it scores, and is, what the entry says.

Entry -> adapter, evaluated under the entry's own protocol -> scores then and now; what its files contradict
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perl.data import heldout_name
from perl.errors import Mistake, PerlError, RecipeError, did_you_mean
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.evaluate import carry_out
from perl.evaluation.scoring.protocol import PRESETS
from perl.evaluation.scoring.results import Results
from perl.evaluation.scoring.task import all_tasks
from perl.hub.zoo_entries.material import entry_facts, held_out_of_sandbox, score_of
from perl.policy.saved.download import CONFIG, WEIGHTS, zoo_adapter
from perl.recipe.recipe import load_recipe
from perl.run.tables import percent
from perl.zoo.catalogue import Zoo
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_interval
from perl.zoo.ranking import differ

Verdict = Literal["identical", "agrees", "differs"]
# A preset that leaves nothing to the base's generation settings, for protocols that name none of ours.
_NEUTRAL = "perl-paper"
_DTYPES = ("float32", "bfloat16", "float16")
_DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "system_prompt", "seed")


@dataclass(frozen=True)
class Remeasured:
    """A score then and now.

    Attributes:
        task: Name.
        then: In the entry.
        now: Measured now.
        base_then: The base's score in the entry; None: it has none.
        base_now: Measured now.
        verdict: ``identical``: the very same numbers; ``differs``: adapter or base are further apart than the intervals
            of both let them be (:func:`perl.zoo.ranking.differ`).
    """

    task: str
    then: float
    now: float
    base_then: float | None
    base_now: float | None
    verdict: Verdict

    def __str__(self) -> str:
        """One line."""
        line = f"{self.task}: {self.verdict}, {percent(self.then)} then, {percent(self.now)} now"
        return line + f"; the base {percent(self.base_then)} then, {percent(self.base_now)} now"


@dataclass(frozen=True)
class Verification:
    """An entry, evaluated again.

    Attributes:
        name: The entry's.
        scores: One a task.
        notes: What was not the same.
        results: What was measured.
        mistakes: Where the entry says something else than the adapter's files, its own recipe, or what was measured.
        reported: What it says and nothing here confirms.
    """

    name: str
    scores: tuple[Remeasured, ...]
    notes: tuple[str, ...]
    results: Results
    mistakes: tuple[Mistake, ...] = ()
    reported: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether no score differs and nothing is contradicted."""
        return not self.mistakes and all(score.verdict != "differs" for score in self.scores)

    def lines(self) -> Iterator[str]:
        """For a person to read."""
        yield from map(str, (*self.scores, *self.mistakes))
        yield from self.notes
        yield from [f"reported only: {', '.join(self.reported)}"] if self.reported else []

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        lists = {"mistakes": [*map(str, self.mistakes)], "notes": [*self.notes], "reported": [*self.reported]}
        return {"name": self.name, "agrees": self.agrees, "scores": [asdict(score) for score in self.scores], **lists}


def verify(
    zoo: Zoo,
    name: str,
    tasks: Sequence[str] | None = None,
    k: int | None = None,
    limit: int | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
) -> Verification:
    """Evaluates an entry's adapter again under the entry's own protocol.

    With the same seed, engine and type of weights the same completions are drawn, so that the score should be
    identical.

    Args:
        zoo: Where the entry is.
        name: With or without ``zoo:``.
        tasks: Some of the entry's; None: all.
        k: Completions a problem; None: the entry's.
        limit: Only the first so many problems.
        data: Folder with the tasks' data; None: the Hub.
        output: Folder for the results; None: a temporary one.

    Raises:
        PerlError: The entry has no such score, its adapter is unreachable or not the one it names, or it cannot be
            evaluated as it was.
    """
    entry = zoo.entry(name)
    for task in tasks or ():
        if entry.score(task) is None:
            raise PerlError(f"has no score on {task!r}", entry.name, did_you_mean(task, [s.task for s in entry.scores]))
    wanted = [score for score in entry.scores if not tasks or score.task in tasks]
    scores = [score for score in wanted if score.task in all_tasks()]
    if not scores or (tasks and len(scores) < len(wanted)):
        unknown = ", ".join(score.task for score in wanted if score not in scores)
        what = f"cannot be evaluated on {unknown}, no task of perl eval" if unknown else "has no scores"
        raise PerlError(what, entry.name, "perl eval --list-tasks")
    with tempfile.TemporaryDirectory() as temporary:
        folder, adapter = Path(output or temporary).expanduser(), zoo_adapter(entry.name, zoo)
        wrong, reported = entry_facts(entry, {name: adapter / name for name in (CONFIG, WEIGHTS)})
        own = _as_the_run_asked(entry, Path(temporary))
        names = [own.get(score.task, score.task) for score in scores]
        found = compare(entry, scores, _evaluate(entry, names, scores, adapter, folder, k, limit, data))
        notes = [f"{score.task}: asked as the entry's recipe asks" for score in scores if score.task in own]
        mistakes = (*wrong, *found.mistakes)
        return replace(found, mistakes=mistakes, notes=(*notes, *found.notes), reported=tuple(reported))


def compare(entry: Entry, scores: Sequence[TaskScore], results: Results) -> Verification:
    """What an entry says beside what was measured.

    Args:
        entry: Says then.
        scores: Those of its scores that were measured again.
        results: Say now.
    """
    now = results.subject.get("base_sha256")
    notes = []
    if entry.base_sha256 not in (None, now):
        notes.append(f"the base is another one: {str(entry.base_sha256)[:12]} then, {str(now)[:12]} now")
    facts = entry.protocol, results.engine
    engines = [" ".join(str(of.get(name)) for name in ("backend", "dtype")) for of in facts]
    if entry.protocol and engines[0] != engines[1]:
        notes.append(f"the engine is another one: {engines[0]} then, {engines[1]} now")
    again = tuple(_remeasured(score, score_of(results.task(score.task))) for score in scores)
    said = {"policy": entry.policy if not notes else None, "chat_template": entry.protocol.get("chat_template")}
    wrong = [
        Mistake(f"says {then}, measured is {results.subject.get(fact)}", f"{entry.name}: {fact}")
        for fact, then in said.items()
        if then not in (None, results.subject.get(fact))
    ]
    return Verification(entry.name, again, tuple(notes), results, tuple(wrong))


def _remeasured(then: TaskScore, now: TaskScore) -> Remeasured:
    pairs = [(then, now)]
    if then.base is not None and now.base is not None:
        bases = (one.model_copy(update={"adapter": one.base, "stderr": one.base_stderr}) for one in (then, now))
        pairs.append((next(bases), next(bases)))
    verdict: Verdict = "agrees"
    for old, new in pairs:  # the errors of both are of what was measured now, but none that such a mean cannot have
        n = old.n or new.n
        error = new.stderr if new.stderr is None or not (n and new.n) else new.stderr * math.sqrt(new.n / n)
        if error is not None and n and n > 1:
            error = min(error, math.sqrt(old.adapter * (1 - old.adapter) / (n - 1)))
        if differ(old, score_interval(old.adapter, error, n), new, score_interval(new.adapter, new.stderr, new.n)):
            verdict = "differs"
    same = (now.n, now.k) == (then.n, then.k) and all(old.adapter == new.adapter for old, new in pairs)
    if same and verdict == "agrees":
        # The same completions: all else that is said of them follows, to the last digits.
        verdict = "identical"
        for name, said in then:
            found = getattr(now, name)
            close = (
                isinstance(said, float)
                and isinstance(found, int | float)
                and math.isclose(said, found, rel_tol=1e-9, abs_tol=1e-12)
            )
            if not close and said not in (None, found):
                verdict = "differs"
    return Remeasured(then.task, then.adapter, now.adapter, then.base, now.base, verdict)


def _as_the_run_asked(entry: Entry, folder: Path) -> dict[str, str]:
    """Task -> a recipe, written into the folder, that asks its held-out problems as the run did which is scored."""
    if not entry.recipe or entry.protocol.get("preset") != "recipe":
        return {}
    try:
        recipe = held_out_of_sandbox(load_recipe(entry.recipe, starts=False))
    except RecipeError as error:
        raise error.moved(lambda where: f"{entry.name}: recipe: {where}") from None
    if recipe is None:
        return {}
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    return {str(heldout_name(recipe.data)): str(path)}


def _evaluate(
    entry: Entry,
    names: Sequence[str],
    scores: Sequence[TaskScore],
    adapter: Path,
    folder: Path,
    k: int | None = None,
    limit: int | None = None,
    data: str | Path | None = None,
) -> Results:
    """Measures scores under the entry's protocol; of an entry that has none under the usual one.

    Raises:
        PerlError: It cannot be evaluated as it was; no weights were loaded.
    """
    then = entry.protocol
    if then.get("chat_template_given"):
        raise PerlError("was asked with a chat template that the entry does not hold", entry.name)
    asked: dict[str, Any] = {name: then[name] for name in _DRAWN if name in then}
    if then:
        asked |= {"preset": then["preset"] if then.get("preset") in PRESETS else _NEUTRAL}
    if then.get("thinking") is not None:
        asked["thinking"] = then["thinking"] == "on"
    counts = {score.task: [number for number in (limit, score.n) if number is not None] for score in scores}
    settings = EvalSettings(
        lighteval=False,
        base_cache=False,
        limit={task: min(numbers) for task, numbers in counts.items() if numbers},
        few_shot={score.task: score.few_shot for score in scores if score.few_shot},
        dtype=dtype if (dtype := then.get("dtype")) in _DTYPES else "auto",
        **asked,
    )
    base = f"{entry.base}@{entry.base_revision}" if entry.base_revision else entry.base
    completions = k or then.get("k") or next((score.k for score in scores if score.k), None)
    plan = plan_evaluation(str(adapter), base, names, completions, data, folder, settings)
    now = {task.request.task: task.protocol_hash for task in plan.tasks}
    changed = [s.task for s in scores if s.protocol_hash is not None and now[s.task] != s.protocol_hash]
    if changed and limit is None and k is None:
        what = "cannot be evaluated as it was: the task, its data or the settings changed since"
        raise PerlError(f"{changed[0]} {what}", entry.name, "--data with the data of then")
    return carry_out(replace(plan, subject=replace(plan.subject, name=f"zoo:{entry.name}")))
