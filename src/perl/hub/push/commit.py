"""Makes a repository on the Hub hold a package, in one commit or not at all.

Package, user/name -> Pushed

What is uploaded before the commit is seen by nobody. After an answer that never came, the repository is looked at:
where it holds the package already, there is no second commit. Files of others stay.
"""

import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from perl.errors import BrokenPromiseError, PerlError, raise_all
from perl.hub.card.form import CARD, FRONT_MATTER, LARGEST_CARD, read_front_matter
from perl.hub.gate.gate import gate_mistakes, is_ours
from perl.hub.push.package import Package
from perl.hub.push.retries import Sleep, retry
from perl.policy.saved.adapter import WEIGHTS

MAIN, CHECKPOINTS = "main", "checkpoints"
"""Branches: of the adapter, and of its checkpoints, each of which has a tag ``step-N`` too."""
# Weights of models, which no adapter's repository holds before an adapter.
_MODELS = (".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", ".tflite")
# What the Hub itself puts into a repository.
_OF_THE_HUB = (".gitattributes",)
# Endings of files that run code when they are loaded, or may.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5", ".msgpack")


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    Attributes:
        repo_id: Where.
        commit: That holds the package.
        url: For people.
        size: Bytes of the package.
        changed: Whether there was anything to commit.
        deleted: Older files of ours that the package no longer has.
        foreign: Files of others, left as they are.
        replaced: Commit that still holds another adapter, which was replaced; None: there was none.
        card_before: Digest of another card, which was replaced and is in the commit ``before``; None: there was none.
        before: Commit that was the newest.
    """

    repo_id: str
    commit: str
    url: str
    size: int
    changed: bool
    deleted: tuple[str, ...]
    foreign: tuple[str, ...]
    replaced: str | None = None
    card_before: str | None = None
    before: str | None = None


def push_package(
    package: Package,
    repo_id: str,
    *,
    private: bool = False,
    message: str = "Adapter trained with perl-rl",
    branch: str = MAIN,
    may_replace: Collection[str] | None = (),
    sleep: Sleep = time.sleep,
) -> Pushed:
    """Makes a branch of a repository hold the package, once every file has passed the gate.

    Args:
        package: The files; others of ours on the branch are deleted in the same commit.
        repo_id: ``user/name``; created if it does not exist.
        private: Create it so that only its owner sees it.
        message: Of the commit.
        branch: Created from the newest commit of ``main`` if it does not exist.
        may_replace: Digests of the weights and cards that may be there and be replaced; None: any.
        sleep: As in :func:`perl.hub.push.retries.retry`.

    Raises:
        PerlError: The gate refuses a file; no login, no rights; or the repository holds a whole model, pickles, or
            another adapter, another model or a card that is somebody's.
        HubOutageError: The Hub cannot be reached.
        BrokenPromiseError: The Hub holds other bytes than were sent.
    """
    raise_all(PerlError, gate_mistakes(package.files))
    api = HfApi()

    def create() -> None:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if branch != MAIN:
            api.create_branch(repo_id, branch=branch, exist_ok=True)

    retry(create, repo_id, sleep)
    fingerprints = {name: _Fingerprint.of(content) for name, content in package.files.items()}
    before: list[ModelInfo] = []

    def commit() -> ModelInfo:
        head = _look(api, repo_id, branch)
        before[:] = before or [head]
        _check_place(head, private=private)
        if may_replace is not None:
            _check_owner(head, fingerprints, may_replace)
        changed = _changed(head, fingerprints)
        stale = _stale(head, package)
        if not changed and not stale:
            return head
        done = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=package.files[name]) for name in changed),
                *(CommitOperationDelete(path_in_repo=name) for name in stale),
            ],
            commit_message=message,
            revision=branch,
            parent_commit=head.sha,  # so that nothing is written over a commit that was not looked at
        )
        return _look(api, repo_id, done.oid)

    after = retry(commit, repo_id, sleep)
    wrong = _changed(after, fingerprints)
    if wrong:
        raise BrokenPromiseError(f"the Hub holds other bytes than were sent: {', '.join(wrong[:3])}", repo_id)
    return Pushed(
        repo_id=repo_id,
        commit=str(after.sha),
        url=f"{api.endpoint}/{repo_id}",
        size=package.size,
        changed=after.sha != before[0].sha,
        deleted=tuple(_stale(before[0], package)),
        foreign=tuple(n for n in _held(after) if not is_ours(n) and n not in (*package.files, *_OF_THE_HUB)),
        replaced=str(before[0].sha) if _other(before[0], fingerprints, WEIGHTS) is not None else None,
        card_before=None if (card := _other(before[0], fingerprints, CARD)) is None else _digest(card),
        before=str(before[0].sha),
    )


def push_revision(package: Package, repo_id: str, tag: str, *, private: bool = False, sleep: Sleep = time.sleep) -> str:
    """Adds a package to a repository as a revision of its own, which never changes again.

    Returns:
        Its commit.

    Raises:
        PerlError: As in :func:`push_package`, or the tag names something else.
        HubOutageError: Likewise.
    """
    api = HfApi()
    if tag in retry(lambda: _tags(api, repo_id), repo_id, sleep):
        there = retry(lambda: _look(api, repo_id, tag), repo_id, sleep)
        # Not the card, which a newer version may write otherwise: the weights say whether it is the same adapter.
        wanted = {name: _Fingerprint.of(data) for name, data in package.files.items() if name.startswith("adapter_")}
        if _changed(there, wanted):
            hint = f"choose another --repo, or `hf repos tag delete {repo_id} {tag}`"
            raise PerlError(f"has a revision {tag} with another adapter", repo_id, hint)
        return str(there.sha)
    pushed = push_package(
        package,
        repo_id,
        private=private,
        message=f"Checkpoint {tag}",
        branch=CHECKPOINTS,
        may_replace=None,  # each one before has a tag
        sleep=sleep,
    )
    retry(lambda: api.create_tag(repo_id, tag=tag, revision=pushed.commit, exist_ok=True), repo_id, sleep)
    return pushed.commit


def _tags(api: HfApi, repo_id: str) -> set[str]:
    """Names of a repository's tags; empty before the repository exists."""
    if not api.repo_exists(repo_id):
        return set()
    return {tag.name for tag in api.list_repo_refs(repo_id).tags}


@dataclass(frozen=True)
class _Fingerprint:
    """What the Hub says of a file: its size, and a hash by which of two ways it keeps it."""

    size: int
    sha256: str
    git_sha1: str

    @classmethod
    def of(cls, content: bytes) -> "_Fingerprint":
        blob = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
        blob.update(content)
        return cls(len(content), hashlib.sha256(content).hexdigest(), blob.hexdigest())

    def is_of(self, there: RepoSibling) -> bool:
        if there.lfs is not None:
            return (there.lfs.size, there.lfs.sha256) == (self.size, self.sha256)
        return there.blob_id == self.git_sha1


def _look(api: HfApi, repo_id: str, revision: str) -> ModelInfo:
    return api.model_info(repo_id, revision=revision, files_metadata=True)


def _held(info: ModelInfo) -> dict[str, RepoSibling]:
    """Name -> file."""
    return {sibling.rfilename: sibling for sibling in info.siblings or ()}


def _changed(info: ModelInfo, fingerprints: Mapping[str, _Fingerprint]) -> list[str]:
    """Files of which the repository holds other bytes, or none."""
    held = _held(info)
    return [name for name, wanted in fingerprints.items() if name not in held or not wanted.is_of(held[name])]


def _stale(info: ModelInfo, package: Package) -> list[str]:
    """Files of ours in the repository that the package does not have."""
    return [name for name in _held(info) if is_ours(name) and name not in package.files]


def _check_place(info: ModelInfo, *, private: bool) -> None:
    """Whether the repository is one for an adapter.

    Raises:
        PerlError: It is not, or everybody sees it though it should be private.
    """
    names, where = list(_held(info)), str(info.id)
    if private and info.private is False:
        raise PerlError("exists and is public", where, f"hf repos settings {where} --private, or leave out --private")
    weights = [n for n in names if "/" not in n and n.startswith("model") and n.endswith(".safetensors")]
    if weights and "config.json" in names:
        raise PerlError(f"holds a whole model: {weights[0]}", where, "an adapter needs a repository of its own")
    pickles = [name for name in names if PurePosixPath(name).suffix.lower() in PICKLES]
    if pickles:
        hint = f"hf repos delete-files {where} {' '.join(pickles[:3])}"
        raise PerlError(f"holds pickles, which run code when they are loaded: {', '.join(pickles[:3])}", where, hint)


def _other(info: ModelInfo, fingerprints: Mapping[str, _Fingerprint], name: str) -> RepoSibling | None:
    """The file of that name that is there and is not that of the package."""
    there, wanted = _held(info).get(name), fingerprints.get(name)
    return None if there is None or (wanted is not None and wanted.is_of(there)) else there


def digests(package: Package) -> tuple[str, ...]:
    """By which the Hub may name the package's weights and card, whichever way it keeps them."""
    found = (_Fingerprint.of(package.files[name]) for name in (WEIGHTS, CARD) if name in package.files)
    return tuple(digest for one in found for digest in (one.sha256, one.git_sha1))


def _digest(there: RepoSibling) -> str:
    return str(there.lfs.sha256 if there.lfs is not None else there.blob_id)


def _check_owner(info: ModelInfo, fingerprints: Mapping[str, _Fingerprint], may_replace: Collection[str]) -> None:
    """Whether the weights and the card that are there may go.

    Raises:
        PerlError: They are of another adapter, another model, or were edited by somebody.
    """
    held = _held(info)
    models = [name for name in held if "/" not in name and PurePosixPath(name).suffix.lower() in _MODELS]
    if models and WEIGHTS not in held:
        hint = "--replace puts the adapter beside it, or another --repo"
        raise PerlError(f"holds another model: {models[0]}", str(info.id), hint)
    there, hint = _other(info, fingerprints, WEIGHTS), "--replace overwrites it, or another --repo"
    if there is not None and _digest(there) not in may_replace:
        shown = _digest(there)[:12]
        raise PerlError(f"holds another adapter ({shown}), which this run has not pushed", str(info.id), hint)
    card, wanted = held.get(CARD), fingerprints.get(CARD)
    if card is None or wanted is None or wanted.is_of(card) or _digest(card) in may_replace:
        return
    if (card.size or 0) <= LARGEST_CARD and _says_nothing(Path(hf_hub_download(info.id, CARD, revision=info.sha))):
        return
    message = f"its {CARD} was written or edited by somebody, not by a push of this run"
    raise PerlError(message, str(info.id), f"take over its words below ## Notes, then {hint}")


def _says_nothing(card: Path) -> bool:
    """Whether it is the card that the Hub's form for a new repository writes: a licence at most."""
    text = card.read_text(encoding="utf-8", errors="replace")
    metadata, _ = read_front_matter(text)
    words = FRONT_MATTER.sub("", text).strip()
    return not words and all(key.startswith("license") for key in metadata or {})
