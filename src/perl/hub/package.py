"""What is published of an adapter: exactly these files.

Candidate -> name in the repository -> bytes

Nothing of another adapter, nothing of this machine. Knows nothing of the Hub.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.assets import evaluation_tasks
from perl.errors import Problem
from perl.evaluation.published_samples import PUBLISHED, published_samples
from perl.evaluation.results import RESULTS, SAMPLES
from perl.hub.candidate import Candidate
from perl.hub.card import render_card
from perl.hub.card_check import check_card
from perl.hub.card_form import CARD, card_problems
from perl.hub.eval_results import eval_result_files
from perl.hub.facts import METRICS, PUBLIC_RECIPE, SCORES, CardFacts, facts_from_files
from perl.hub.leaks import find_leaks, this_machine
from perl.hub.notes import split_notes
from perl.hub.public_recipe import public_recipe, without_paths
from perl.hub.run_facts import RUN_FACTS, Licence, recipe_of, run_facts
from perl.model import public_name
from perl.run import read_log
from perl.saved_adapter import CONFIG, WEIGHTS

MOST_ROWS = 1000
"""Of ``metrics.jsonl``."""
# A file of one of these names is ours: where we no longer have it, a push takes it away.
_OURS = re.compile(
    r"(?:adapter_model\.safetensors|adapter_config\.json|README\.md|perl_recipe\.yaml|perl_run\.json|metrics\.jsonl|"
    r"eval/results\.json|eval/samples\.jsonl|"
    r"eval/[^/]+\.png|plots/[^/]+\.png)"
)


@dataclass(frozen=True)
class Package:
    """Files of a repository.

    Attributes:
        files: Name in the repository -> its content, or the file that holds it.
    """

    files: Mapping[str, bytes | Path]

    def content(self, name: str) -> bytes:
        """A file's bytes."""
        held = self.files[name]
        return held if isinstance(held, bytes) else held.read_bytes()

    def contents(self) -> dict[str, bytes]:
        """Every file's bytes."""
        return {name: self.content(name) for name in self.files}

    def size(self, name: str) -> int:
        """A file's number of bytes."""
        held = self.files[name]
        return len(held) if isinstance(held, bytes) else held.stat().st_size

    def write(self, folder: Path) -> "Package":
        """Writes the files into a folder.

        Returns:
            The same package, in that folder.
        """
        for name in self.files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.content(name))
        return read_package(folder)


def read_package(folder: Path) -> Package:
    """A package that was written into a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return Package({path.relative_to(folder).as_posix(): path for path in files})


def is_ours(name: str) -> bool:
    """Whether a file of a repository is one that we write."""
    folder, _, file = name.rpartition("/")
    # Others may have added scores of other benchmarks.
    of_a_task = folder == ".eval_results" and file.removesuffix(".yaml") in evaluation_tasks()
    return of_a_task or _OURS.fullmatch(name) is not None


def package_candidate(
    candidate: Candidate, repo_id: str | None = None, steps: Sequence[int] = (), licence: Licence | None = None
) -> Package:
    """Everything that is published of an adapter.

    The card comes last: it is rendered from the other files, so that whoever has them can do it again.

    Args:
        candidate: Which; of a model that was itself trained there is all but the weights.
        repo_id: Under which name; for the card.
        steps: Of the run's checkpoints that are published too; for the card.
        licence: Of the base; None: the Hub is asked.

    Raises:
        PerlError: The run folder lacks what a card must say.
    """
    run, folder = candidate.run, candidate.folder
    files: dict[str, bytes | Path] = {RUN_FACTS: run_facts(candidate, repo_id, list(steps), licence).to_json()}
    if (folder / CONFIG).is_file():
        files |= {
            WEIGHTS: folder / WEIGHTS,
            CONFIG: _public_config((folder / CONFIG).read_text(encoding="utf-8")),
        }
    recipe = recipe_of(run)
    if recipe is not None:
        files[PUBLIC_RECIPE] = public_recipe(recipe).encode()
    # The curves of a checkpoint's revision end where it does; a picture would show more.
    of_a_step = isinstance(candidate.which, int)
    if run.metrics.is_file():
        rows = read_log(run.metrics)
        files[METRICS] = thinned(rows, last_step=candidate.step if of_a_step else None)
    if candidate.results is not None and candidate.results_folder is not None:
        files[SCORES] = _without_paths(candidate.results_folder / RESULTS)
        samples = published_samples(candidate.results, candidate.results_folder / SAMPLES)
        files |= {PUBLISHED: samples} if samples is not None else {}
        files |= {f"eval/{path.name}": path for path in sorted(candidate.results_folder.glob("*.png"))}
        files |= {name: text.encode() for name, text in eval_result_files(candidate.results).items()}
    if not of_a_step:
        files |= {f"plots/{path.name}": path for path in sorted(run.plots.glob("*.png"))}
    card = render_card(facts_from_files(files))
    notes = split_notes(run.card.read_text(encoding="utf-8"))[1] if run.card.is_file() else ""
    files[CARD] = (f"{card}\n{notes}" if notes else card).encode()
    return Package(dict(sorted(files.items())))


def card_facts(candidate: Candidate, repo_id: str | None = None) -> CardFacts:
    """What a run tells of one of its adapters; arguments as of :func:`package_candidate`.

    Raises:
        PerlError: The run's recipe cannot be read, or it lacks what a card must say.
    """
    return facts_from_files(package_candidate(candidate, repo_id).files)


def package_problems(package: Package, folder: Path, tokens: Collection[str] = ()) -> list[Problem]:
    """Why a package may not be published: leaks, and a card that is wrong.

    Args:
        package: What would be.
        folder: The run's, which must not be named.
        tokens: That must not be in it.
    """
    contents = package.contents()
    leaks = find_leaks(contents, this_machine(folder, tokens=tokens))
    if RUN_FACTS not in contents:  # a script's own card, of which nobody says what it comes from
        return [*leaks, *card_problems(contents[CARD].decode("utf-8"), contents)]
    digest = hashlib.sha256(contents[WEIGHTS]).hexdigest()
    return [*leaks, *check_card(contents, digest).problems]


def thinned(rows: Sequence[Mapping[str, Any]], last_step: int | None = None, most: int = MOST_ROWS) -> bytes:
    """A log of so many rows at most, the first and the last among them, a line each.

    Args:
        rows: With their steps.
        last_step: Later rows are left out.
        most: How many.
    """
    if last_step is not None:
        rows = [row for row in rows if (row.get("step") or 0) <= last_step]
    if len(rows) > most:
        rows = [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _public_config(text: str) -> bytes:
    """The adapter's config; a base that is named by a path is named by its last part."""
    config = json.loads(text)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if name is None:
        return text.encode()
    known, commit = public_name(name, revision)
    known = without_paths(known)
    if (known, commit) == (name, revision):
        return text.encode()
    changed = config | {"base_model_name_or_path": known, "revision": commit}
    return (json.dumps(changed, indent=2, sort_keys=True) + "\n").encode()


def _without_paths(file: Path) -> bytes:
    """Results as they are, unless an adapter or its data were named by a path."""
    text = file.read_text(encoding="utf-8")
    results = json.loads(text)
    public = without_paths(results)
    return text.encode() if public == results else (json.dumps(public, indent=2) + "\n").encode()
