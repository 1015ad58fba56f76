"""What is published of an adapter: exactly these files.

Candidate -> name in the repository -> bytes

Files of another adapter and names of this machine are left out.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.recounting.files import PUBLISHED, published_samples
from perl.evaluation.scoring.results import RESULTS, SAMPLES, Results
from perl.hub.card import published
from perl.hub.card.candidate import RunAdapter, run_facts
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.check import check_card
from perl.hub.card.eval_results import eval_result_files
from perl.hub.card.facts import RUN_FACTS, Licence
from perl.hub.card.published import CARD, METRICS, PUBLIC_RECIPE, SCORES, public_recipe, without_paths
from perl.hub.card.render import render_card
from perl.hub.gate import gate_mistakes, is_simple_name, largest, names_in, take, this_machine
from perl.policy.model import public_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS, public_adapter
from perl.policy.teacher import ADAPTER_NAME
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
    run, folder, recipe = candidate.run, candidate.folder, candidate.recipe
    facts = run_facts(candidate, repo_id, steps, licence)
    files: dict[str, bytes] = {}
    if (folder / CONFIG).is_file():
        files = {WEIGHTS: _take(run.path, folder / WEIGHTS), CONFIG: _public_config(_take(run.path, folder / CONFIG))}
        if hashlib.sha256(files[WEIGHTS]).hexdigest() != candidate.sha256:
            raise PerlError("was exchanged while it was read", str(folder / WEIGHTS))
    _refuse_links(run.path, run.path / "recipe.yaml", run.card)
    if recipe is not None:
        # What the run called its teacher's adapter, if its recipe names that one: its folder may be gone by now.
        said, named = (run.facts.get("settings") or {}).get(ADAPTER_NAME), recipe.teacher.adapter
        same = named is not None and said in (named, Path(named).name, public_adapter(named))
        files[PUBLIC_RECIPE] = public_recipe(recipe, said if same else None).encode()
    if run.metrics.is_file():
        rows = log_rows(take(run.path, run.metrics.name).decode("utf-8", "replace"))
        files[METRICS] = thinned(rows, last_step=candidate.step if isinstance(candidate.which, int) else None)
    if candidate.results is not None and candidate.results_folder is not None:
        files |= _scores(run.path, candidate.results_folder, candidate.results)
    files[RUN_FACTS] = replace(
        facts, files=published.digests_in(files, candidate.sha256 if WEIGHTS in files else None)
    ).to_json()
    try:
        older = run.card.read_text(encoding="utf-8") if run.card.is_file() else ""
    except UnicodeDecodeError:
        hint = "save it as UTF-8, or delete it: perl card writes it anew"
        raise PerlError("is not UTF-8", str(run.card), hint) from None
    files[CARD] = published.with_author(render_card(facts_from_files(files)), older).encode()
    return PushPackage(dict(sorted(files.items())))


def check_package(package: PushPackage, folder: Path, mistakes: Sequence[Mistake] = ()) -> None:
    """Refuses a package that may not be published.

    Args:
        package: What would be.
        folder: The run's, which must not be named.
        mistakes: What is known to be wrong with it already.

    Raises:
        PerlError: Says these, and what :func:`package_mistakes` finds.
    """
    raise_all(PerlError, [*mistakes, *package_mistakes(package, folder)])


def package_mistakes(package: PushPackage, folder: Path) -> list[Mistake]:
    """Why a package may not be published: what the gate refuses, and a card that is wrong; arguments likewise."""
    contents = package.files
    refused = gate_mistakes(contents, this_machine(folder))
    unread = [CARD] if CARD not in contents else [problem.where for problem in refused if problem.where in contents]
    if any(name in unread for name in (CARD, SCORES)) or WEIGHTS not in contents:
        return [*refused, *(Mistake("is absent", name) for name in (CARD, WEIGHTS) if name not in contents)]
    if RUN_FACTS not in contents:  # a script's own card, which nothing here can render again
        return [*refused, *published.card_mistakes(contents[CARD].decode("utf-8"), contents)]
    digest = hashlib.sha256(contents[WEIGHTS]).hexdigest()
    return [*refused, *check_card(contents, digest).mistakes]


def thinned(rows: Sequence[Mapping[str, Any]], last_step: int | None = None) -> bytes:
    """A log of :data:`MOST_ROWS` rows at most, the first and the last among them, a line each.

    Args:
        rows: With their steps.
        last_step: Later rows are left out.
    """
    kept = published.evenly(
        [row for row in rows if last_step is None or (row.get("step") or 0) <= last_step], MOST_ROWS
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept).encode()


def _refuse_links(root: Path, *files: Path) -> None:
    """Of files in a run's folder that are read by their paths and published in part."""
    for file in files:
        if os.path.lexists(file):
            take(root, file.relative_to(root).as_posix())


def _take(root: Path, file: Path, name: str = "") -> bytes:
    """A file in a run's folder, which may be published under another name."""
    return take(root, file.relative_to(root).as_posix(), largest(name or file.name) or 0)


def _scores(root: Path, place: Path, results: Results) -> dict[str, bytes]:
    """What is published of the results in a folder of a run: no path of an adapter or its data, and no texts."""
    content = _take(root, place / RESULTS, SCORES)
    written = json.loads(content)
    if (public := without_paths(written)) != written:
        content = (json.dumps(public, indent=2) + "\n").encode()
    _refuse_links(root, place / SAMPLES)
    samples = published_samples(results, place / SAMPLES)
    boards = {name: text.encode() for name, text in eval_result_files(results).items()}
    return {SCORES: content, **boards, **({PUBLISHED: samples} if samples is not None else {})}


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
