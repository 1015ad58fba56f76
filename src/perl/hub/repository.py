"""Files of a repository on the Hub, at one commit.

user/name[@revision] -> Repository; a file of it -> where it lies here
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.hf_api import RepoSibling

from perl.errors import PerlError
from perl.hub.gate.gate import largest
from perl.policy.hub_files import LARGEST_PLAIN_WEIGHTS, commit_of, fetch, list_files, weights_sha256
from perl.policy.saved.adapter import WEIGHTS


@dataclass(frozen=True)
class Repository:
    """A repository at one commit.

    Attributes:
        where: As the user named it, for errors.
        name: ``user/name``.
        commit: The revision that was asked for, or the newest.
        files: Name -> what the Hub reports of it.
    """

    where: str
    name: str
    commit: str
    files: Mapping[str, RepoSibling]


def open_repository(source: str) -> Repository:
    """Lists a repository's files.

    Args:
        source: ``user/name`` with an optional ``@revision``.

    Raises:
        PerlError: There is none, or the Hub is unreachable.
    """
    name, _, revision = source.partition("@")
    commit = commit_of(name, revision or None, source)
    if commit is None:
        raise PerlError("HF_HUB_OFFLINE is set, so the Hub is not asked", source, "unset it")
    return Repository(source, name, commit, list_files(name, commit))


def fetched(repository: Repository, name: str, most: int | None = None) -> Path:
    """Downloads a file.

    Args:
        repository: From :func:`open_repository`.
        name: Of one of its files.
        most: Bytes that it may have; None: as many as a published file of that name.

    Raises:
        PerlError: It is larger, cannot be downloaded, or arrives with other bytes than the Hub declares.
    """
    most = largest(name) or 0 if most is None else most
    return fetch(repository.name, repository.commit, repository.files[name], most)


def weights_of(repository: Repository) -> tuple[str | None, Path | None]:
    """The SHA-256 of an adapter's weights, and their file where it had to be downloaded to know it.

    The Hub reports it of large files. Weights that it keeps as text are downloaded, up to 50 MB; of larger ones the
    SHA-256 stays unknown.

    Raises:
        PerlError: They cannot be downloaded.
    """
    file = repository.files[WEIGHTS]
    if file.lfs is None and (file.size is None or file.size > LARGEST_PLAIN_WEIGHTS):
        return None, None
    return weights_sha256(repository.name, repository.commit, file)
