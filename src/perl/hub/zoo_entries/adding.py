"""Makes an entry of the zoo out of an adapter that was scored.

run folder or Hub id -> Entry, written into a zoo; the adapter beside it on demand
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from perl.errors import PerlError, raise_all
from perl.hub.card.public_recipe import public_recipe
from perl.hub.gate.gate import ZOO, gate_mistakes
from perl.hub.push.package import Package
from perl.hub.zoo_entries.from_hub import of_hub, repository_url
from perl.hub.zoo_entries.from_run import of_run
from perl.hub.zoo_entries.material import Material
from perl.hub.zoo_entries.scores import protocol_facts
from perl.hub.zoo_entries.verification import reproduced
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.download import fetch_adapter
from perl.recipe import Recipe
from perl.recipe.plain_yaml import plain_value
from perl.run.files import replace_folder, write_text
from perl.run.warned import warn
from perl.zoo.entry import NAME, Entry, Location, Provenance, SeedScores, read_entry

logger = logging.getLogger("perl")

_LARGEST_SHIPPED = 3_000_000
_OF_ITS_AUTHOR = "Scores are those of its author's results file, nobody evaluated it here; `perl zoo verify` does."


def add(  # noqa: PLR0913 (what a user may say of an entry)
    source: str | Path,
    zoo_folder: str | Path,
    name: str | None = None,
    provenance: Provenance | None = None,
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
    rankings with ours; the protocol is kept, since ``verify`` evaluates by it. With the provenance ``reproduced`` the
    adapter is evaluated here, now, and the entry holds what was found.

    Args:
        source: A run folder (its final adapter; ``RUN/best``: its best), or a Hub id with an optional ``@revision``.
        zoo_folder: The zoo.
        name: Of the entry; None: the last part of the source's name.
        provenance: None: ``trained-here`` of a run, ``reported`` of the Hub.
        licence: None: what the run's base has, or the card says.
        ship: Copy the adapter into the zoo.
        seeds: Run folders of the same recipe with other seeds.
        notes: What one must know.
        force: Replace an entry of that name.

    Raises:
        PerlError: It has no results of its own, they do not add up, a seed is of another recipe, or there is an entry
            of that name.
    """
    material = _material(source)
    label = _given(name) if name is not None else _name(material.name)
    path = Path(zoo_folder).expanduser() / "entries" / f"{label}.json"
    if path.exists() and not force:
        raise PerlError(f"there is an entry {label!r} already", str(zoo_folder), "another name, or --force")
    entry = _entry(material, label, provenance, notes)
    changes: dict[str, Any] = {"licence": licence} if licence else {}
    if seeds:
        changes["seeds"] = [_seed(material, of_run(Path(seed).expanduser())) for seed in seeds]
        _refuse_twins([material.known.get("seed"), *(seed.seed for seed in changes["seeds"])], material.where)
    entry = entry.model_copy(update=changes)
    if provenance == "reproduced":
        with tempfile.TemporaryDirectory() as folder:
            entry = reproduced(entry, Path(folder))
    raise_all(PerlError, gate_mistakes({path.name: entry.to_json().encode()}, among=ZOO))
    _refuse_unreadable(entry)
    _write(entry, path, _staged(entry, material, path.parent.parent) if ship else None)
    if ship:
        return read_entry(path)
    if entry.adapter.repo is None:
        warn("PRL332", "%s: nobody can load it, the adapter is neither pushed nor shipped with the zoo", label)
    return entry


def _write(entry: Entry, path: Path, staged: Path | None) -> None:
    """An entry and its adapter, in the place of older ones; a kill between leaves no entry with another's adapter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent.parent / "adapters" / entry.name
    if staged is None:
        write_text(path, entry.to_json())
        shutil.rmtree(folder, ignore_errors=True)
        return
    path.unlink(missing_ok=True)
    replace_folder(staged, folder)
    shipped = entry.model_copy(update={"adapter": entry.adapter.model_copy(update={"shipped": True})})
    write_text(path, shipped.to_json())


def _material(source: str | Path) -> Material:
    path = Path(source).expanduser()
    a_best = path.name == "best" and (path.parent / "run.json").is_file()
    if a_best or (path / "run.json").is_file():
        return of_run(path)
    if path.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise PerlError("is neither a run folder nor a name on the Hub (user/name)", str(source))
    return of_hub(str(source))


def _entry(material: Material, label: str, provenance: Provenance | None, notes: Sequence[str]) -> Entry:
    a_run = material.origin == "run"
    if provenance == "trained-here" and not a_run:
        raise PerlError("was not trained here", material.where, "reported, or reproduced, which evaluates it here")
    if provenance not in (None, "trained-here") and a_run:
        raise PerlError(f"is a run of this machine, not {provenance}", material.where, "trained-here")
    strange: dict[str, Any] = {}
    if not a_run:
        strange = {
            "source": repository_url(str(material.repo), material.revision),
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
        "recipe": _public(material.recipe) if material.recipe else {},
        "protocol": protocol_facts(material.results),
        "scores": list(material.scores),
        "notes": list(notes),
        **strange,
    }
    try:
        return Entry.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise PerlError(f"makes no entry: {field}: {first['msg']}", material.where) from None


def _given(name: str) -> str:
    """A name that was asked for, which is taken as it is or not at all."""
    if re.fullmatch(NAME, name) is None:
        raise PerlError(f"{name!r} is not a valid name of an entry", "--name", f"as in {_name(name)}")
    return name


def _name(wanted: str) -> str:
    """A name that an entry can have."""
    return re.sub(r"[^a-z0-9._-]+", "-", wanted.lower()).strip("-._") or "adapter"


def _public(recipe: Recipe) -> dict[str, Any]:
    """The recipe without places of this machine, as plain values."""
    try:
        values = plain_value(public_recipe(recipe))
    except yaml.YAMLError as error:
        raise PerlError(f"its recipe cannot be read back: {error}", recipe.name) from None
    return dict(values)


def _seed(first: Material, other: Material) -> SeedScores:
    """The scores of the same recipe with another seed, on the same tasks under the same protocols.

    Raises:
        PerlError: It is of another recipe, or was scored otherwise.
    """
    if first.recipe is None or other.recipe is None:
        raise PerlError("has no recipe to compare seeds with", first.where)
    one, two = _public(first.recipe), _public(other.recipe)
    different = [key for key in _different(one, two) if key not in ("train.seed", "train.output_dir")]
    if different:
        what = f"its recipe differs in {', '.join(different[:3])}"
        raise PerlError(f"is not another seed of {first.where}: {what}", other.where, "leave it out")
    found = {score.task: score for score in other.scores}
    for score in first.scores:
        if score.task not in found or found[score.task].protocol_hash != score.protocol_hash:
            raise PerlError(f"was not scored on {score.task} under the protocol of {first.where}", other.where)
    wanted = {score.task: found[score.task].adapter for score in first.scores}
    digest, policy = other.sha256[WEIGHTS], other.known.get("policy")
    seed = other.known.get("seed")
    if seed is None:
        raise PerlError("does not say in its run.json which seed it had", other.where, "leave it out")
    return SeedScores(seed=seed, adapter_sha256=digest, policy=policy, scores=wanted)


def _different(one: dict[str, Any], two: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for key in dict.fromkeys([*one, *two]):
        there, here = one.get(key), two.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _different(there, here, f"{above}{key}.")
        elif there != here:
            found.append(f"{above}{key}")
    return found


def _refuse_twins(seeds: Sequence[int | None], where: str) -> None:
    twice = sorted({seed for seed in seeds if seed is not None and seeds.count(seed) > 1})
    if twice:
        raise PerlError(f"seed {twice[0]} is named twice", where, "runs of one recipe differ in train.seed")


def _refuse_unreadable(entry: Entry) -> None:
    """What cannot be read again would make the whole zoo unreadable."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{entry.name}.json"
        write_text(file, entry.to_json())
        try:
            read_entry(file)
        except PerlError as error:
            raise PerlError(error.mistakes[0].message, file.name) from None


def _staged(entry: Entry, material: Material, zoo: Path) -> Path:
    """The adapter's two files, beside the place that they will have in the zoo."""
    files = material.files
    if WEIGHTS not in files:  # of the Hub
        fetched = fetch_adapter(str(material.repo), material.revision, sha256=material.sha256)
        files = {name: (fetched / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    package = Package({name: files[name] for name in (CONFIG, WEIGHTS)})
    raise_all(PerlError, gate_mistakes(package.files, among=ZOO))
    staged = zoo / "adapters" / f".{entry.name}.tmp"
    shutil.rmtree(staged, ignore_errors=True)
    package.write(staged)
    logger.info("%s: %s bytes are shipped", entry.name, f"{material.size:,}")
    if material.size > _LARGEST_SHIPPED:
        warn("PRL332", "%s is larger than %s bytes, a whole zoo's share", entry.name, f"{_LARGEST_SHIPPED:,}")
    return staged
