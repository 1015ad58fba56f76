"""Cards: of a run folder, as it would be published, of a folder of a script's trainer, and one that lies somewhere.

Run -> adapter/README.md, and beside it the facts that only the run knows and the files that the card leads to;
what a trainer reports -> FOLDER/README.md, FOLDER/perl_run.json; run, folder, or Hub id -> FoundCard

They lie beside what was trained, so that the card can be rendered again from the folder, and its links work. Of the Hub
only small files are downloaded, at one commit, and of weights only those whose SHA-256 the Hub does not report.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from huggingface_hub.hf_api import RepoSibling

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.recounting.files import PUBLISHED
from perl.evaluation.recounting.recount import Recount
from perl.hub.card.candidate import identity_mistakes, recount_candidate, said_before, shown_candidate, why_unscored
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.eval_results import LEADERBOARDS
from perl.hub.card.facts import RUN_FACTS, RunFacts, read_run_facts
from perl.hub.card.published import CARD, METRICS, PUBLIC_RECIPE, SCORES, Files, digests_in, split_author, with_author
from perl.hub.card.render import render_card
from perl.hub.gate import largest
from perl.hub.push.package import PushPackage, package_candidate
from perl.policy.hub_files import LARGEST_PLAIN_WEIGHTS, commit_of, fetch, list_files, weights_sha256
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.run.files import sha256_of, write_file, write_text
from perl.run.folder import Run

_BOARD = f"{LEADERBOARDS}any.yaml"
_READ = (CARD, RUN_FACTS, CONFIG, PUBLIC_RECIPE, METRICS, SCORES, PUBLISHED, _BOARD)
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


def run_package(run: Run, repo_id: str | None = None) -> PushPackage:
    """What would be published of a run's final adapter, or of the model that it trained.

    Args:
        run: The run.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.

    Raises:
        PerlError: The run has no adapter, or another than it trained, or its recipe cannot be read.
    """
    candidate = shown_candidate(run)
    raise_all(PerlError, identity_mistakes(candidate))
    return package_candidate(candidate, repo_id)


def run_card(run: Run, repo_id: str | None = None) -> str:
    """The card in :func:`run_package`, with its arguments and errors."""
    return run_package(run, repo_id).files[CARD].decode()


def write_card(run: Run, repo_id: str | None = None) -> list[tuple[int, str]]:
    """Writes :func:`run_card` beside what the run trained.

    Returns:
        Where somebody has edited the older card above its author's words: its lines that are gone, with their numbers.
    """
    package, gone = run_package(run, repo_id), list[tuple[int, str]]()
    card = package.files[CARD].decode()
    if run.card.is_file():
        there = run.card.read_text(encoding="utf-8", errors="replace")
        if run.facts.get("card") not in (None, _digest(there)):
            lines, kept = enumerate(split_author(there)[0].split("\n"), 1), set(card.split("\n"))
            gone = [(number, line) for number, line in lines if line.strip() and line not in kept]
    # With the files that it leads to; one that is no longer published goes.
    for name in (SCORES, PUBLIC_RECIPE, RUN_FACTS, CARD):
        place = run.adapter / name
        if name in package.files:
            place.parent.mkdir(exist_ok=True)
            write_file(place, partial(Path.write_bytes, data=package.files[name]))
        else:
            place.unlink(missing_ok=True)
    run.record(card=_digest(card))
    return gone


def _digest(card: str) -> str:
    """Of a card without its author's words."""
    return hashlib.sha256(split_author(card)[0].rstrip().encode()).hexdigest()


def write_folder_card(folder: Path, facts: RunFacts) -> None:
    """Writes a card and the facts that only the trainer knows, from which and the other files it is rendered again.

    What its author says on an older card there is kept.

    Args:
        folder: With the adapter and its log, as far as there is one.
        facts: What the trainer reports.
    """
    files: Files = {name: folder / name for name in (CONFIG, METRICS) if (folder / name).is_file()}
    digest = sha256_of(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else None
    written = replace(facts, files=digests_in(files, digest)).to_json()
    card = render_card(facts_from_files({**files, RUN_FACTS: written}))
    old = folder / CARD
    card = with_author(card, old.read_text(encoding="utf-8", errors="replace") if old.is_file() else "")
    write_text(folder / RUN_FACTS, written.decode())
    write_text(old, card)


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
    folder, files = Path(name).expanduser(), dict[str, bytes | Path | None]()
    if folder.is_dir():
        if not (folder / CARD).is_file():
            raise PerlError(f"has no {CARD}", str(folder))
        found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        for file, path in found.items():
            files[file] = path if _most(file, path.stat().st_size, str(folder)) or file == WEIGHTS else None
        weights = folder / WEIGHTS
        return FoundCard(str(folder / CARD), files, sha256_of(weights) if weights.is_file() else None)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise PerlError("no such folder, and not a name on the Hub", name, "a run, a folder, or user/name")
    repository, commit, listed = open_repository(name)
    if CARD not in listed:
        raise PerlError(f"has no {CARD}", name)
    for file, there in listed.items():
        most = _most(file, there.size or 0, name)
        files[file] = fetch(repository, commit, there, most) if there.size is not None and most > 0 else None
    digest = None
    if WEIGHTS in files:
        digest, files[WEIGHTS] = weights_of(repository, commit, listed[WEIGHTS])
    return FoundCard(f"{repository}@{commit}", files, digest)


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
    files = package_candidate(candidate, beside.repo_id, beside.checkpoints, beside.licence).files
    now = read_run_facts(files[RUN_FACTS])
    raise_all(PerlError, [*said_before(run, now), *identity_mistakes(candidate)])
    counted = recount_candidate(candidate)
    there: Files = {**files, CARD: run.card, RUN_FACTS: facts}
    return FoundCard(str(run.card), there, candidate.sha256, counted, why_unscored(candidate))


def _most(name: str, size: int, where: str) -> int:
    """Bytes of a file that are read at most; 0: it is not read.

    Raises:
        PerlError: It is larger: a file that the card is rendered from is read whole or the card is not checked.
    """
    kind = _BOARD if name.startswith(LEADERBOARDS) else name  # others may give theirs any name
    most = (largest(kind) or 0) if kind in _READ else 0
    if 0 < most < size:
        raise PerlError(f"has {size:,} bytes, read are {most:,} at most", f"{where}: {name}")
    return most


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
