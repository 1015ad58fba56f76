"""Whether what a recipe wants to publish can be published, asked before anything is trained.

Recipe's sections -> mistakes; the Hub's own login -> nothing, or one line

The token is the Hub's own business: it is looked for where ``hf auth login`` puts it, and never shown or kept.
"""

from collections.abc import Mapping
from typing import Any

import httpx2
from huggingface_hub import constants, get_session, get_token
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not marked so

from perl.errors import Mistake, PerlError, warn
from perl.hub.push.retries import LOGIN
from perl.recipe.sections import HubSection

TIMEOUT_SECONDS = 15.0


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
