"""An adapter of a run as the material of an entry.

run folder -> Material

Reads the run folder only.
"""

import hashlib
from pathlib import Path

from perl.errors import PerlError, raise_all
from perl.evaluation.results import RESULTS, read_results
from perl.hub.card.candidate import Candidate, find_candidate, identity_mistakes
from perl.hub.card.recounted import recount_candidate
from perl.hub.card.run_facts import RUN_FACTS, hardware_of, read_run_facts
from perl.hub.push.outbox import read_pushes
from perl.hub.push.package import package_candidate
from perl.hub.zoo_entries.material import Material, of_log, of_policy, steps_of
from perl.hub.zoo_entries.scores import checked_scores
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.folder import Run
from perl.run.logs import log_rows


def of_run(folder: Path) -> Material:
    """A run's final adapter; of its folder ``best`` the best one.

    Raises:
        PerlError: The run has none, or no results of it, or they do not add up.
    """
    if (folder / "run.json").is_file():
        return _of_candidate(find_candidate(Run.read(folder)))
    return _of_candidate(find_candidate(Run.read(folder.parent), "best"))


def _of_candidate(candidate: Candidate) -> Material:
    run, facts = candidate.run, candidate.run.facts
    if candidate.results is None:
        message = "its adapter was not evaluated"
        if (run.path / "eval" / RESULTS).is_file():
            read_results(run.path / "eval")  # says why it cannot be read
            message = "its results are those of another adapter, or of this one with another config"
        raise PerlError(message, str(run.path), f"perl eval --adapter {run.path} --tasks ...")
    raise_all(PerlError, identity_mistakes(candidate))
    config = (candidate.folder / CONFIG).read_bytes()
    scores = checked_scores(recount_candidate(candidate), candidate.sha256, config, str(run.path))
    package = package_candidate(candidate)  # its config names no folder of this machine
    files = {name: package.files[name] for name in (CONFIG, WEIGHTS)}
    log = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.is_file() else ""
    rows = [row for row in steps_of(log_rows(log)) if row["step"] <= candidate.step]
    recipe = Recipe.of_run(run.path / "recipe.yaml")
    licence = read_run_facts(package.files[RUN_FACTS]).licence
    repo, revision = _pushed(candidate)
    known = {
        "method": facts.get("method"),
        "settings": facts.get("settings") or {},
        "algorithm": facts.get("loss"),
        "seed": facts.get("seed"),
        "steps": candidate.step,
        "seconds": facts.get("seconds") if candidate.which == "final" else None,
        "hardware": hardware_of(facts.get("hardware") or {}),
        "trainable_parameters": facts.get("trainable_parameters"),
        "versions": facts.get("versions") or {},
        "created": str(facts.get("created", ""))[:10] or None,
        **of_log(rows),
        **of_policy(candidate.results),
        "licence": licence.identifier if licence else None,
    }
    return Material(
        origin="run",
        where=str(run.path),
        name=run.path.resolve().name,
        files=files,
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        size=sum(map(len, files.values())),
        results=candidate.results,
        scores=scores,
        repo=repo,
        revision=revision,
        recipe=recipe,
        known=known,
    )


def _pushed(candidate: Candidate) -> tuple[str | None, str | None]:
    """Repository and commit of the run's last push that is done and was of this adapter."""
    for push in reversed(read_pushes(candidate.run)):
        if push.status == "done" and push.sha256 == candidate.sha256:
            return push.repo_id, push.commit
    return None, None
