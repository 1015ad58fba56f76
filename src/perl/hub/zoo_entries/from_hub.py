"""An adapter on the Hub, pushed by perl, as the material of an entry.

Hub id[@revision] -> Material

The repository is a stranger's: only the files named here are fetched, at one commit, none that is larger than such a
file can be, and nothing in them is trusted. Knows nothing of zoos.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from perl.algorithms.registry import loss_problems
from perl.errors import PerlError, first_line
from perl.evaluation.recounting.folder import recount_published
from perl.evaluation.recounting.published_samples import PUBLISHED
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.results import Results, read_results
from perl.hub.card.facts import METRICS, PUBLIC_RECIPE, SCORES
from perl.hub.card.form import CARD, LARGEST_FRONT_MATTER
from perl.hub.gate.gate import largest
from perl.hub.zoo_entries.material import Material, of_log, of_policy, steps_of
from perl.hub.zoo_entries.scores import checked_scores
from perl.policy.hub_files import commit_of, fetch, list_files, weights_sha256
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.recipe import Recipe, load_recipe
from perl.recipe.plain_yaml import plain_value, refuse_tags
from perl.run.folder import sha256_of

_LARGEST = {name: largest(name) or 0 for name in (CONFIG, PUBLIC_RECIPE, CARD, METRICS, SCORES, PUBLISHED)}


def of_hub(source: str) -> Material:
    """The adapter in a repository.

    Raises:
        PerlError: There is none, it was not pushed by perl, or a file of it is not what it should be.
    """
    repo, _, asked = source.partition("@")
    commit = commit_of(repo, asked or None, source)
    if commit is None:
        raise PerlError("the Hub is not asked", "HF_HUB_OFFLINE", "unset it, or name a run folder")
    there = list_files(repo, commit)
    for needed, hint in ((CONFIG, ""), (WEIGHTS, "only safetensors are taken"), (SCORES, "perl push sends them")):
        if needed not in there:
            raise PerlError(f"has no {needed}", source, hint)
    files = {name: fetch(repo, commit, there[name], _LARGEST[name]) for name in _LARGEST if name in there}
    results = _read_stranger(files[SCORES], source)
    digest, weights = weights_sha256(repo, commit, there[WEIGHTS])
    scores = checked_scores(_counted(files, source), digest, files[CONFIG].read_bytes(), source)
    recipe = _stranger_recipe(files[PUBLIC_RECIPE], source) if PUBLIC_RECIPE in files else None
    rows = steps_of(_text(files[METRICS], source)) if METRICS in files else []
    return Material(
        origin="hub",
        where=source,
        name=repo.partition("/")[2],
        files={CONFIG: files[CONFIG].read_bytes(), **({WEIGHTS: weights.read_bytes()} if weights is not None else {})},
        sha256={CONFIG: sha256_of(files[CONFIG]), WEIGHTS: digest},
        size=(there[CONFIG].size or 0) + (there[WEIGHTS].size or 0),
        results=results,
        scores=scores,
        repo=repo,
        revision=commit,
        recipe=recipe,
        known={
            "licence": _licence_of(files, source),
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


def _counted(files: Mapping[str, Path], source: str) -> Recount:
    """Their results, counted again from the samples beside them; without samples from rights and wrongs."""
    samples = files[PUBLISHED].read_bytes() if PUBLISHED in files else None
    return recount_published(files[SCORES].read_bytes(), samples, source)


def _read_stranger(path: Path, source: str) -> Results:
    try:
        return read_results(path)
    except PerlError as error:
        raise PerlError(error.mistakes[0].message, f"{source}: {SCORES}") from None


def _stranger_recipe(path: Path, source: str) -> Recipe:
    """The recipe in a file that must stand alone: one that extends another would name files of this machine."""
    where = f"{source}: {PUBLIC_RECIPE}"
    try:
        values = _plain_mapping(_text(path, source), where)
        if "extends" in values:
            raise PerlError("extends another recipe", where, "perl push writes recipes that stand alone")
        return load_recipe(values, checks=(loss_problems,))
    except PerlError as error:
        problem = error.mistakes[0]
        raise PerlError(
            problem.message, problem.where if source in problem.where else f"{where}: {problem.where}"
        ) from None


def _plain_mapping(text: str, where: str) -> dict[str, Any]:
    try:
        refuse_tags(text, where)
        values = plain_value(text)
    except (yaml.YAMLError, ValueError, TypeError) as error:  # an integer of too many digits, a key that is a list
        raise PerlError(f"is not plain YAML: {first_line(error)}", where) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise PerlError("is no mapping", where)
    return values


def _licence_of(files: Mapping[str, Path], source: str) -> str | None:
    """What the card's front matter says of the licence; None: there is no card, or it does not say."""
    if CARD not in files:
        return None
    opening, _, rest = _text(files[CARD], source).partition("---\n")
    front, closing, _ = rest.partition("\n---")
    if opening.strip() or not closing:
        return None
    if len(front) > LARGEST_FRONT_MATTER:
        message = f"its front matter has {len(front):,} characters, at most {LARGEST_FRONT_MATTER:,} are read"
        raise PerlError(message, f"{source}: {CARD}")
    licence = _plain_mapping(front, f"{source}: {CARD}").get("license")
    return licence if isinstance(licence, str) else None


def _text(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PerlError(f"{path.name} is no text", source) from None


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
