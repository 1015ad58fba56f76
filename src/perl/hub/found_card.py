"""A card that somebody wrote, with what lies beside it.

run, folder, or Hub id -> FoundCard

Of the Hub only small files are downloaded, and no weights. Knows nothing of what makes a card right.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.hf_api import RepoSibling

from perl.errors import PerlError, Problem
from perl.hub.candidate import find_candidate
from perl.hub.card_check import CARD, LARGEST_CARD, SCORES
from perl.hub.facts import PUBLIC_RECIPE
from perl.hub_lookup import TIMEOUT_SECONDS, look_up
from perl.run import Run, sha256_of
from perl.saved_adapter import WEIGHTS

_LARGEST_RESULTS = 50_000_000
_RUN_FACTS = "run.json"


@dataclass(frozen=True)
class FoundCard:
    """A card.

    Attributes:
        place: Where it was found.
        text: The card.
        results: ``eval/results.json`` beside it; None: there is none.
        files: Paths of everything beside it, as in a repository.
        weights_sha256: Of the adapter beside it; None: there is none.
    """

    place: str
    text: str
    results: dict[str, Any] | None
    files: frozenset[str]
    weights_sha256: str | None


def run_folder(name: str) -> Path | None:
    """The run that a name means, a run folder or the adapter in it; None: it means none."""
    path = Path(name).expanduser()
    if (path / _RUN_FACTS).is_file():
        return path
    above = path.resolve().parent
    return above if path.name in ("adapter", "model") and (above / _RUN_FACTS).is_file() else None


def find_card(name: str) -> FoundCard:
    """The card of a run, a folder, or a repository on the Hub, with an optional ``@revision``.

    Raises:
        PerlError: There is none, or it cannot be read.
    """
    run = run_folder(name)
    if run is not None:
        return _of_run(Run.read(run))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _of_folder(folder)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise PerlError("no such folder, and not a name on the Hub", name, "a run, a folder, or user/name")
    return _of_hub(name)


def _of_run(run: Run) -> FoundCard:
    """As it would be published: pictures, scores and recipe lie elsewhere in a run."""
    if not run.card.is_file():
        raise PerlError("has no card yet", str(run.path), f"perl card {run.path}")
    files = {path.name for path in run.adapter.iterdir()}
    files |= {f"plots/{path.name}" for path in run.plots.glob("*.png")}
    files |= {PUBLIC_RECIPE} if (run.path / "recipe.yaml").is_file() else set()
    files |= {run.metrics.name} if run.metrics.is_file() else set()
    if run.facts.get("method") == "full":
        scored = run.path / "eval"
        place: Path | None = scored if (run.path / SCORES).is_file() else None
        digest = str(run.facts.get("fingerprint", {}).get("adapter"))
    else:
        candidate = find_candidate(run)
        place, digest = candidate.results_folder, candidate.sha256
    results = None
    if place is not None:
        results = _results((place / Path(SCORES).name).read_bytes(), str(place))
        files |= {SCORES, *(f"eval/{path.name}" for path in place.glob("*.png"))}
    return FoundCard(str(run.card), _text(run.card.read_bytes(), str(run.card)), results, frozenset(files), digest)


def _of_folder(folder: Path) -> FoundCard:
    card, scores, weights = folder / CARD, folder / SCORES, folder / WEIGHTS
    if not card.is_file():
        raise PerlError(f"has no {CARD}", str(folder))
    files = frozenset(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    results = _results(scores.read_bytes(), str(scores)) if scores.is_file() else None
    digest = sha256_of(weights) if weights.is_file() else None
    return FoundCard(str(card), _text(card.read_bytes(), str(card)), results, files, digest)


def _of_hub(name: str) -> FoundCard:
    repository, _, revision = name.partition("@")
    if constants.HF_HUB_OFFLINE:
        raise PerlError("HF_HUB_OFFLINE is set, so the Hub is not asked", name)
    commit = look_up("model", repository, revision or None)
    if isinstance(commit, Problem):
        raise PerlError(commit.message, name, commit.hint)
    try:
        found = HfApi().model_info(repository, revision=commit, files_metadata=True, timeout=TIMEOUT_SECONDS)
        siblings = {file.rfilename: file for file in found.siblings or ()}
        if CARD not in siblings:
            raise PerlError(f"has no {CARD}", name)
        text = _text(_download(repository, commit, siblings[CARD], LARGEST_CARD), name)
        scores = siblings.get(SCORES)
        results = _results(_download(repository, commit, scores, _LARGEST_RESULTS), name) if scores else None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise PerlError(f"cannot be had from the Hub: {reason}", name) from None
    weights = siblings.get(WEIGHTS)
    digest = weights.lfs.sha256 if weights is not None and weights.lfs is not None else None
    return FoundCard(f"{repository}@{found.sha}", text, results, frozenset(siblings), digest)


def _download(repository: str, commit: str | None, file: RepoSibling, most: int) -> bytes:
    if file.size is None or file.size > most:
        raise PerlError(f"has {file.size or 0:,} bytes, read are {most:,} at most", f"{repository}: {file.rfilename}")
    return Path(hf_hub_download(repository, file.rfilename, revision=commit)).read_bytes()


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise PerlError(f"its {CARD} is not UTF-8", where) from None


def _results(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PerlError(f"its {SCORES} is no JSON: {str(error)[:100]}", where) from None
    if not isinstance(found, dict):
        raise PerlError(f"its {SCORES} is no mapping", where)
    return found
