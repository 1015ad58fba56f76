"""Files of a repository on the Hub, at one commit, with the bytes that the Hub declares.

name, revision -> commit -> its files; a file -> where it lies here

Without a network transformers and datasets try for most of a minute and then print a page; one request tells at once
apart a wrong name, a login that is missing and a network that is down. A file is refused before it is downloaded if it
is too large or is not the one that is wanted.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal, NoReturn

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)
from huggingface_hub.hf_api import RepoSibling

from perl.errors import Mistake, ModelError, PerlError, first_line
from perl.run.files import sha256_of

TIMEOUT_SECONDS = 15.0
_CACHED = "with HF_HUB_OFFLINE=1 what is cached is used"
HUB_ERRORS = (
    httpx2.HTTPError,
    httpx2.InvalidURL,
    RevisionResolutionError,
    XetDownloadError,
    ImportError,  # a proxy that needs a package
    OSError,
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
)
"""What the Hub's library raises: refusals, its client's errors, and what malformed answers or a proxy's page cause."""
LARGEST_PLAIN_WEIGHTS = 50_000_000
"""Bytes of weights that are downloaded for their SHA-256: the Hub has none of files that it keeps as text."""


def look_up(kind: Literal["model", "dataset"], name: str, revision: str | None) -> str | Mistake | None:
    """Whether the Hub has it.

    Args:
        kind: What to look for.
        name: ``user/name`` as given by the user; not a local path.
        revision: Branch, tag or commit; None: the main branch.

    Returns:
        The commit; or what is wrong; or None where ``HF_HUB_OFFLINE`` forbids asking and only the cache counts.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    api = HfApi()
    ask = api.model_info if kind == "model" else api.dataset_info
    what = "data set" if kind == "dataset" else kind
    try:
        return ask(name, revision=revision, timeout=TIMEOUT_SECONDS).sha
    except HFValidationError:
        return Mistake(f"no {what} {name!r}: no such folder or file, and not a name on the Hub (user/name)")
    except GatedRepoError:
        return Mistake(f"{name} is gated", hint="accept its terms on the Hub, then `hf auth login`")
    except RevisionNotFoundError:
        return Mistake(f"{name} has no revision {revision!r} on the Hub")
    except RepositoryNotFoundError:
        return Mistake(f"no {what} {name!r}: no such folder or file, and the Hub has none or it is private")
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            return Mistake(f"the Hub refuses your token for {name}", hint="`hf auth login`, or unset HF_TOKEN")
        return Mistake(f"the Hub answers {status} for {name}", hint=_CACHED)
    except HUB_ERRORS as error:
        host = os.environ.get("HF_ENDPOINT", "the Hub")
        return Mistake(f"no {what} {name!r} here, and {host} cannot be reached: {error}", hint=_CACHED)


def is_out_of_reach(error: PerlError) -> bool:
    """Whether an error says that the Hub was not asked or did not answer: then its hint speaks of what is cached."""
    return "HF_HUB_OFFLINE" in error.mistakes[0].hint


def commit_of(repo: str, revision: str | None, where: str) -> str | None:
    """The commit that a revision is now; None where ``HF_HUB_OFFLINE`` forbids asking.

    Args:
        repo: ``user/name``.
        revision: Branch, tag or commit; None: the main branch.
        where: What the user named, for errors.

    Raises:
        PerlError: There is no such repository or revision, or the Hub is unreachable.
    """
    found = look_up("model", repo, revision)
    if isinstance(found, Mistake):
        raise PerlError(found.message, where, found.hint)
    return found


def list_files(repo: str, commit: str | None) -> dict[str, RepoSibling]:
    """The files of a repository by name, with their sizes and digests.

    Raises:
        ModelError: They cannot be listed.
    """
    try:
        info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except HfHubHTTPError as error:
        raise ModelError(f"the Hub answers {error.response.status_code} when asked for the files of {repo}") from error
    except HUB_ERRORS as error:
        raise ModelError(f"the files of {repo} cannot be listed: {first_line(error)}") from error
    return {file.rfilename: file for file in info.siblings or ()}


def fetch(repo: str, commit: str | None, file: RepoSibling, largest: int, sha256: str | None = None) -> Path:
    """Downloads a file, or takes it from the Hub's cache.

    Args:
        repo: The repository.
        commit: Of it.
        file: From :func:`list_files`.
        largest: Bytes that it may have.
        sha256: That it must have; None: the one that the Hub declares.

    Returns:
        Where it lies in the Hub's cache.

    Raises:
        ModelError: It is larger, another file, cannot be downloaded, or arrives with other bytes than declared.
    """
    check_declared(repo, file, largest, sha256)
    try:
        path = Path(hf_hub_download(repo, file.rfilename, revision=commit))
    except HUB_ERRORS as error:
        message = f"{file.rfilename} of {repo} cannot be downloaded from the Hub: {first_line(error)}"
        raise ModelError(message, hint="try again") from error
    promised = file.lfs.sha256 if file.lfs is not None else file.blob_id
    if path.stat().st_size != file.size or (promised and not has_id(path, promised)):
        blob = path.resolve()  # which the Hub's cache may have beside it
        path.unlink()
        if blob.parent.name == "blobs":
            blob.unlink(missing_ok=True)
        message = f"{repo}: other bytes of {file.rfilename} arrived than the Hub declares"
        raise ModelError(message, hint="thrown away; try again")
    if sha256:
        check_sha256(repo, path, sha256)
    return path


def check_declared(repo: str, file: RepoSibling, largest: int, sha256: str | None = None) -> None:
    """Refuses what need not be downloaded to be refused; arguments and errors as of :func:`fetch`."""
    if file.size is None:
        raise ModelError(f"the Hub does not say how large {file.rfilename} of {repo} is")
    if file.size > largest:
        raise ModelError(f"{repo}: {file.rfilename} has {file.size:,} bytes, at most {largest:,} are downloaded")
    if sha256 and file.lfs is not None and file.lfs.sha256 != sha256:
        _refuse_other(repo, file.rfilename, file.lfs.sha256, sha256)


def weights_sha256(repo: str, commit: str | None, file: RepoSibling) -> tuple[str, Path | None]:
    """The SHA-256 of weights: the Hub declares it of large files; small ones that it keeps as text are downloaded.

    Returns:
        The digest, and the file if it was downloaded.

    Raises:
        ModelError: The Hub declares none of a file that is too large to be downloaded for it, or as :func:`fetch`.
    """
    if file.lfs is not None:
        return file.lfs.sha256, None
    path = fetch(repo, commit, file, LARGEST_PLAIN_WEIGHTS)
    return sha256_of(path), path


def check_sha256(repo: str, path: Path, expected: str) -> None:
    """Compares a file's SHA-256.

    Raises:
        ModelError: It has another.
    """
    found = sha256_of(path)
    if found != expected:
        _refuse_other(repo, path.name, found, expected)


def has_id(path: Path, promised: str) -> bool:
    """Whether a file has a SHA-256 (64 digits) or git's id of a blob (40 digits)."""
    git = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    digest = hashlib.sha256() if len(promised) == 64 else git
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == promised


def _refuse_other(repo: str, file: str, found: str, expected: str) -> NoReturn:
    raise ModelError(f"{repo}: {file} is not the requested file (SHA-256 {found[:12]}, not {expected[:12]})")
