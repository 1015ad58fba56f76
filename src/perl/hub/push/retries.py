"""Asks the Hub again where asking again may help, and says in one line what it answered where it cannot.

something that asks the Hub -> its answer, or an error: the user's, or an outage

The client has no time limits of its own and repeats only some of its requests.
"""

import random
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

from perl.errors import EXIT_FAILED, PerlError, first_line

Answer = TypeVar("Answer")
Sleep = Callable[[float], None]

LOGIN = "hf auth login"
ATTEMPTS = 6
SILENCE_SECONDS = 300.0
"""Longest time that the Hub may say nothing; a commit of many files takes it a minute."""
_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_ASKED = 1.0, 60.0, 600.0
# Busy, another commit came between (409, 412), or out of time; all else below 500 is the user's.
_AGAIN = (408, 409, 412, 429)
_KNOWN = (
    *(HfHubHTTPError, HFValidationError, LocalTokenNotFoundError),
    *(httpx2.HTTPError, ConnectionError, TimeoutError, JSONDecodeError),
)


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
            cause = next((cause for cause in _chain(error) if isinstance(cause, _KNOWN)), None)
            if cause is None:
                raise
            refusal = _refusal(cause, what)
            if refusal is not None:
                raise refusal from error
            if attempt == attempts or isinstance(error, OfflineModeIsEnabled):
                tries = "1 try" if attempt == 1 else f"{attempt} tries"
                raise HubOutageError(f"the Hub is unreachable: {_reason(cause)}", what, tries) from error
            sleep(max(_asked_to_wait(cause), _delay(attempt)))
    raise AssertionError("attempts must be at least 1")


def _delay(attempt: int) -> float:
    """Twice as long each time, and not the same for all who wait for the same Hub."""
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _refusal(error: BaseException, what: str) -> PerlError | None:
    """The user's mistake, of which the Hub would answer the same again; None: it may help to ask again."""
    if isinstance(error, LocalTokenNotFoundError):
        return PerlError("you are not logged in to the Hub", what, LOGIN)
    if isinstance(error, HFValidationError):
        return PerlError(f"is not a name on the Hub: {first_line(error)}", what, "user/name")
    if not isinstance(error, HfHubHTTPError) or _is_a_proxys(error.response):
        return None
    status = error.response.status_code
    if status in _AGAIN or status >= 500:
        return None
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return PerlError("the Hub refuses your token", what, LOGIN)
    if status == 403:
        return PerlError("your token may not write there", what, f"choose another name, or a token with write: {LOGIN}")
    if status in (401, 404):
        return PerlError("the Hub has no such repository, or it is not yours", what, LOGIN)
    return PerlError(f"the Hub refuses what was sent ({status}): {first_line(error)}", what)


def _is_a_proxys(response: httpx2.Response) -> bool:
    """Whether a proxy answered in the Hub's place: with a web page, or with a yes to an upload that never arrived."""
    a_page = response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "text/html"
    return a_page or (response.status_code == 404 and response.request.url.path.endswith("/verify"))


def _asked_to_wait(error: BaseException) -> float:
    """What a busy Hub asks for in Retry-After, within reason."""
    try:
        return min(_LONGEST_ASKED, float(error.response.headers["Retry-After"]))  # type: ignore[attr-defined]
    except (AttributeError, KeyError, ValueError):  # no answer, it does not ask, or for a date
        return 0.0


def _reason(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"a proxy answers {status} in its place" if _is_a_proxys(error.response) else f"it answers {status}"
    if isinstance(error, JSONDecodeError):
        return "its answer is not JSON; perhaps a proxy answers in its place"
    return first_line(error)
