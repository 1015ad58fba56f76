"""Requests to the Hub: who is logged in, asked before anything is trained; asked again where that may help.

Recipe's sections -> mistakes; login -> nothing, or one line; something that asks the Hub -> its answer, or an error

The token is the Hub's own business: it is looked for where ``hf auth login`` puts it, and never shown or kept. The
client has no time limits of its own and repeats only some of its requests.
"""

import random
import time
from collections.abc import Callable, Mapping
from json import JSONDecodeError
from typing import Any, TypeVar

import httpx2
from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not marked so

from perl.errors import EXIT_FAILED, Mistake, PerlError, first_line, warn
from perl.recipe.sections import HubSection

Answer = TypeVar("Answer")
Sleep = Callable[[float], None]

LOGIN = "hf auth login"
TIMEOUT_SECONDS = 15.0
"""Of the request that asks who is logged in."""
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
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, _KNOWN):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            if (refusal := _refusal(cause, what)) is not None:
                raise refusal from error
            if attempt == attempts or isinstance(error, OfflineModeIsEnabled):
                tries, reason = "1 try" if attempt == 1 else f"{attempt} tries", first_line(cause)
                if isinstance(cause, HfHubHTTPError):
                    status, a_proxy = cause.response.status_code, _is_a_proxys(cause.response)
                    reason = f"a proxy answers {status} in its place" if a_proxy else f"it answers {status}"
                elif isinstance(cause, JSONDecodeError):
                    reason = "its answer is not JSON; perhaps a proxy answers in its place"
                raise HubOutageError(f"the Hub is unreachable: {reason}", what, tries) from error
            # Twice as long each time, and not the same for all who wait for the same Hub.
            pause = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)
            # What a busy Hub asks for in seconds, within reason; it may ask for a date.
            asked = cause.response.headers.get("Retry-After", "") if isinstance(cause, HfHubHTTPError) else ""
            sleep(max(min(_LONGEST_ASKED, float(asked)) if asked.isdecimal() else 0.0, pause))
    raise AssertionError("attempts must be at least 1")


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


def publishing_mistakes(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mistake]]:
    """What cannot be published as a recipe asks, with the key path of each mistake."""
    hub, evaluation, peft = (sections.get(name) for name in ("hub", "eval", "peft"))
    found: list[Mistake] = []
    if hub is None or hub.push is None:
        return []
    if hub.push == "best" and evaluation is not None and evaluation.every is None:
        found.append(Mistake("best needs eval.every, the steps between two scores", hint="or push: end"))
    if peft is not None and peft.method == "full":
        what = "full trains the model itself, there is no adapter to push"
        found.append(Mistake(what, hint="hf upload, afterwards"))
    return [(("hub", "push"), mistake) for mistake in found]


def check_login(hub: HubSection) -> None:
    """Before weights are loaded: whether the Hub knows who will publish, if the recipe asks for it.

    A network that is down is only a warning: what is to be published will wait in the run folder.

    Raises:
        PerlError: There is no token, or the Hub refuses it.
    """
    if hub.push is None:
        return
    if get_token() is None:
        raise PerlError("push needs a login to the Hub", "hub.push", LOGIN)
    if constants.HF_HUB_OFFLINE:
        warn("PRL309", "hub.push: HF_HUB_OFFLINE is set; the adapter will wait for `perl push`")
        return
    try:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/whoami-v2", headers=build_hf_headers(), timeout=TIMEOUT_SECONDS
        )
    except httpx2.HTTPError as error:
        warn("PRL309", "hub.push: the Hub cannot be reached now (%s)", type(error).__name__)
        return
    if answer.status_code in (401, 403):
        raise PerlError("the Hub refuses your token", "hub.push", LOGIN)
    if answer.status_code != httpx2.codes.OK:
        warn("PRL309", "hub.push: the Hub answers %d now", answer.status_code)
