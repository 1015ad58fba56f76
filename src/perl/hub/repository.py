"""Files of a repository on the Hub, at one commit.

repository, commit -> its files; a file -> where it lies here

Whatever goes wrong on the way, a refusal or a connection that breaks, is one line. Knows nothing of what is in the
files.
"""

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoSibling

from perl.errors import PerlError
from perl.policy.hub_lookup import TIMEOUT_SECONDS


def listed(repo: str, commit: str | None) -> dict[str, RepoSibling]:
    """Its files by name.

    Raises:
        PerlError: They cannot be listed.
    """
    try:
        info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except HfHubHTTPError as error:
        raise PerlError(f"the Hub answers {error.response.status_code} when asked for its files", repo) from None
    except Exception as error:  # noqa: BLE001 (a network client's errors are not part of the Hub library's interface)
        raise PerlError(f"its files cannot be listed: {_first_line(error)}", repo) from None
    return {file.rfilename: file for file in info.siblings or ()}


def fetched(repo: str, commit: str | None, file: RepoSibling, largest: int, where: str) -> Path:
    """Downloads a file.

    Args:
        repo: The repository.
        commit: Of it.
        file: From :func:`listed`.
        largest: Bytes that it may have.
        where: What the user named, for errors.

    Raises:
        PerlError: It is larger, cannot be had, or does not arrive whole.
    """
    if file.size is None or file.size > largest:
        size = "an unknown number of" if file.size is None else f"{file.size:,}"
        raise PerlError(f"{file.rfilename} has {size} bytes, at most {largest:,} are read", where)
    try:
        path = Path(hf_hub_download(repo, file.rfilename, revision=commit))
    except Exception as error:  # noqa: BLE001 (a network client's errors are not part of the Hub library's interface)
        raise PerlError(f"{file.rfilename} cannot be had from the Hub: {_first_line(error)}", where) from None
    if path.stat().st_size != file.size:
        raise PerlError(f"{file.rfilename} arrived with {path.stat().st_size:,} of {file.size:,} bytes", where)
    return path


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
