"""One adapter of a run that may be published, with the results that are its own.

run folder, final | best | step -> Candidate; Candidate -> its scores, counted again

Results belong to an adapter if they name its policy: its config, its weights and the run's base. No others are ever
shown beside it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perl.errors import Mistake, PerlError, RecipeError, RunFolderError, warn
from perl.evaluation.recounting.folder import recount_folder
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.results import RESULTS, Results, read_results
from perl.policy.checkpoint import complete_checkpoints, is_complete, step_of
from perl.policy.name import adapter_config_digest, policy_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.facts import best_disagreement, read_best
from perl.run.files import sha256_of
from perl.run.folder import Run
from perl.run.logs import read_log

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
        config_sha256: Of what its config says of the policy.
        results_folder: With the results of exactly this adapter; None: it was not evaluated.
        results: These results.
    """

    run: Run
    which: Which
    folder: Path
    step: int
    sha256: str
    results_folder: Path | None
    results: Results | None
    config_sha256: str = ""


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
    if isinstance(which, int) and not is_complete(folder):
        raise RunFolderError(f"has no complete checkpoint of step {which}", str(run.path))
    digest, config = sha256_of(folder / WEIGHTS), _config_digest(folder)
    base = base_of_run(run)
    places += sorted(path.parent for path in (run.path / "evals").glob(f"*/{RESULTS}"))
    others = []
    for place in places:
        results = _results_in(place)
        if results is not None and owns(results, digest, config, base):
            return RunAdapter(run, which, folder, step, digest, place, results, config)
        if results is not None and results.subject.get("adapter_sha256") == digest:
            others.append(place)
    if others:
        what = "%s: results of the same weights with another %s or on another base are not those of this adapter"
        warn("PRL333", what, others[0], CONFIG)
    return RunAdapter(run, which, folder, step, digest, None, None, config)


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
    trained = _fingerprint(run, "adapter") if candidate.which == "final" else None
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
    return [] if candidate.results_folder is None else recount_candidate(candidate).mistakes_at(str(candidate.run.path))


def recount_candidate(candidate: RunAdapter) -> Recount:
    """The results of an adapter, counted again from the samples that were drawn of it.

    Raises:
        PerlError: There are no results or samples, or they cannot be read.
    """
    if candidate.results_folder is None:
        raise PerlError("its adapter was not evaluated", str(candidate.run.path), "perl eval")
    return recount_folder(candidate.results_folder, recipe_of(candidate.run))


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
        if not Path(base).is_absolute():
            return recipe
        return replace(recipe, model=recipe.model.model_copy(update={"name": base}))
    except RecipeError as error:
        raise RecipeError("the run's recipe cannot be read", str(file), str(error)) from None


def base_of_run(run: Run) -> str | None:
    """The fingerprint of the base that a run trained on; None: it does not say."""
    return _fingerprint(run, "base")


def source_of_run(run: Run) -> str | None:
    """The fingerprint of what a run's base was loaded from, which its adapter belongs to; None: it does not say.

    That of the base itself, unless the base was quantised as it was loaded.
    """
    return _fingerprint(run, "source" if run.facts.get("quantization") else "base")


def _fingerprint(run: Run, what: str) -> str | None:
    known = run.facts.get("fingerprint")
    found = known.get(what) if isinstance(known, dict) else None
    return None if found is None else str(found)


def _config_digest(folder: Path) -> str:
    try:
        return adapter_config_digest((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(folder / CONFIG)) from None


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


def _results_in(folder: Path) -> Results | None:
    if not (folder / RESULTS).is_file():
        return None
    try:
        return read_results(folder)
    except PerlError as error:
        warn("PRL303", "%s; it is not shown", error.mistakes[0])
        return None
