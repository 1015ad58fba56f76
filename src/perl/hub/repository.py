"""Files of a repository on the Hub, at one commit.

user/name[@revision] -> Repository; a file of it -> where it lies here

Whatever goes wrong on the way, a refusal or a connection that breaks, is one line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoSibling

from perl.errors import Mistake, PerlError, first_line
from perl.hub.gate.gate import largest
from perl.policy.hub_lookup import TIMEOUT_SECONDS, look_up
from perl.policy.saved.adapter import WEIGHTS
from perl.run.folder import sha256_of

# Weights that are not kept as a large file have no SHA-256 until they are here.
_LARGEST_PLAIN_WEIGHTS = 50_000_000


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
    commit = look_up("model", name, revision or None)
    if commit is None:
        raise PerlError("HF_HUB_OFFLINE is set, so the Hub is not asked", source, "unset it")
    if isinstance(commit, Mistake):
        raise PerlError(commit.message, source, commit.hint)
    try:
        info = HfApi().model_info(name, revision=commit, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except HfHubHTTPError as error:
        raise PerlError(f"the Hub answers {error.response.status_code} when asked for its files", source) from None
    except Exception as error:  # noqa: BLE001 (a network client's errors are not part of the Hub library's interface)
        raise PerlError(f"its files cannot be listed: {first_line(error)}", source) from None
    return Repository(source, name, commit, {file.rfilename: file for file in info.siblings or ()})


def fetched(repository: Repository, name: str, most: int | None = None) -> Path:
    """Downloads a file.

    Args:
        repository: From :func:`open_repository`.
        name: Of one of its files.
        most: Bytes that it may have; None: as many as a published file of that name.

    Raises:
        PerlError: It is larger, cannot be downloaded, or does not arrive whole.
    """
    size, most = repository.files[name].size, largest(name) or 0 if most is None else most
    if size is None or size > most:
        there = "an unknown number of" if size is None else f"{size:,}"
        raise PerlError(f"{name} has {there} bytes, at most {most:,} are read", repository.where)
    try:
        path = Path(hf_hub_download(repository.name, name, revision=repository.commit))
    except Exception as error:  # noqa: BLE001 (a network client's errors are not part of the Hub library's interface)
        raise PerlError(f"{name} cannot be downloaded: {first_line(error)}", repository.where) from None
    if path.stat().st_size != size:
        raise PerlError(f"{name} arrived with {path.stat().st_size:,} of {size:,} bytes", repository.where)
    return path


def weights_of(repository: Repository) -> tuple[str | None, Path | None]:
    """The SHA-256 of an adapter's weights, and their file where it had to be downloaded to know it.

    The Hub reports it of large files. Weights that it keeps as text are downloaded, up to 50 MB; of larger ones the
    SHA-256 stays unknown.

    Raises:
        PerlError: They cannot be downloaded.
    """
    file = repository.files[WEIGHTS]
    if file.lfs is not None:
        return file.lfs.sha256, None
    if file.size is None or file.size > _LARGEST_PLAIN_WEIGHTS:
        return None, None
    path = fetched(repository, WEIGHTS, _LARGEST_PLAIN_WEIGHTS)
    return sha256_of(path), path
