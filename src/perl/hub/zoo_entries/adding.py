"""Makes an entry of the zoo out of an adapter that was scored.

run folder or Hub id -> Entry, written into a zoo; the adapter beside it on demand
"""

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from pydantic import BaseModel

from perl.errors import PerlError, raise_all, warn
from perl.hub.card.published import public_recipe
from perl.hub.gate import ZOO, gate_mistakes
from perl.hub.push.package import PushPackage
from perl.hub.zoo_entries.material import Material, find_material, of_run, protocol_facts
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.download import fetch_adapter
from perl.recipe.plain_yaml import plain_value
from perl.run.files import write_text
from perl.zoo.entry import NAME, Entry, Location, SeedScores, parse_entry

logger = logging.getLogger("perl")

_OF_ITS_AUTHOR = "Scores are those of its author's results file, nobody evaluated it here; `perl zoo verify` does."


def add(
    source: str | Path,
    zoo_folder: str | Path,
    name: str | None = None,
    licence: str | None = None,
    *,
    ship: bool = False,
    seeds: Sequence[str | Path] = (),
    notes: Sequence[str] = (),
    force: bool = False,
) -> Entry:
    """Adds an adapter to a zoo, and begins the zoo if there is none.

    Of a run folder everything is taken from the run, and its provenance is ``trained-here``. Of a repository on the Hub
    only what ``perl push`` put there is taken, and checked: the results must name the weights, and each score must
    follow from the results of its problems. Still these numbers are untrusted, so that the provenance is
    ``reported``, the source is the repository's commit, and scores bear no protocol hash, which keeps them out of
    rankings with ours; the protocol is kept, since ``verify`` evaluates by it.

    Args:
        source: A run folder (its final adapter; ``RUN/best``: its best), or a Hub id with an optional ``@revision``.
        zoo_folder: The zoo.
        name: Of the entry; None: the last part of the source's name.
        licence: None: what the run's base has, or the card says.
        ship: Copy the adapter into the zoo.
        seeds: Run folders of the same recipe with other seeds.
        notes: What one must know.
        force: Replace an entry of that name.

    Raises:
        PerlError: It has no results of its own, they do not add up, a seed is of another recipe, or there is an entry
            of that name.
    """
    material = find_material(source)
    if name is not None and re.fullmatch(NAME, name) is None:
        raise PerlError(f"{name!r} is not a valid name of an entry", "--name", f"as in {_name(name)}")
    label = name or _name(material.name)
    zoo = Path(zoo_folder).expanduser()
    path = zoo / "entries" / f"{label}.json"
    if path.exists() and not force:
        raise PerlError(f"there is an entry {label!r} already", str(zoo_folder), "another name, or --force")
    entry = _entry(material, label, notes)
    changes: dict[str, Any] = {"licence": licence} if licence else {}
    changes["seeds"] = [_seed(material, of_run(Path(seed).expanduser())) for seed in seeds]
    used = [material.known.get("seed"), *(seed.seed for seed in changes["seeds"])]
    if len(set(used)) < len(used):
        raise PerlError("a seed is named twice", material.where, "runs of one recipe differ in train.seed")
    changes["adapter"] = entry.adapter.model_copy(update={"shipped": ship})
    entry = entry.model_copy(update=changes)
    files: Mapping[str, bytes] = material.files if ship else {}
    if ship and WEIGHTS not in files:  # of the Hub
        fetched = fetch_adapter(str(material.repo), material.revision, sha256=material.sha256)
        files = {name: (fetched / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    package = PushPackage(files)
    raise_all(PerlError, gate_mistakes({path.name: entry.to_json().encode(), **package.files}, among=ZOO))
    path.unlink(missing_ok=True)  # so that a kill leaves no entry with another's adapter
    adapter = zoo / "adapters" / label
    shutil.rmtree(adapter, ignore_errors=True)
    package.write(adapter)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, entry.to_json())
    if ship:
        logger.info("%s: %s bytes are shipped", label, f"{material.size:,}")
    elif entry.adapter.repo is None:
        warn("PRL332", "%s: nobody can load it, the adapter is neither pushed nor shipped with the zoo", label)
    return entry


def _entry(material: Material, label: str, notes: Sequence[str]) -> Entry:
    a_run = material.origin == "run"
    strange: dict[str, Any] = {}
    if not a_run:
        strange = {
            "source": f"{constants.ENDPOINT}/{material.repo}/tree/{material.revision}",
            "notes": [_OF_ITS_AUTHOR, *notes],
            "scores": [score.model_copy(update={"protocol_hash": None}) for score in material.scores],
        }
    fields = {
        **{name: value for name, value in material.known.items() if value is not None},
        "name": label,
        "provenance": "trained-here" if a_run else "reported",
        "adapter": Location(
            repo=material.repo, revision=material.revision, sha256=dict(material.sha256), size=material.size
        ),
        "recipe": dict(plain_value(public_recipe(material.recipe))) if material.recipe else {},
        "protocol": protocol_facts(material.results),
        "scores": list(material.scores),
        "notes": list(notes),
        **strange,
    }
    return parse_entry(json.dumps(fields, default=BaseModel.model_dump), material.where)


def _name(wanted: str) -> str:
    """A name that an entry can have."""
    return re.sub(r"[^a-z0-9._-]+", "-", wanted.lower()).strip("-._") or "adapter"


def _seed(first: Material, other: Material) -> SeedScores:
    """The scores of the same recipe with another seed, on the same tasks under the same protocols.

    Raises:
        PerlError: It is of another recipe, or was scored otherwise.
    """
    recipes = []
    for material in (first, other):
        if material.recipe is None:
            raise PerlError("has no recipe to compare seeds with", material.where)
        values = dict(plain_value(public_recipe(material.recipe)))
        train = {key: value for key, value in values.get("train", {}).items() if key not in ("seed", "output_dir")}
        recipes.append({**values, "train": train})
    different = [section for section in recipes[0] | recipes[1] if recipes[0].get(section) != recipes[1].get(section)]
    if different:
        what = f"its recipe differs in {', '.join(different)}"
        raise PerlError(f"is not another seed of {first.where}: {what}", other.where, "leave it out")
    found = {score.task: score for score in other.scores}
    for score in first.scores:
        if score.task not in found or found[score.task].protocol_hash != score.protocol_hash:
            raise PerlError(f"was not scored on {score.task} under the protocol of {first.where}", other.where)
    wanted = {score.task: found[score.task].adapter for score in first.scores}
    digest, policy, seed = other.sha256[WEIGHTS], other.known.get("policy"), other.known.get("seed")
    if seed is None:
        raise PerlError("does not say in its run.json which seed it had", other.where, "leave it out")
    return SeedScores(seed=seed, adapter_sha256=digest, policy=policy, scores=wanted)
