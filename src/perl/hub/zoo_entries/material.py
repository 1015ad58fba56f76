"""What an entry of the zoo is made of: an adapter's files, its scores, counted again, its recipe, its log.

run folder -> Material; results, counted again -> scores of an entry

Where an adapter was found makes no difference to whoever has its material.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.protocol import Protocol, asking_of
from perl.evaluation.scoring.results import Results, TaskResult
from perl.hub.card.candidate import find_candidate, identity_mistakes, recount_candidate, why_unscored
from perl.hub.card.contradictions import contradictions
from perl.hub.card.facts import RUN_FACTS, RunFacts, made_facts, read_run_facts
from perl.hub.card.published import METRICS, PUBLIC_RECIPE, Files, evenly
from perl.hub.card.scores_check import policy_mistakes, words_mistakes
from perl.hub.push.outbox import read_pushes
from perl.hub.push.package import package_candidate
from perl.policy.model import public_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.zoo.entry import Entry, TaskScore

_CURVE_POINTS = 64
_SAME = ("method", "settings", "seed", "seconds", "hardware", "trainable_parameters", "versions")


@dataclass(frozen=True)
class Material:
    """What is known of an adapter.

    Attributes:
        origin: Where it was found.
        where: What the user named, for errors.
        name: What it may be called.
        files: Name -> bytes of the adapter's files, of those that are on this machine.
        sha256: Name -> SHA-256 of both.
        size: Bytes of both.
        results: Of exactly this adapter.
        scores: What they say, checked.
        repo: On the Hub, if it is there.
        revision: Its commit.
        recipe: How it was trained, if that is known.
        known: Further fields of an entry.
    """

    origin: Literal["run", "hub"]
    where: str
    name: str
    files: Mapping[str, bytes]
    sha256: Mapping[str, str]
    size: int
    results: Results
    scores: Sequence[TaskScore]
    repo: str | None = None
    revision: str | None = None
    recipe: Recipe | None = None
    known: Mapping[str, Any] = field(default_factory=dict)


def of_run(folder: Path) -> Material:
    """A run's final adapter; of its folder ``best`` the best one.

    Raises:
        PerlError: The run has none, or no results of it, or they do not add up.
    """
    a_run = (folder / "run.json").is_file()
    run = Run.read(folder if a_run else folder.parent)
    candidate = find_candidate(run, "final" if a_run else "best")
    if candidate.results is None:
        nothing = Mistake("its adapter was not evaluated", str(run.path), f"perl eval --adapter {run.path} --tasks ...")
        wrong = why_unscored(candidate) or nothing
        raise PerlError(wrong.message, wrong.where, wrong.hint)
    raise_all(PerlError, identity_mistakes(candidate))
    config = (candidate.folder / CONFIG).read_bytes()
    package = package_candidate(candidate)  # its config names no folder of this machine
    files = {name: package.files[name] for name in (CONFIG, WEIGHTS)}
    scores = checked_scores(recount_candidate(candidate), candidate.sha256, config, str(run.path))
    facts = read_run_facts(package.files[RUN_FACTS])
    raise_all(PerlError, contradictions(facts, package.files)[0])
    pushed = [push for push in read_pushes(run) if push.status == "done" and push.sha256 == candidate.sha256]
    return Material(
        origin="run",
        where=str(run.path),
        name=run.path.resolve().name,
        files=files,
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        size=sum(map(len, files.values())),
        results=candidate.results,
        scores=scores,
        repo=pushed[-1].repo_id if pushed else None,
        revision=pushed[-1].commit if pushed else None,
        recipe=Recipe.of_run(run.path / "recipe.yaml"),
        known={
            "created": str(run.facts.get("created", ""))[:10] or None,
            **of_facts(facts),
            **of_log(read_log(run.metrics), candidate.step),
            **of_policy(candidate.results),
        },
    )


def of_facts(facts: RunFacts) -> dict[str, Any]:
    """What is reported of a training, beside the log."""
    return {
        **{name: getattr(facts, name) for name in _SAME},
        "algorithm": facts.loss,
        "steps": facts.step,
        "licence": facts.licence.identifier if facts.licence else None,
    }


def entry_facts(entry: Entry, files: Files) -> tuple[list[Mistake], list[str]]:
    """Where an entry says of a training what its adapter and its recipe contradict, and what it says unconfirmed.

    Args:
        entry: What others report is theirs to say.
        files: The adapter's.

    Raises:
        PerlError: A fact has not the form that perl writes, or the recipe cannot be trained.
    """
    if entry.provenance == "reported":
        return [], ["everything beside its scores"]
    steps = [1, *(step for step, _ in entry.curve), *([entry.steps] if entry.steps else [])]
    files = {**files, METRICS: "\n".join(json.dumps({"step": step}) for step in steps).encode()}
    files |= {PUBLIC_RECIPE: json.dumps(entry.recipe).encode()} if entry.recipe else {}
    same = {"revision": "base_revision", "quantization": "base_quantization", "loss": "algorithm", "step": "steps"}
    facts = {name: getattr(entry, same.get(name, name)) for name in (*_SAME, *same, "base")}
    wrong, reported = contradictions(made_facts(facts, entry.name), files, facts)
    reported += ["rewards"] if entry.recipe else []
    reported += [name for name in ("licence", "seeds", "tokens", "curve", "notes", "created") if getattr(entry, name)]
    words = {RUN_FACTS: "the entry", PUBLIC_RECIPE: "its recipe", METRICS: "its curve"}
    told = re.compile("|".join(map(re.escape, words)))
    return [Mistake(told.sub(lambda word: words[word[0]], f"{one.where}: {one.message}")) for one in wrong], reported


def of_log(rows: Sequence[Mapping[str, Any]], last_step: float = math.inf) -> dict[str, Any]:
    """Tokens and learning curve, up to a step."""
    rows = [row for row in rows if _is_number(row.get("step")) and row["step"] <= last_step]
    tokens = [row["num_tokens"] for row in rows if _is_number(row.get("num_tokens"))]
    points = [(int(row["step"]), float(row["reward"])) for row in rows if _is_number(row.get("reward"))]
    return {"tokens": int(tokens[-1]) if tokens else None, "curve": evenly(points, _CURVE_POINTS)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def of_policy(results: Results) -> dict[str, Any]:
    """The name of what was evaluated, and on which base."""
    subject = results.subject
    base, revision = public_name(str(subject.get("base")), subject.get("base_revision"))
    known = {name: subject.get(name) for name in ("base_sha256", "policy", "base_quantization")}
    return {"base": base, "base_revision": revision, **known}


def checked_scores(found: Recount, adapter_sha256: str, config: bytes, where: str) -> list[TaskScore]:
    """The scores of a results file, as an entry has them.

    Args:
        found: Results, counted again.
        adapter_sha256: Of the weights that they must belong to.
        config: The ``adapter_config.json`` beside them.
        where: Names them in an error.

    Raises:
        PerlError: They are another policy's, or a figure of the file is not what was counted.
    """
    wrong = [*policy_mistakes(found.results, config, adapter_sha256, where), *words_mistakes(found.results)]
    raise_all(PerlError, [replace(mistake, hint=f"perl eval --adapter {where}") for mistake in wrong])
    raise_all(PerlError, found.mistakes_at(where))
    for task in found.results.tasks:
        if task.adapter is None:
            raise PerlError(f"its results have no score of the adapter on {task.name}", where, "perl eval scores it")
    return [score_of(task) for task in found.results.tasks]


def score_of(task: TaskResult) -> TaskScore:
    """A score that was measured, as an entry has it."""
    base = task.base
    return TaskScore(
        task=task.name,
        metric=f"avg@{task.score.k}",
        k=task.score.k,
        n=task.score.n,
        adapter=task.score.accuracy,
        stderr=task.score.stderr,
        base=base.accuracy if base else None,
        base_stderr=base.stderr if base else None,
        protocol_hash=task.protocol_hash,
        few_shot=task.few_shot,
    )


def protocol_facts(results: Results) -> dict[str, Any]:
    """How an entry says it was evaluated: the protocol, the chat template and the engine."""
    engine = {name: results.engine.get(name) for name in ("backend", "dtype")}
    return {
        **{name: getattr(results.protocol, name) for name in Protocol.__dataclass_fields__},
        "chat_template": results.subject.get("chat_template"),
        **asking_of(results.subject),
        **engine,
    }
