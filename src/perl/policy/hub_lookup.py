"""Asks the Hub once, quickly, whether a model or a data set is there, before a library waits for it.

name, revision -> commit

Without a network transformers and datasets try for most of a minute and then print a page; one request tells at once,
and tells apart a wrong name, a login that is missing and a network that is down.
"""

import os
from typing import Literal

import httpx2
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)

from perl.errors import Mistake

TIMEOUT_SECONDS = 15.0
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
        return Mistake(f"the Hub answers {status} for {name}", hint="with HF_HUB_OFFLINE=1 what is cached is used")
    except HUB_ERRORS as error:
        host = os.environ.get("HF_ENDPOINT", "the Hub")
        return Mistake(
            f"no {what} {name!r} here, and {host} cannot be reached: {error}",
            hint="with HF_HUB_OFFLINE=1 what is cached is used",
        )
