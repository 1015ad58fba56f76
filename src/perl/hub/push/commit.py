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
from perl.hub.card.published import AUTHOR, CARD, FRONT_MATTER, LARGEST_CARD, read_front_matter
from perl.hub.gate import gate_mistakes, is_ours
from perl.hub.push.package import PushPackage
from perl.hub.push.requests import Sleep, retry
from perl.policy.saved.adapter import WEIGHTS

MAIN, CHECKPOINTS = "main", "checkpoints"
"""Branches: of the adapter, and of its checkpoints, each of which has a tag ``step-N`` too."""
# Endings of files that run code when they are loaded, or may, and of other weights of models.
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5", ".msgpack")
_MODELS = (".safetensors", ".gguf", ".onnx", ".tflite")
# What the Hub itself puts into a repository.
_OF_THE_HUB = (".gitattributes",)


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
        replaced: Of other weights and another card that were there and were replaced, name -> digest.
        before: Commit that was the newest, and holds these.
    """

    repo_id: str
    commit: str
    url: str
    size: int
    changed: bool
    deleted: tuple[str, ...]
    foreign: tuple[str, ...]
    replaced: Mapping[str, str]
    before: str


def push_package(
    package: PushPackage,
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
        sleep: As in :func:`perl.hub.push.requests.retry`.

    Raises:
        PerlError: The gate refuses a file; no login, no rights; or the repository holds a model, pickles, another
            adapter, or a card that is somebody's.
        HubOutageError: The Hub cannot be reached.
        BrokenPromiseError: It holds other bytes than were sent.
    """
    raise_all(PerlError, gate_mistakes(package.files))
    api = HfApi()
    before: list[ModelInfo] = []

    def create() -> None:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if branch != MAIN:
            api.create_branch(repo_id, branch=branch, exist_ok=True)

    def commit() -> str:
        head = api.model_info(repo_id, revision=branch, files_metadata=True)
        before[:] = before or [head]
        _check_place(head, private=private)
        if may_replace is not None:
            _check_owner(head, package, may_replace)
        changed, stale = _changed(head, package.files), _stale(head, package)
        if not changed and not stale:
            return str(head.sha)
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
        if wrong := _changed(api.model_info(repo_id, revision=done.oid, files_metadata=True), package.files):
            raise BrokenPromiseError(f"the Hub holds other bytes than were sent: {', '.join(wrong[:3])}", repo_id)
        return done.oid

    retry(create, repo_id, sleep)
    made = retry(commit, repo_id, sleep)
    (then,) = before
    stale, others = _stale(then, package), _changed(then, package.files)
    known = {*package.files, *stale, *_OF_THE_HUB}
    return Pushed(
        repo_id=repo_id,
        commit=made,
        url=f"{api.endpoint}/{repo_id}",
        size=package.size,
        changed=made != then.sha,
        deleted=tuple(stale),
        foreign=tuple(name for name in _held(then) if name not in known),
        replaced={
            name: _digest(_held(then)[name]) for name in (WEIGHTS, CARD) if name in others and name in _held(then)
        },
        before=str(then.sha),
    )


def push_revision(
    package: PushPackage, repo_id: str, tag: str, *, private: bool = False, sleep: Sleep = time.sleep
) -> str:
    """Adds a package to a repository as a revision of its own, which never changes again.

    Returns:
        Its commit.

    Raises:
        PerlError: As in :func:`push_package`, or the tag names something else.
        HubOutageError: Likewise.
    """
    api = HfApi()

    def tags() -> set[str]:
        return {there.name for there in api.list_repo_refs(repo_id).tags} if api.repo_exists(repo_id) else set()

    if tag in retry(tags, repo_id, sleep):
        there = retry(lambda: api.model_info(repo_id, revision=tag, files_metadata=True), repo_id, sleep)
        # Not the card, which a newer version may write otherwise: the weights say whether it is the same adapter.
        if _changed(there, {name: data for name, data in package.files.items() if name.startswith("adapter_")}):
            hint = f"choose another --repo, or `hf repos tag delete {repo_id} {tag}`"
            raise PerlError(f"has a revision {tag} with another adapter", repo_id, hint)
        return str(there.sha)
    # Each one that is on the branch has a tag: any may be replaced.
    options = {"private": private, "branch": CHECKPOINTS, "may_replace": None, "sleep": sleep}
    pushed = push_package(package, repo_id, message=f"Checkpoint {tag}", **options)  # type: ignore[arg-type]
    retry(lambda: api.create_tag(repo_id, tag=tag, revision=pushed.commit, exist_ok=True), repo_id, sleep)
    return pushed.commit


def digests(package: PushPackage) -> tuple[str, ...]:
    """By which the Hub may name the package's weights and card, whichever way it keeps them."""
    return tuple(d for name in (WEIGHTS, CARD) if name in package.files for d in _digests_of(package.files[name]))


def _digests_of(content: bytes) -> tuple[str, str]:
    """SHA-256, as of a large file, and git's id of a blob."""
    blob = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    blob.update(content)
    return hashlib.sha256(content).hexdigest(), blob.hexdigest()


def _digest(there: RepoSibling) -> str:
    return str(there.lfs.sha256 if there.lfs is not None else there.blob_id)


def _held(info: ModelInfo) -> dict[str, RepoSibling]:
    """Name -> file."""
    return {sibling.rfilename: sibling for sibling in info.siblings or ()}


def _changed(info: ModelInfo, files: Mapping[str, bytes]) -> list[str]:
    """Files of which the repository holds other bytes, or none."""
    held = _held(info)
    return [name for name, data in files.items() if name not in held or _digest(held[name]) not in _digests_of(data)]


def _stale(info: ModelInfo, package: PushPackage) -> list[str]:
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
    models = [name for name in names if "/" not in name and name.lower().endswith(_MODELS)]
    if models and WEIGHTS not in names:
        raise PerlError(f"holds a model: {models[0]}", where, "an adapter needs a repository of its own")
    pickles = [name for name in names if PurePosixPath(name).suffix.lower() in _PICKLES]
    if pickles:
        hint = f"hf repos delete-files {where} {' '.join(pickles[:3])}"
        raise PerlError(f"holds pickles, which run code when they are loaded: {', '.join(pickles[:3])}", where, hint)


def _check_owner(info: ModelInfo, package: PushPackage, may_replace: Collection[str]) -> None:
    """Whether the weights and the card that are there may go.

    Raises:
        PerlError: They are of another adapter, or were edited by somebody.
    """
    held = _held(info)
    for name in (WEIGHTS, CARD):
        if name not in held or _digest(held[name]) in (*may_replace, *_digests_of(package.files.get(name, b""))):
            continue
        hint = "--replace overwrites it, or another --repo"
        if name == WEIGHTS:
            shown = _digest(held[name])[:12]
            raise PerlError(f"holds another adapter ({shown}), which this run has not pushed", str(info.id), hint)
        edited = (held[name].size or 0) > LARGEST_CARD
        if not edited:  # the card that the Hub's form for a new repository writes has a licence at most
            file = Path(hf_hub_download(info.id, CARD, revision=info.sha))
            text = file.read_text(encoding="utf-8", errors="replace")
            said = read_front_matter(text)[0] or {}
            edited = bool(FRONT_MATTER.sub("", text).strip()) or not all(key.startswith("license") for key in said)
        if edited:
            message = f"its {CARD} was written or edited by somebody, not by a push of this run"
            raise PerlError(message, str(info.id), f"take over its words below {AUTHOR!r}, then {hint}")
