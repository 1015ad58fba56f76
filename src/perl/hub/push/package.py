"""What is published of an adapter: exactly these files.

Candidate -> name in the repository -> bytes

Files of another adapter and names of this machine are left out.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.errors import Mistake, PerlError
from perl.evaluation.recounting.published_samples import PUBLISHED, published_samples
from perl.evaluation.scoring.results import RESULTS, SAMPLES
from perl.hub.card.candidate import RunAdapter, recipe_of
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.check import check_card
from perl.hub.card.eval_results import eval_result_files
from perl.hub.card.facts import RUN_FACTS, Licence
from perl.hub.card.form import card_mistakes, with_author
from perl.hub.card.public_recipe import public_recipe, without_paths
from perl.hub.card.published import CARD, METRICS, PUBLIC_RECIPE, SCORES, evenly
from perl.hub.card.render import render_card
from perl.hub.card.run_facts import run_facts
from perl.hub.gate.gate import gate_mistakes, is_simple_name, largest, names_in, take
from perl.hub.gate.leaks import this_machine
from perl.policy.model import public_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS, public_adapter
from perl.policy.teacher import ADAPTER_NAME
from perl.recipe import Recipe
from perl.run.folder import Run
from perl.run.logs import log_rows

MOST_ROWS = 1000
"""Of ``metrics.jsonl``."""


@dataclass(frozen=True)
class PushPackage:
    """Files of a repository, as they are sent: what was looked at is in memory, not on a disk where it could change.

    Attributes:
        files: Name in the repository -> its content.
    """

    files: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))

    def write(self, folder: Path) -> None:
        """Writes the files into a folder.

        Raises:
            PerlError: A name leads out of it.
        """
        for name, content in self.files.items():
            if not is_simple_name(name):
                raise PerlError(f"{name[:80]!r} is not the name of a file in it", str(folder))
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read_package(folder: Path) -> PushPackage:
    """All files of a folder, into memory.

    Raises:
        PerlError: A link lies in it, or another thing that is not a regular file; or a file that we do not publish.
    """
    files = {}
    for name in names_in(folder):
        most = largest(name)
        if most is None:
            raise PerlError("is not a file that perl publishes", str(folder / name), "leave it out")
        files[name] = take(folder, name, most)
    return PushPackage(files)


def package_candidate(
    candidate: RunAdapter, repo_id: str | None = None, steps: Sequence[int] = (), licence: Licence | None = None
) -> PushPackage:
    """Everything that is published of an adapter.

    The card comes last: it is rendered from the other files, so that whoever has them can do it again.

    Args:
        candidate: Which; of a model that was itself trained there is all but the weights.
        repo_id: Under which name; for the card.
        steps: Of the run's checkpoints that are published too; for the card.
        licence: Of the base; None: the Hub is asked.

    Raises:
        PerlError: The run folder lacks what a card must say, or one of the files is a link or no regular file.
    """
    run, folder = candidate.run, candidate.folder
    files: dict[str, bytes] = {RUN_FACTS: run_facts(candidate, repo_id, list(steps), licence).to_json()}
    if (folder / CONFIG).is_file():
        files |= _adapter(candidate)
    _refuse_links(run, run.path / "recipe.yaml", run.card)
    recipe = recipe_of(run)
    if recipe is not None:
        files[PUBLIC_RECIPE] = public_recipe(recipe, _teachers_name(run, recipe)).encode()
    if run.metrics.is_file():
        rows = log_rows(take(run.path, run.metrics.name).decode("utf-8", "replace"))
        files[METRICS] = thinned(rows, last_step=candidate.step if isinstance(candidate.which, int) else None)
    if candidate.results is not None and candidate.results_folder is not None:
        place = candidate.results_folder
        files[SCORES] = _without_paths(_take(run, place, RESULTS, SCORES))
        _refuse_links(run, place / SAMPLES)
        samples = published_samples(candidate.results, place / SAMPLES)
        files |= {PUBLISHED: samples} if samples is not None else {}
        files |= {name: text.encode() for name, text in eval_result_files(candidate.results).items()}
    card = render_card(facts_from_files(files))
    files[CARD] = with_author(card, _text(run.card) if run.card.is_file() else "").encode()
    return PushPackage(dict(sorted(files.items())))


def package_mistakes(package: PushPackage, folder: Path) -> list[Mistake]:
    """Why a package may not be published: what the gate refuses, and a card that is wrong.

    Args:
        package: What would be.
        folder: The run's, which must not be named.
    """
    contents = package.files
    refused = gate_mistakes(contents, this_machine(folder))
    unread = [CARD] if CARD not in contents else [problem.where for problem in refused if problem.where in contents]
    if any(name in unread for name in (CARD, SCORES)) or WEIGHTS not in contents:
        return [*refused, *(Mistake("is absent", name) for name in (CARD, WEIGHTS) if name not in contents)]
    if RUN_FACTS not in contents:  # a script's own card, which nothing here can render again
        return [*refused, *card_mistakes(contents[CARD].decode("utf-8"), contents)]
    digest = hashlib.sha256(contents[WEIGHTS]).hexdigest()
    return [*refused, *check_card(contents, digest).mistakes]


def thinned(rows: Sequence[Mapping[str, Any]], last_step: int | None = None) -> bytes:
    """A log of :data:`MOST_ROWS` rows at most, the first and the last among them, a line each.

    Args:
        rows: With their steps.
        last_step: Later rows are left out.
    """
    kept = evenly([row for row in rows if last_step is None or (row.get("step") or 0) <= last_step], MOST_ROWS)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept).encode()


def _teachers_name(run: Run, recipe: Recipe) -> str | None:
    """What the run called its teacher's adapter, if that is what its recipe names; its folder may be gone by now."""
    said, named = (run.facts.get("settings") or {}).get(ADAPTER_NAME), recipe.teacher.adapter
    return said if named is not None and said in (named, Path(named).name, public_adapter(named)) else None


def _refuse_links(run: Run, *files: Path) -> None:
    """Of files that are read by their paths and published in part."""
    for file in files:
        if os.path.lexists(file):
            take(run.path, file.relative_to(run.path).as_posix())


def _adapter(candidate: RunAdapter) -> dict[str, bytes]:
    """Its weights, which are still those that the candidate was found with, and its config."""
    run, folder = candidate.run, candidate.folder
    weights = _take(run, folder, WEIGHTS, WEIGHTS)
    if hashlib.sha256(weights).hexdigest() != candidate.sha256:
        raise PerlError("was exchanged while it was read", str(folder / WEIGHTS))
    return {WEIGHTS: weights, CONFIG: _public_config(_take(run, folder, CONFIG, CONFIG))}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PerlError("is not UTF-8", str(file), "save it as UTF-8, or delete it: perl card writes it anew") from None


def _take(run: Run, folder: Path, name: str, published: str) -> bytes:
    """A file of a run, which is published under another name."""
    return take(run.path, (folder / name).relative_to(run.path).as_posix(), largest(published) or 0)


def _public_config(content: bytes) -> bytes:
    """The adapter's config; a base that is named by a path is named by its last part."""
    config = json.loads(content)  # a mapping, of which the candidate's digest was taken
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not isinstance(revision, str | None):
        return content  # which a config that is read refuses, if there is a name
    known, commit = public_name(name, revision)
    known = without_paths(known)
    if (known, commit) == (name, revision):
        return content
    changed = config | {"base_model_name_or_path": known, "revision": commit}
    return (json.dumps(changed, indent=2, sort_keys=True) + "\n").encode()


def _without_paths(content: bytes) -> bytes:
    """Results as they are, unless an adapter or its data were named by a path."""
    results = json.loads(content)
    public = without_paths(results)
    return content if public == results else (json.dumps(public, indent=2) + "\n").encode()
