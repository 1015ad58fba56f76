"""One adapter of a run that may be published, with the results that are its own and what the run tells of it.

run folder, final | best | step -> RunAdapter -> RunFacts; RunAdapter -> its scores, counted again

Results belong to an adapter if they name its policy: its config, its weights and the run's base. No others are ever
shown beside it.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants

from perl.errors import Mistake, PerlError, RecipeError, RunFolderError, warn
from perl.evaluation.drawing.subject import model_digests
from perl.evaluation.recounting.files import recount_folder
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.results import RESULTS, Results, read_results
from perl.hub.card.facts import (
    RUN_FACTS,
    Licence,
    RunFacts,
    is_hub_name,
    label,
    made_facts,
    plain_word,
    read_run_facts,
    showable_settings,
)
from perl.hub.card.published import without_paths
from perl.policy.checkpoint import complete_checkpoints, step_of
from perl.policy.hub_files import HUB_ERRORS
from perl.policy.model import public_name
from perl.policy.name import adapter_config_digest, policy_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.facts import best_disagreement, read_best
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.sandbox import is_sandbox

LICENCE_SECONDS = 5.0
"""A card is not worth waiting longer for the Hub."""
_SANDBOX_LICENCE = "apache-2.0"
# Facts that may change after a card was written: how it is published, by which version, and the time, which goes on.
_OF_THE_CARD = {"perl", "name", "repo_id", "licence", "checkpoints", "seconds", "files"}
Which = Literal["final", "best"] | int
"""Which adapter of a run: the final one, the one that scored best, or that of a checkpoint's step."""


@dataclass(frozen=True)
class RunAdapter:
    """An adapter of a run.

    Attributes:
        run: The run.
        which: Which of its adapters.
        folder: With the adapter's config and weights.
        step: Optimizer steps after which it was saved.
        sha256: Of its weights.
        results_folder: With the results of exactly this adapter; None: it was not evaluated.
        results: These results.
        recipe: Of the run, its base in a folder by the whole path; None: it has none.
    """

    run: Run
    which: Which
    folder: Path
    step: int
    sha256: str
    results_folder: Path | None
    results: Results | None
    recipe: Recipe | None = None


def owns(results: Results, weights_sha256: str, config_sha256: str, base_sha256: str | None = None) -> bool:
    """Whether results are those of a policy.

    Args:
        results: Of any policy.
        weights_sha256: Of what was trained: an adapter's weights or a model's.
        config_sha256: Of what its config says of the policy.
        base_sha256: Of its base; None: unknown, so that the one which the results name counts.
    """
    base = base_sha256 or str(results.subject.get("base_sha256"))
    return results.subject.get("policy") == policy_name(base, weights_sha256, config_sha256)


def find_candidate(run: Run, which: Which = "final") -> RunAdapter:
    """Finds one of a run's adapters.

    Raises:
        RunFolderError: The run has no such adapter, or trained a model without one.
    """
    if run.facts.get("method") == "full":
        hint = f"hf upload user/name {run.adapter}"
        raise RunFolderError("trained the model itself, there is no adapter", str(run.path), hint)
    if which == "final":
        folder, step, places = run.adapter, int(run.facts.get("steps", 0)), [run.path / "eval"]
    elif which == "best":
        folder, step = run.path / "best" / "adapter", int(_best(run)["step"])
        places = [run.path / "best" / "eval", run.path / "eval"]
    else:
        folder, step, places = run.checkpoints / f"checkpoint-{which}", which, []
    if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
        what = which if isinstance(which, str) else f"step-{which}"
        raise RunFolderError(f"has no {what} adapter, it is {run.status}", str(run.path), "perl train")
    if isinstance(which, int) and which not in checkpoint_steps(run):
        raise RunFolderError(f"has no complete checkpoint of step {which}", str(run.path))
    try:
        digest, config = sha256_of(folder / WEIGHTS), adapter_config_digest((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(folder / CONFIG)) from None
    places += sorted(path.parent for path in (run.path / "evals").glob(f"*/{RESULTS}"))
    found = RunAdapter(run, which, folder, step, digest, None, None, recipe_of(run))
    return _with_results(found, config, [place for place in places if (place / RESULTS).is_file()])


def _with_results(adapter: RunAdapter, config_sha256: str, places: Sequence[Path]) -> RunAdapter:
    """The adapter with the first results that are its own."""
    base, others = base_of_run(adapter.run), []
    for place in places:
        try:
            results = read_results(place)
        except PerlError as error:
            warn("PRL303", "%s; it is not shown", error.mistakes[0])
            continue
        if owns(results, adapter.sha256, config_sha256, base):
            return replace(adapter, results_folder=place, results=results)
        if results.subject.get("adapter_sha256") == adapter.sha256:
            others.append(place)
    if others:
        what = "%s: results of the same weights with another %s or on another base are not those of this adapter"
        warn("PRL333", what, others[0], CONFIG)
    return adapter


def shown_candidate(run: Run) -> RunAdapter:
    """What a run's card is of: its final adapter, or the model that it trained, which is not one to publish."""
    if run.facts.get("method") != "full":
        return find_candidate(run)
    digests, folder = model_digests(run.adapter), run.path / "eval"
    results: Results | None = read_results(folder) if (folder / RESULTS).is_file() else None
    if results is not None and not owns(results, *digests, base_of_run(run)):
        results = None
    steps, place = int(run.facts.get("steps", 0)), folder if results else None
    return RunAdapter(run, "final", run.adapter, steps, digests[0], place, results, recipe_of(run))


def why_unscored(candidate: RunAdapter) -> Mistake | None:
    """Why the results in a run's folder are not shown; None: they are, or there are none."""
    place = candidate.run.path / "eval"
    if candidate.results is not None or not (place / RESULTS).exists():
        return None
    try:
        read_results(place)
    except PerlError as error:
        return error.mistakes[0]
    what = "are those of another adapter, or of this one with another config or on another base"
    return Mistake(what, str(place / RESULTS), f"perl eval --adapter {candidate.run.path}")


def identity_mistakes(candidate: RunAdapter) -> list[Mistake]:
    """Why an adapter is not what its run trained: other weights lie there than were proven, or scored as the best."""
    found, run = [], candidate.run
    trained = (run.facts.get("fingerprint") or {}).get("adapter") if candidate.which == "final" else None
    if candidate.which == "best":
        best = _best(run)
        trained = best.get("sha256")
        wrong = best_disagreement(best, read_log(run.metrics), done=run.status == "done")
        if wrong:
            what = f"{wrong}: one was changed since"
            found.append(Mistake(what, str(candidate.folder.parent), "put back what the run wrote"))
    if trained not in (None, candidate.sha256):
        what = f"has SHA-256 {candidate.sha256[:12]}, the run trained {trained[:12]}: it was changed since"
        found.append(Mistake(what, str(candidate.folder / WEIGHTS), "put the trained file back"))
    return found


def candidate_mistakes(candidate: RunAdapter) -> list[Mistake]:
    """Why an adapter's scores may not be shown or sent: they are not those of its samples.

    Args:
        candidate: An adapter of a run; without results nothing is wrong with them.

    Raises:
        PerlError: There are no samples, or they or the results cannot be read.
    """
    counted = recount_candidate(candidate)
    return [] if counted is None else counted.mistakes_at(str(candidate.run.path))


def recount_candidate(candidate: RunAdapter) -> Recount | None:
    """The results of an adapter, counted again from the samples that were drawn of it; None: there are none.

    Raises:
        PerlError: There are no samples, or they or the results cannot be read.
    """
    place = candidate.results_folder
    return None if place is None else recount_folder(place, candidate.recipe)


def recipe_of(run: Run) -> Recipe | None:
    """The recipe of a run, its base in a folder by the whole path; None: it has none.

    Raises:
        RecipeError: It cannot be read.
    """
    file = run.path / "recipe.yaml"
    if not file.is_file():
        return None
    try:
        recipe, base = Recipe.of_run(file), str(run.facts.get("base"))
        name = base if Path(base).is_absolute() else recipe.model.name
        return replace(recipe, model=recipe.model.model_copy(update={"name": name}))
    except RecipeError as error:
        raise RecipeError("the run's recipe cannot be read", str(file), str(error)) from None


def base_of_run(run: Run) -> str | None:
    """The fingerprint of the base that a run trained on; None: it does not say."""
    return (run.facts.get("fingerprint") or {}).get("base")


def source_of_run(run: Run) -> str | None:
    """The fingerprint of what a run's base was loaded from, which its adapter belongs to; None: it does not say.

    That of the base itself, unless the base was quantised as it was loaded.
    """
    return (run.facts.get("fingerprint") or {}).get("source" if run.facts.get("quantization") else "base")


def checkpoint_steps(run: Run) -> list[int]:
    """Steps of the run's complete checkpoints, in order."""
    return sorted(step_of(folder) for folder in complete_checkpoints(run.checkpoints))


def _best(run: Run) -> dict[str, Any]:
    hint = "eval.every in the recipe does"
    try:
        return read_best(run.path / "best")
    except FileNotFoundError:
        raise RunFolderError("keeps no best adapter", str(run.path), hint) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"keeps no best adapter: {error}", str(run.path), hint) from None


def run_facts(
    candidate: RunAdapter, repo_id: str | None = None, steps: Sequence[int] = (), licence: Licence | None = None
) -> RunFacts:
    """What a run tells of one of its adapters.

    Args:
        candidate: The adapter.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.
        steps: Of the run's checkpoints that are published too.
        licence: Of the base; None: the Hub is asked, unless it is offline.
    """
    run, known, whole_run, recipe = candidate.run, candidate.run.facts, candidate.which == "final", candidate.recipe
    if not isinstance(known.get("base"), str):
        raise RunFolderError("does not say in its run.json which base it trained on", str(run.path))
    base, revision = public_name(str(known["base"]), known.get("revision"))
    repo_id = repo_id or (recipe.hub.repo_id if recipe else known.get("repo_id"))
    data, settings = known.get("data") or {}, known.get("settings") or {}
    chat = None  # whether questions were messages, as what was logged knows; a kill may have cut a line short
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError), run.samples.open("rb") as file:
        chat = isinstance(json.loads(file.readline())["prompt"], list)
    found, hardware = known.get("hardware") or {}, None
    if found.get("device"):
        named, hardware = (f"{found.get('count', 1)} x {name}" for name in (found["device"], "processor"))
        with contextlib.suppress(PerlError):
            hardware = made_facts({"base": "any", "hardware": named}, "hardware").hardware
    # Of an adapter that lies on this machine the last part of its path, as its recipe.
    continued = {"continues": without_paths(settings["continues"])} if "continues" in settings else {}
    licence = licence or base_licence(base, revision)
    same = ("quantization", "loader", "method", "seed", "loss", "ratio_level", "algorithm")
    facts = {
        **{name: known.get(name) for name in (*same, "trainable_parameters", "total_parameters")},
        "name": repo_id or plain_word(run.path.resolve().name),
        "repo_id": repo_id,
        "base": label(base),
        "revision": revision,
        "licence": asdict(licence) if licence is not None else None,
        "data_version": data.get("train"),
        "step": candidate.step,
        "overridden": known.get("overridden") or {},
        "settings": showable_settings(settings | continued),
        "rewards": without_paths(known.get("rewards") or {}),
        "seconds": (known.get("seconds") if run.status == "done" else run.elapsed()) if whole_run else None,
        "hardware": hardware,
        "rewards_changed": [step for step in known.get("rewards_changed") or [] if step < candidate.step],
        "reload_difference": known.get("reload_difference") if whole_run else None,
        "chat": chat,
        "checkpoints": list(steps),
        "versions": known.get("versions") or {},
    }
    return made_facts(facts, str(run.path / "run.json"))


def base_licence(base: str, revision: str | None) -> Licence | None:
    """The licence of a base, as its own card on the Hub has it; None where that is not known within a moment."""
    if is_sandbox(base):
        return Licence(_SANDBOX_LICENCE)
    if constants.HF_HUB_OFFLINE or not is_hub_name(base):
        return None
    try:
        card = HfApi().model_info(base, revision=revision, timeout=LICENCE_SECONDS).card_data
    except HUB_ERRORS:
        return None
    found = card.get("license") if card else None
    if card is None or not isinstance(found, str):
        return None
    try:
        name = card.get("license_name")
        licence = {"identifier": found, "name": plain_word(name) if name else None, "link": card.get("license_link")}
        return made_facts({"base": base, "licence": licence}, base).licence
    except (PerlError, TypeError):  # an untrusted card may hold anything
        return None


def said_before(run: Run, now: RunFacts) -> list[Mistake]:
    """What a run says otherwise of its final adapter than beside the card there: a file was changed since.

    Args:
        run: The run.
        now: What it says.

    Raises:
        PerlError: What lies beside the card cannot be read.
    """
    file = run.adapter / RUN_FACTS
    before = read_run_facts(file.read_bytes()) if file.is_file() else now
    if before.perl != now.perl:  # another version may say the same otherwise
        return []
    then, here = ({**vars(facts), **facts.files} for facts in (before, now))
    differ = [name for name in then if name not in _OF_THE_CARD and then[name] != here.get(name)]
    what = ", ".join(f"{name} {then[name]!r}, not {here.get(name)!r}" for name in differ)
    message = f"says {what[:200]} as the run does now: one was changed since"
    return [Mistake(message, str(file), f"perl card {run.path}")] if differ else []
