"""A card that somebody wrote, with what lies beside it, and files of a repository on the Hub, at one commit.

run, folder, or Hub id -> FoundCard; user/name[@revision] -> name, commit, files

Of the Hub only small files are downloaded, and of weights only those whose SHA-256 the Hub does not report. What makes
a card right is for :mod:`perl.hub.card.check`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.hf_api import RepoSibling

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.recounting.published_samples import PUBLISHED
from perl.evaluation.recounting.recount import Recount
from perl.hub.card.candidate import identity_mistakes, recount_candidate, why_unscored
from perl.hub.card.eval_results import LEADERBOARDS
from perl.hub.card.facts import RUN_FACTS, read_run_facts
from perl.hub.card.published import CARD, METRICS, PUBLIC_RECIPE, SCORES, Files
from perl.hub.gate.gate import largest
from perl.hub.push.package import package_candidate
from perl.hub.run_card import shown_candidate
from perl.policy.hub_files import LARGEST_PLAIN_WEIGHTS, commit_of, fetch, list_files, weights_sha256
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.run.files import sha256_of
from perl.run.folder import Run

_READ = (CARD, RUN_FACTS, CONFIG, PUBLIC_RECIPE, METRICS, SCORES, PUBLISHED)
_RUN = "run.json"


@dataclass(frozen=True)
class FoundCard:
    """A card.

    Attributes:
        place: Where it was found.
        files: Everything beside it, and itself, as in a repository.
        weights_sha256: Of the adapter beside it; None: there is none, or it is unknown.
        counted: Its scores, counted again from samples that are not published; None: there are none.
        unscored: Why results that lie there are not shown.
    """

    place: str
    files: Files
    weights_sha256: str | None
    counted: Recount | None = None
    unscored: Mistake | None = None


def run_folder(name: str) -> Path | None:
    """The run that a name means, a run folder or the adapter in it; None: it means none."""
    path = Path(name).expanduser()
    if (path / _RUN).is_file():
        return path
    above = path.resolve().parent
    return above if path.name in ("adapter", "model") and (above / _RUN).is_file() else None


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
    """As it would be published: scores, log and recipe lie elsewhere in a run.

    Of the facts beside the card those count that the run does not know: where it will lie, and what the Hub said.
    """
    facts = run.adapter / RUN_FACTS
    for file in (run.card, facts):
        if not file.is_file():
            message = "has no card yet" if file == run.card else f"its card lies there without its {RUN_FACTS}"
            raise PerlError(message, str(run.path), f"perl card {run.path}")
    beside, candidate = read_run_facts(facts.read_bytes()), shown_candidate(run)
    package = package_candidate(candidate, beside.repo_id, beside.checkpoints, beside.licence)
    files: dict[str, bytes | Path | None] = {**package.files, CARD: run.card}
    # The wall time goes on for a moment after a training has written its card.
    known: dict[str, Any] = {name: getattr(beside, name) for name in ("perl", "name", "licence", "seconds")}
    again = vars(replace(read_run_facts(package.files[RUN_FACTS]), **known))
    if differ := [key for key, value in vars(beside).items() if value != again[key]]:
        what = ", ".join(f"{key} {getattr(beside, key)!r}, not {again[key]!r}" for key in differ)
        raise PerlError(f"says {what[:200]} as run.json does", str(facts), f"perl card {run.path}")
    files[RUN_FACTS] = facts
    counted = recount_candidate(candidate) if candidate.results_folder is not None else None
    raise_all(PerlError, identity_mistakes(candidate))
    return FoundCard(str(run.card), files, candidate.sha256, counted, why_unscored(candidate))


def _of_folder(folder: Path) -> FoundCard:
    if not (folder / CARD).is_file():
        raise PerlError(f"has no {CARD}", str(folder))
    files: dict[str, bytes | Path | None] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = path if name == WEIGHTS or path.stat().st_size <= _most(name) else None
            _refuse_cut(name, path.stat().st_size, str(folder))
    weights = folder / WEIGHTS
    return FoundCard(str(folder / CARD), files, sha256_of(weights) if weights.is_file() else None)


def _of_hub(name: str) -> FoundCard:
    repository, commit, listed = open_repository(name)
    if CARD not in listed:
        raise PerlError(f"has no {CARD}", name)
    files: dict[str, bytes | Path | None] = {}
    for file, there in listed.items():
        most = _most(file)
        _refuse_cut(file, there.size or 0, name)
        files[file] = fetch(repository, commit, there, most) if there.size is not None and most > 0 else None
    digest = None
    if WEIGHTS in files:
        digest, files[WEIGHTS] = weights_of(repository, commit, listed[WEIGHTS])
    return FoundCard(f"{repository}@{commit}", files, digest)


def _most(name: str) -> int:
    """Bytes of a file that are read at most; 0: it is not read."""
    if name.startswith(LEADERBOARDS):  # others may give theirs any name
        name = f"{LEADERBOARDS}any.yaml"
    elif name not in _READ:
        return 0
    return largest(name) or 0


def _refuse_cut(name: str, size: int, where: str) -> None:
    """A file that the card is rendered from is read whole or the card is not checked."""
    if 0 < _most(name) < size:
        raise PerlError(f"has {size:,} bytes, read are {_most(name):,} at most", f"{where}: {name}")


def open_repository(source: str) -> tuple[str, str, dict[str, RepoSibling]]:
    """Lists a repository's files at one commit: the revision that was asked for, or the newest.

    Args:
        source: ``user/name`` with an optional ``@revision``.

    Returns:
        Its name, its commit, and by name what the Hub reports of each file.

    Raises:
        PerlError: There is none, or the Hub is unreachable.
    """
    name, _, revision = source.partition("@")
    commit = commit_of(name, revision or None, source)
    if commit is None:
        raise PerlError("HF_HUB_OFFLINE is set, so the Hub is not asked", source, "unset it")
    return name, commit, list_files(name, commit)


def weights_of(name: str, commit: str, file: RepoSibling) -> tuple[str | None, Path | None]:
    """The SHA-256 of an adapter's weights, and their file where it had to be downloaded to know it.

    The Hub reports it of large files. Weights that it keeps as text are downloaded, up to 50 MB; of larger ones the
    SHA-256 stays unknown.

    Raises:
        PerlError: They cannot be downloaded.
    """
    if file.lfs is None and (file.size is None or file.size > LARGEST_PLAIN_WEIGHTS):
        return None, None
    return weights_sha256(name, commit, file)
