"""Publishes what a script trained, which has no run folder: the adapter, its card, its log.

folder of the adapter and its card, log -> Package, checked -> repository on the Hub
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from perl.errors import PerlError, raise_all
from perl.hub.card.published import METRICS
from perl.hub.push.commit import MAIN, digests, push_package
from perl.hub.push.package import Package, package_mistakes, read_package, thinned
from perl.hub.push.retries import Sleep, retry
from perl.run.warned import warn

# Digests of what this process has sent: a trainer pushes again and again, each time with a newer card.
_sent: set[str] = set()


def write_log(folder: Path, log: Sequence[Mapping[str, Any]]) -> None:
    """Writes the steps of a trainer's log beside the adapter, if there are any."""
    rows = [row for row in log if "reward" in row]
    # The entry that closes a training has the values of the last step once more, unless more steps came after that one.
    rows = [row for last, row in zip([{}, *rows], rows, strict=False) if row["step"] != last.get("step")]
    if rows:
        (folder / METRICS).write_bytes(thinned(rows))


def pack_folder(folder: Path) -> Package:
    """What lies in a folder, in memory and looked through.

    Raises:
        PerlError: It holds what must not leave this machine, or the card is wrong.
    """
    package = read_package(folder)
    raise_all(PerlError, package_mistakes(package, folder))
    return package


def full_repo_id(name: str, sleep: Sleep = time.sleep) -> str:
    """A repository's name with its owner, who is whoever is logged in if the name has none.

    Raises:
        PerlError: Nobody is.
        HubOutageError: The Hub cannot be reached.
    """
    if "/" in name:
        return name
    return f"{retry(lambda: HfApi().whoami()['name'], name, sleep)}/{name}"


def push_script(
    package: Package, repo_id: str, *, message: str, private: bool, revision: str | None, blocking: bool
) -> CommitInfo | Future[CommitInfo]:
    """Pushes a package as transformers' trainer does: what is there is replaced, with a warning if it is another's.

    Args:
        package: From :func:`pack_folder`.
        repo_id: ``user/name``.
        message: Of the commit.
        private: As in :func:`perl.hub.push.commit.push_package`.
        revision: Branch; None: ``main``.
        blocking: Whether to wait for the Hub.

    Raises:
        PerlError: As in :func:`perl.hub.push.commit.push_package`.
    """

    def push() -> CommitInfo:
        done = push_package(
            package, repo_id, private=private, message=message, branch=revision or MAIN, may_replace=None
        )
        for name, digest in done.replaced.items():
            if digest not in _sent:
                warn("PRL312", "%s: replaced the %s that was there; commit %s holds it", repo_id, name, done.before)
        _sent.update(digests(package))
        return CommitInfo(f"{done.url}/commit/{done.commit}", message, "", done.commit)

    return push() if blocking else HfApi().run_as_future(push)
