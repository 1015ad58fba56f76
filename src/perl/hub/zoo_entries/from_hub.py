"""An adapter on the Hub, pushed by perl, as the material of an entry.

Hub id[@revision] -> Material

The repository is untrusted: only the files named here are fetched, at one commit, none that is larger than such a file
can be, and nothing in them is trusted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from perl.errors import PerlError, raise_all
from perl.evaluation.recounting.folder import recount_published
from perl.evaluation.recounting.published_samples import PUBLISHED
from perl.hub.card.facts import METRICS, PUBLIC_RECIPE, SCORES, log_in, public_recipe_in, results_in
from perl.hub.card.form import CARD, FRONT_MATTER, read_front_matter
from perl.hub.repository import fetched, open_repository, weights_of
from perl.hub.zoo_entries.material import Material, of_log, of_policy, steps_of
from perl.hub.zoo_entries.scores import checked_scores
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe
from perl.run.files import sha256_of

_READ = (CONFIG, PUBLIC_RECIPE, CARD, METRICS, SCORES, PUBLISHED)


def of_hub(source: str) -> Material:
    """The adapter in a repository.

    Raises:
        PerlError: There is none, it was not pushed by perl, or a file of it is not what it should be.
    """
    repository = open_repository(source)
    there = repository.files
    for needed, hint in ((CONFIG, ""), (WEIGHTS, "only safetensors are taken"), (SCORES, "perl push sends them")):
        if needed not in there:
            raise PerlError(f"has no {needed}", source, hint)
    files = {name: fetched(repository, name) for name in _READ if name in there}
    digest, weights = weights_of(repository)
    if digest is None:
        raise PerlError(f"its {WEIGHTS} is kept as text and too large to be read", source)
    with _named(source):
        results, recipe = results_in(files), public_recipe_in(files)
        licence = _licence_of(files)
    if results is None:
        raise PerlError(f"has no {SCORES}", source)
    samples = files[PUBLISHED].read_bytes() if PUBLISHED in files else None
    counted = recount_published(files[SCORES].read_bytes(), samples, source)
    config = files[CONFIG].read_bytes()
    scores = checked_scores(counted, digest, config, source)
    rows = steps_of(log_in(files))
    return Material(
        origin="hub",
        where=source,
        name=repository.name.partition("/")[2],
        files={CONFIG: config, **({WEIGHTS: weights.read_bytes()} if weights is not None else {})},
        sha256={CONFIG: sha256_of(files[CONFIG]), WEIGHTS: digest},
        size=(there[CONFIG].size or 0) + (there[WEIGHTS].size or 0),
        results=results,
        scores=scores,
        repo=repository.name,
        revision=repository.commit,
        recipe=recipe,
        known={
            "licence": licence,
            "steps": int(rows[-1]["step"]) if rows else None,
            "versions": {k: v for k, v in results.versions.items() if isinstance(k, str) and isinstance(v, str)},
            **_of_recipe(recipe),
            **of_log(rows),
            **of_policy(results),
        },
    )


def repository_url(repo: str, revision: str | None) -> str:
    """Where people look at a commit."""
    return f"{constants.ENDPOINT}/{repo}/tree/{revision or 'main'}"


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Names the repository in the mistakes of its files."""
    try:
        yield
    except PerlError as error:
        raise_all(PerlError, [replace(mistake, where=f"{source}: {mistake.where}") for mistake in error.mistakes])


def _licence_of(files: Mapping[str, Path]) -> str | None:
    """What the card's front matter says of the licence; None: there is no card, or it does not say.

    Raises:
        PerlError: The front matter cannot be read.
    """
    card = files[CARD].read_text(encoding="utf-8", errors="replace") if CARD in files else ""
    if FRONT_MATTER.match(card) is None:
        return None
    metadata, unread = read_front_matter(card)
    raise_all(PerlError, unread)
    licence = (metadata or {}).get("license")
    return licence if isinstance(licence, str) else None


def _of_recipe(recipe: Recipe | None) -> dict[str, Any]:
    """What a recipe says of an adapter where there is no run folder to ask."""
    if recipe is None:
        return {}
    peft, train = recipe.peft, recipe.train
    asked = {
        "rank": peft.rank,
        "alpha": peft.alpha,
        "target_modules": peft.target_modules,
        "base loaded as": recipe.model.quantization,
        "optimizer": train.get("optim"),
        "learning rate": train.get("learning_rate"),
        "KL coefficient (beta)": train.get("beta"),
    }
    return {
        "method": peft.type or peft.method,
        "seed": train.get("seed"),
        "algorithm": train.get("loss_type"),
        "settings": {name: value for name, value in asked.items() if value is not None},
    }
