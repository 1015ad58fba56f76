"""Adapters on the Hub that perl pushed: one as the material of an entry, and those that bear our tag.

Hub id[@revision] -> Material; tag -> rows of a list

The repository is untrusted: only the files named here are fetched, at one commit, none that is larger than such a file
can be, and nothing in them is trusted.
"""

from dataclasses import replace

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.hf_api import ModelInfo

from perl.errors import PerlError, first_line, raise_all
from perl.evaluation.recounting.folder import recount_published
from perl.evaluation.recounting.published_samples import PUBLISHED
from perl.hub.card.contradictions import contradictions
from perl.hub.card.facts import RUN_FACTS, read_run_facts
from perl.hub.card.front_matter import OURS, SANDBOX_TAGS, adapter_tag
from perl.hub.card.published import METRICS, PUBLIC_RECIPE, SCORES, log_in, public_recipe_in, results_in
from perl.hub.found_card import open_repository, weights_of
from perl.hub.gate.gate import largest
from perl.hub.zoo_entries.material import Material, checked_scores, of_facts, of_log, of_policy
from perl.methods.registry import METHODS
from perl.policy.hub_files import HUB_ERRORS, TIMEOUT_SECONDS, fetch
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.run.files import sha256_of
from perl.run.tables import Row, fact_cell, plain

_READ = (CONFIG, RUN_FACTS, PUBLIC_RECIPE, METRICS, SCORES, PUBLISHED)


def of_hub(source: str) -> Material:
    """The adapter in a repository.

    Raises:
        PerlError: There is none, it was not pushed by perl, or a file of it is not what it should be.
    """
    name, commit, there = open_repository(source)
    for needed in (CONFIG, WEIGHTS, SCORES, RUN_FACTS):
        if needed not in there:
            raise PerlError(f"has no {needed}", source, "only what perl push sends is taken")
    files = {file: fetch(name, commit, there[file], largest(file) or 0) for file in _READ if file in there}
    digest, weights = weights_of(name, commit, there[WEIGHTS])
    if digest is None:
        raise PerlError(f"its {WEIGHTS} is kept as text and too large to be read", source)
    try:
        results, recipe = results_in(files), public_recipe_in(files)
        facts = read_run_facts(files[RUN_FACTS].read_bytes())
        described = contradictions(facts, files)[0]
    except PerlError as error:
        raise error.moved(lambda where: f"{source}: {where}") from None
    if results is None:
        raise PerlError(f"has no {SCORES}", source)
    samples = files[PUBLISHED].read_bytes() if PUBLISHED in files else None
    counted = recount_published(files[SCORES].read_bytes(), samples, source)
    config = files[CONFIG].read_bytes()
    scores = checked_scores(counted, digest, config, source)
    raise_all(PerlError, [replace(mistake, where=f"{source}: {mistake.where}") for mistake in described])
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
        known=of_facts(facts) | of_log(log_in(files)) | of_policy(results),
    )


def repository_url(name: str, revision: str | None) -> str:
    """Where people look at it."""
    return f"{constants.ENDPOINT}/{name}" + (f"/tree/{revision}" if revision else "")


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
        listed = api.list_models(filter=OURS, expand=["sha", "tags", "lastModified"], sort="last_modified", limit=limit)
        return [_row(info) for info in listed]
    except HUB_ERRORS as error:
        raise PerlError(f"{api.endpoint} cannot be asked for adapters: {first_line(error)}") from None


def _row(info: ModelInfo) -> Row:
    """What an adapter's tags say of it."""
    tags, of_base = list(info.tags or []), adapter_tag("")
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
    return {name: fact_cell(value) for name, value in facts.items()}
