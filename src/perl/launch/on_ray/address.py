"""The address of a Ray cluster: which one is meant, and whether it lets this process in.

engine.address -> HOST:PORT of a cluster that answers, or one line that says why it does not
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ray._common.utils import get_ray_address_file
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # of its compiled part
from ray.exceptions import AuthenticationError, RayError

from perl.errors import RecipeError, first_line

ADDRESS = "engine.address"
LOCAL = "local"
_CONNECT_SECONDS = 5.0
_NOT_HERE = "no Ray cluster answers there"


def of_this_machine() -> str | None:
    """The cluster that Ray was told of, or that ``ray start`` has noted on this machine; None: none that answers.

    Ray itself would also take a cluster that another run has started for itself, and which ends with that.
    """
    told = os.environ.get("RAYADDRESS", "")
    if told not in ("", "auto") and not told.startswith("http"):  # which is where jobs are submitted
        return told
    noted = _noted()
    with contextlib.suppress(RecipeError):
        if noted is not None:
            _reach(noted)
            return noted
    return None


def enter(address: str) -> None:
    """Makes sure that a cluster answers, and lets this process in.

    Args:
        address: As a recipe names it, or :func:`of_this_machine`.

    Raises:
        RecipeError: It is no address, nothing answers there, or wants a token that this process does not have.
    """
    _reach(address)
    _show_token(address)


def no_cluster(address: str, error: BaseException) -> RecipeError:
    """What is said where something answers that is no cluster, or one that is not well."""
    hint = "`ray start --head` on its first node, `ray start --address HOST:PORT` on the others"
    return RecipeError(f"{address}: {_NOT_HERE}: {first_line(error)}", ADDRESS, hint)


def _noted() -> str | None:
    """The cluster that ``ray start`` has noted on this machine, whether it answers or not."""
    try:
        return Path(get_ray_address_file(None)).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _show_token(address: str) -> None:
    """Takes the token of this user's home for a cluster that ``ray start`` has begun here, if that wants one.

    Ray does so for the address ``auto`` alone, and then also where the cluster wants none, whose workers it would
    refuse.

    Raises:
        RecipeError: The cluster wants a token that this process does not have.
    """
    if not _is_locked(address):
        return
    has_token = address == _noted() and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if not has_token or _is_locked(address):
        what = "the Ray cluster there wants a token that this process does not have"
        hint = "export RAY_AUTH_MODE=token, with the token of its head in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        raise RecipeError(f"{address}: {what}", ADDRESS, hint)


def _is_locked(address: str) -> bool:
    """Whether a cluster answers, but only those who have its token.

    Raises:
        RecipeError: What answers is no cluster.
    """
    with _hushed():
        try:
            GcsClient(address=address)
        except AuthenticationError:
            return True
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise no_cluster(address, error) from None
    return False


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Inside, what Ray's C++ writes to the terminal by itself is not seen."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reach(address: str) -> None:
    """Connects to the head once, since Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        hint = "HOST:PORT from a machine of the cluster; from outside: `ray job submit -- perl train RECIPE`"
        raise RecipeError(f"{address!r} is a way in from outside", ADDRESS, hint)
    if not host or not port.isdecimal():
        raise RecipeError(f"{address!r} is not an address", ADDRESS, "HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "is `ray start --head` running there, and can this machine reach it?"
        raise RecipeError(f"{address}: {_NOT_HERE}: {reason}", ADDRESS, hint) from None
