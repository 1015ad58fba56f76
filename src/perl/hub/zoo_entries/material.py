"""What an entry of the zoo is made of: an adapter's files, its scores, counted again, its recipe, its log.

run folder or Hub id[@revision] -> Material; results, counted again -> scores of an entry; our tag -> rows of a list

Where an adapter was found makes no difference to whoever has its material. A repository is untrusted: only the files
named here are fetched, at one commit, none that is larger than such a file can be, and nothing in them is trusted.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, get_session

from perl.algorithms.train_fields import train_fields
from perl.errors import Mistake, PerlError, first_line, raise_all
from perl.evaluation.recounting.files import PUBLISHED, find_golds, recount_published
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.protocol import Protocol, asking_of
from perl.evaluation.scoring.results import Results, TaskResult
from perl.hub.card import published
from perl.hub.card.candidate import find_candidate, identity_mistakes, recount_candidate, said_before, why_unscored
from perl.hub.card.check import changed_files, policy_mistakes, words_mistakes
from perl.hub.card.facts import RUN_FACTS, RunFacts, made_facts, read_run_facts
from perl.hub.card.render import OURS, SANDBOX_TAGS, adapter_tag
from perl.hub.cards import open_repository, weights_of
from perl.hub.gate import largest
from perl.hub.push.outbox import read_pushes
from perl.hub.push.package import package_candidate
from perl.methods.registry import METHODS
from perl.policy.hub_files import HUB_ERRORS, TIMEOUT_SECONDS, fetch
from perl.policy.model import public_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.run.tables import Row, fact_cell, plain
from perl.sandbox import is_sandbox
from perl.zoo.entry import Entry, TaskScore

_READ = (CONFIG, RUN_FACTS, published.PUBLIC_RECIPE, published.METRICS, published.SCORES, PUBLISHED)
_CURVE_POINTS = 64
_SAME = ("method", "settings", "seed", "seconds", "hardware", "trainable_parameters", "versions")
# Of an entry that was trained here what nothing else repeats.
_REPORTED = ("seconds", "hardware", "trainable_parameters", "versions", "licence", "seeds", "tokens", "curve", "notes")


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


def find_material(source: str | Path) -> Material:
    """The material of a run folder, or of a repository on the Hub.

    Raises:
        PerlError: It is neither; or as :func:`of_run` and :func:`of_hub`.
    """
    path = Path(source).expanduser()
    a_best = path.name == "best" and (path.parent / "run.json").is_file()
    if a_best or (path / "run.json").is_file():
        return of_run(path)
    if path.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise PerlError("is neither a run folder nor a name on the Hub (user/name)", str(source))
    return of_hub(str(source))


def of_run(folder: Path) -> Material:
    """A run's final adapter; of its folder ``best`` the best one.

    Raises:
        PerlError: The run has none, or no results of it, or they do not add up.
    """
    a_run = (folder / "run.json").is_file()
    run = Run.read(folder if a_run else folder.parent)
    candidate = find_candidate(run, "final" if a_run else "best")
    counted = recount_candidate(candidate)
    if candidate.results is None or counted is None:
        nothing = Mistake("its adapter was not evaluated", str(run.path), f"perl eval --adapter {run.path} --tasks ...")
        wrong = why_unscored(candidate) or nothing
        raise PerlError(wrong.message, wrong.where, wrong.hint)
    raise_all(PerlError, identity_mistakes(candidate))
    config = (candidate.folder / CONFIG).read_bytes()
    package = package_candidate(candidate)  # its config names no folder of this machine
    files = {name: package.files[name] for name in (CONFIG, WEIGHTS)}
    scores = checked_scores(counted, candidate.sha256, config, str(run.path))
    facts = read_run_facts(package.files[RUN_FACTS])
    raise_all(PerlError, said_before(run, facts) if a_run else [])
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


def held_out_of_sandbox(recipe: Recipe | None) -> Recipe | None:
    """A recipe that holds out the same problems and reads little else; None: it names data that the sandbox has not.

    Nothing of this machine is read, and nothing fetched, because a stranger's recipe names it.
    """
    if recipe is None:
        return None
    data, scored = recipe.data, recipe.eval.model_copy(update={"data": None})
    heldout = data.eval or data.train
    if not (is_sandbox(data.train.name) and is_sandbox(heldout.name)):
        return None
    few = data.model_copy(update={"eval": heldout, "train": data.train.model_copy(update={"limit": 1})})
    return replace(recipe, data=few, eval=scored)


def of_hub(source: str) -> Material:
    """The adapter in a repository.

    Raises:
        PerlError: There is none, it was not pushed by perl, or a file of it is not what it should be.
    """
    name, commit, there = open_repository(source)
    for needed in (CONFIG, WEIGHTS, published.SCORES, RUN_FACTS):
        if needed not in there:
            raise PerlError(f"has no {needed}", source, "only what perl push sends is taken")
    files = {file: fetch(name, commit, there[file], largest(file) or 0) for file in _READ if file in there}
    digest, weights = weights_of(name, commit, there[WEIGHTS])
    if digest is None:
        raise PerlError(f"its {WEIGHTS} is kept as text and too large to be read", source)
    try:
        results, recipe = published.results_in(files), published.public_recipe_in(files)
        facts = read_run_facts(files[RUN_FACTS].read_bytes())
        published.config_in(files)  # which refuses what names code
        changed = changed_files(facts, files, digest)
    except PerlError as error:
        raise error.moved(lambda where: f"{source}: {where}") from None
    if results is None:
        raise PerlError(f"has no {published.SCORES}", source)
    samples = files[PUBLISHED].read_bytes() if PUBLISHED in files else None
    golds = find_golds(results, held_out_of_sandbox(recipe))
    counted = recount_published(files[published.SCORES].read_bytes(), samples, source, golds)
    config = files[CONFIG].read_bytes()
    scores = checked_scores(counted, digest, config, source)
    raise_all(PerlError, [replace(mistake, where=f"{source}: {mistake.where}") for mistake in changed])
    return Material(
        origin="hub",
        where=source,
        name=name.partition("/")[2],
        files={CONFIG: config, **({WEIGHTS: weights.read_bytes()} if weights is not None else {})},
        sha256={CONFIG: sha256_of(files[CONFIG]), WEIGHTS: digest},
        size=(there[CONFIG].size or 0) + (there[WEIGHTS].size or 0),
        results=results,
        scores=scores,
        repo=name,
        revision=commit,
        recipe=recipe,
        known=of_facts(facts) | of_log(published.log_in(files)) | of_policy(results),
    )


def of_facts(facts: RunFacts) -> dict[str, Any]:
    """What is reported of a training, beside the log."""
    return {
        **{name: getattr(facts, name) for name in _SAME},
        "algorithm": facts.loss,
        "steps": facts.step,
        "licence": facts.licence.identifier if facts.licence else None,
    }


def entry_facts(entry: Entry, files: published.Files) -> tuple[list[Mistake], list[str]]:
    """Where an entry says of a training what its adapter and its recipe contradict, and what it says unconfirmed.

    Args:
        entry: What others report is theirs to say.
        files: The adapter's.

    Raises:
        PerlError: A fact has not the form that perl writes.
    """
    if entry.provenance == "reported":
        return [], ["everything beside its scores"]
    others = {"base": entry.base, "loss": entry.algorithm, "step": entry.steps}
    made_facts({name: getattr(entry, name) for name in _SAME} | others, entry.name)
    train, peft, config = entry.recipe.get("train", {}), entry.recipe.get("peft", {}), published.config_in(files)
    usual = train_fields()["loss_type"].default if entry.recipe else None
    asked = {"seed": train.get("seed"), "steps": train.get("max_steps"), "algorithm": train.get("loss_type", usual)}
    asked["method"] = peft.get("method") if peft.get("adapter") is None else None
    wrong = [
        Mistake(f"says {getattr(entry, fact)}, its recipe says {right}", f"the entry: {fact}")
        for fact, right in asked.items()
        if right not in (None, getattr(entry, fact))
    ]
    method = METHODS.get(entry.method)
    if method is not None and not method.starts:  # which are moved into the adapter when it is saved
        for name in entry.settings.keys() - {"target_modules"}:
            said = entry.settings[name]
            right = getattr(config, method.arguments.get(name, name), said)
            if right != said:
                wrong.append(Mistake(f"says {said}, {CONFIG} says {right}", f"the entry: settings.{name}"))
    reported = [name for name in _REPORTED if getattr(entry, name)] + (["rewards"] if entry.recipe else [])
    return wrong, reported


def of_log(rows: Sequence[Mapping[str, Any]], last_step: float = math.inf) -> dict[str, Any]:
    """Tokens and learning curve, up to a step."""
    rows = [row for row in rows if _is_number(row.get("step")) and row["step"] <= last_step]
    tokens = [row["num_tokens"] for row in rows if _is_number(row.get("num_tokens"))]
    points = [(int(row["step"]), float(row["reward"])) for row in rows if _is_number(row.get("reward"))]
    return {"tokens": int(tokens[-1]) if tokens else None, "curve": published.evenly(points, _CURVE_POINTS)}


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


def hub_adapters(limit: int = 100) -> list[Row]:
    """Rows for adapters on the Hub that bear our tag, those changed last first; nobody here has looked at their files.

    Raises:
        PerlError: The Hub is unreachable.
    """
    if constants.HF_HUB_OFFLINE:
        raise PerlError("the Hub is not asked", "HF_HUB_OFFLINE", "unset it")
    api = HfApi()
    try:
        get_session().head(api.endpoint, timeout=TIMEOUT_SECONDS)  # listing would try again and again for long
        listed = list(
            api.list_models(filter=OURS, expand=["sha", "tags", "lastModified"], sort="last_modified", limit=limit)
        )
    except HUB_ERRORS as error:
        raise PerlError(f"{api.endpoint} cannot be asked for adapters: {first_line(error)}") from None
    rows, of_base = list[Row](), adapter_tag("")
    for info in listed:
        tags = list(info.tags or [])
        bases = [sandbox for sandbox, tag in SANDBOX_TAGS.items() if tag in tags]
        bases += [plain(tag.removeprefix(of_base))[:200] for tag in tags if tag.startswith(of_base)]
        facts = {
            "name": info.id,
            "provenance": "on the Hub",
            "base": next(iter(bases), None),
            "method": next((tag for tag in tags if tag in METHODS), None),
            "repo": info.id,
            "revision": info.sha,
            "created": info.last_modified.date().isoformat() if info.last_modified else None,
        }
        rows.append({name: fact_cell(value) for name, value in facts.items()})
    return rows
