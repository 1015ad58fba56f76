"""Asks the Hub again where asking again may help, and says in one line what it answered where it cannot.

something that asks the Hub -> its answer, or an error: the user's, or an outage

The client has no time limits of its own and repeats only some of its requests.
"""

import html
import random
import re
import time
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from typing import TypeVar

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from perl.errors import EXIT_FAILED, PerlError

Answer = TypeVar("Answer")
Sleep = Callable[[float], None]

LOGIN = "hf auth login"
ATTEMPTS = 6
SILENCE_SECONDS = 300.0
"""Longest time that the Hub may say nothing; a commit of many files takes it a minute."""
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
# The user's: asked again, the Hub would answer the same.
_REFUSALS = (400, 401, 403, 404, 413, 422, 451)
_STALE = 412
_VERIFY = re.compile(r"/verify$")  # where the client asks whether an upload arrived


class HubOutageError(PerlError):
    """The Hub cannot be reached, or fails again and again; the same push may be done later."""

    code = "PRL212"
    exit_code = EXIT_FAILED


def retry(ask: Callable[[], Answer], what: str, sleep: Sleep = time.sleep, attempts: int = ATTEMPTS) -> Answer:
    """Asks until there is an answer.

    Args:
        ask: Raises whatever the Hub's client raises. It is called again from its beginning, so it must first look how
            far an earlier call got.
        what: For the error, as ``user/name``.
        sleep: Waits; tests hand in another.
        attempts: After so many it is an outage.

    Raises:
        PerlError: The Hub refuses: no login, no rights, no such repository.
        HubOutageError: It cannot be reached, or fails every time.
    """
    for attempt in range(1, attempts + 1):
        get_session().timeout = SILENCE_SECONDS
        try:
            return ask()
        except PerlError:
            raise
        except Exception as error:
            again = _least_wait(error, what)
            if again is None:
                raise
            if attempt == attempts or isinstance(error, OfflineModeIsEnabled):
                tries = "1 try" if attempt == 1 else f"{attempt} tries"
                raise HubOutageError(f"the Hub is unreachable: {_reason(error)}", what, tries) from error
            sleep(max(again, _delay(attempt)))
    raise AssertionError("attempts must be at least 1")


def _delay(attempt: int) -> float:
    """Twice as long each time, and not the same for all who wait for the same Hub."""
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)


def _least_wait(error: Exception, what: str) -> float | None:
    """How long to wait at least before asking again; None: the defect is ours.

    Raises:
        PerlError: It is the user's.
    """
    for cause in _chain(error):
        if isinstance(cause, LocalTokenNotFoundError):
            raise PerlError("you are not logged in to the Hub", what, LOGIN) from error
        if isinstance(cause, HFValidationError):
            raise PerlError(f"is not a name on the Hub: {_reason(cause)}", what, "user/name") from error
        if isinstance(cause, HfHubHTTPError):
            # A proxy may let the next one through, and if not, the push is kept.
            if _is_page(cause.response) or _is_upload_lost(cause.response):
                return 0.0
            status = cause.response.status_code
            if status in _REFUSALS:
                raise _refusal(cause, what) from error
            return _asked_to_wait(cause) if status == 429 or status >= 500 or status in (408, 409, _STALE) else None
        if isinstance(cause, httpx2.HTTPError | ConnectionError | TimeoutError):
            return 0.0
    # A proxy's page instead of JSON.
    return 0.0 if any(isinstance(cause, JSONDecodeError) for cause in _chain(error)) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_page(response: httpx2.Response) -> bool:
    """Whether a proxy or a firewall answered in the Hub's place: the Hub's interface answers no web pages."""
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "text/html"


def _is_upload_lost(response: httpx2.Response) -> bool:
    """Whether the Hub does not know a file whose upload somebody has confirmed."""
    return response.status_code == 404 and _VERIFY.search(response.request.url.path) is not None


def _title(response: httpx2.Response) -> str:
    """What a page calls itself, in one line."""
    try:
        text = response.text
    except (httpx2.StreamError, UnicodeDecodeError, LookupError):  # nobody read it, or in no encoding
        return ""
    title = re.search(r"(?is)<(title|h1)[^>]*>(.{1,200}?)</\1", text[:100_000])
    return f", titled {' '.join(html.unescape(title[2]).split())[:80]!r}" if title else ""


def _refusal(error: HfHubHTTPError, what: str) -> PerlError:
    status = error.response.status_code
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return PerlError("the Hub refuses your token", what, LOGIN)
    if status == 403:
        return PerlError("your token may not write there", what, f"choose another name, or a token with write: {LOGIN}")
    if status in (401, 404):
        return PerlError("the Hub has no such repository, or it is not yours", what, LOGIN)
    return PerlError(f"the Hub refuses what was sent ({status}): {_reason(error)}", what)


def _asked_to_wait(error: HfHubHTTPError) -> float:
    """What a busy Hub asks for in Retry-After, within reason."""
    try:
        return min(600.0, float(error.response.headers.get("Retry-After", 0)))
    except ValueError:  # a date
        return 0.0


def _reason(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, httpx2.Response) and _is_page(response):
            return f"a proxy answers {response.status_code} in its place, with a web page{_title(response)}"
        if isinstance(response, httpx2.Response) and _is_upload_lost(response):
            return "what was uploaded did not arrive; perhaps a proxy answered in its place"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"it answers {status}"
    if any(isinstance(cause, JSONDecodeError) for cause in _chain(error)):
        return "its answer is not JSON; perhaps a proxy answers in its place, with a web page"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
