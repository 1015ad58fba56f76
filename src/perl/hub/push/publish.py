"""Publishes an adapter of a run or of a script: packed, checked, sent, and of a run remembered until it is there.

Run -> Package, checked -> repository on the Hub; RUN/push.json; folder of an adapter and its card -> likewise

A check that fails sends nothing. What an outage or a kill cut short, the same call finishes.
"""

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import CommitInfo, HfApi

from perl.errors import BrokenPromiseError, PerlError, RunFolderError, first_line, warn
from perl.hub.card.candidate import RunAdapter, checkpoint_steps, find_candidate, identity_mistakes, said_before
from perl.hub.card.facts import RUN_FACTS, read_run_facts
from perl.hub.card.published import METRICS
from perl.hub.push import outbox
from perl.hub.push.commit import MAIN, Pushed, digests, push_package, push_revision
from perl.hub.push.outbox import HUB_NAME, Push
from perl.hub.push.package import PushPackage, check_package, package_candidate, read_package, thinned
from perl.hub.push.requests import HubOutageError, Sleep, retry
from perl.hub.push.round_trip import check_files, check_round_trip
from perl.recipe import Recipe
from perl.recipe.sections import HubSection
from perl.run.devices import accelerator
from perl.run.folder import Run

logger = logging.getLogger("perl")
# Digests of what this process has sent: a trainer pushes again and again, each time with a newer card.
_sent: set[str] = set()


def push(
    run: Run | str | Path,
    repo_id: str | None = None,
    which: Literal["final", "best"] | None = None,
    *,
    checkpoints: bool = False,
    private: bool = False,
    message: str | None = None,
    replace: bool = False,
) -> Pushed:
    """Publishes the adapter of a run, or finishes what an outage left: one commit with everything, or none.

    Args:
        run: The run, or its folder.
        repo_id: ``user/name``; None: all that is queued, else the last one, else the recipe's ``hub.repo_id``.
        which: Which adapter; None: what is queued, else what the recipe says, else the final one.
        checkpoints: The checkpoints too, as revisions ``step-N``.
        private: Create the repository so that only its owner sees it.
        message: Of the commit.
        replace: Overwrite another adapter or card, which this run has not pushed, if the repository holds one.

    Returns:
        What was done; where several were queued, of the last.

    Raises:
        PerlError: As :func:`push_run`, or no repository is named.
        HubOutageError: Likewise.
        BrokenPromiseError: Likewise.
    """
    run = run if isinstance(run, Run) else Run.read(run)
    for target in targets(run, repo_id):
        wanted = wanted_push(
            run, target, which, checkpoints=checkpoints, private=private, message=message, overwrite=replace
        )
        done = push_run(run, wanted)[0]
    return done


def push_run(
    run: Run, wanted: Push, device: torch.device | None = None, sleep: Sleep = time.sleep
) -> tuple[Pushed, float | None]:
    """Publishes an adapter of a run, and its checkpoints where that is wanted.

    Args:
        run: The run.
        wanted: What, and where to; from :func:`wanted_push`.
        device: For the round trip; None: the accelerator if there is one.
        sleep: As in :func:`perl.hub.push.requests.retry`.

    Returns:
        What was done, and how far the reloaded adapter is from the trained policy, as
        :func:`perl.hub.push.round_trip.check_round_trip` says.

    Raises:
        PerlError: The run has no such adapter, a check failed, the Hub refuses, or the repository holds another
            adapter; nothing was sent.
        HubOutageError: The Hub cannot be reached; the push stays queued in the run folder.
        BrokenPromiseError: The files are not the trained adapter; nothing was sent.
    """
    with outbox.alone(run):
        candidate = find_candidate(run, wanted.which)
        # Whoever stops it by hand may have thought better of overwriting: only an outage lets that wait.
        push, done = outbox.write_push(run, replace(wanted, status="queued", error=None, replace=False)), None
        try:
            for step in checkpoint_steps(run) if push.checkpoints else ():
                if step not in push.steps:
                    pack_checkpoint(run, step, push.repo_id)
            package = pack(candidate, push.repo_id, sorted({*push.steps, *outbox.queued_steps(run, push.repo_id)}))
            with tempfile.TemporaryDirectory() as folder:
                package.write(Path(folder))
                difference = check_round_trip(candidate, Path(folder), device or accelerator() or torch.device("cpu"))
            # Remembered before it is sent, so that after a kill or a lost answer it still counts as this run's.
            sent = tuple(dict.fromkeys((*push.sent, *digests(package))))
            outbox.write_push(run, replace(push, sent=sent))
            options: dict[str, Any] = {"message": push.message} if push.message else {}
            options |= {"private": push.private, "may_replace": None if wanted.replace else push.sent, "sleep": sleep}
            done = push_package(package, push.repo_id, **options)
            push = replace(push, sent=sent, commit=done.commit, sha256=candidate.sha256, url=done.url)
            push = send_checkpoints(run, outbox.write_push(run, push), sleep)
        except PerlError as error:
            outage = isinstance(error, HubOutageError)
            known = outbox.read_push(run, push.repo_id) or push
            if not (outage or done):  # what the Hub or a check refuses was not sent
                known = replace(known, sent=push.sent)
            outbox.write_push(run, replace(known, error=first_line(error), replace=wanted.replace and outage))
            raise
        outbox.write_push(run, replace(push, status="done"))
        outbox.tidy_outbox(run)
        return done, difference


def pack(candidate: RunAdapter, repo_id: str | None, steps: Sequence[int] = ()) -> PushPackage:
    """The package of an adapter, looked through; arguments as of :func:`perl.hub.push.package.package_candidate`.

    Raises:
        PerlError: It is not what the run trained, its scores are not those of its samples, it holds what must not leave
            this machine, or its card is wrong; every such line.
    """
    mistakes, run = identity_mistakes(candidate), candidate.run
    package = package_candidate(candidate, repo_id, steps)
    if candidate.which == "final":
        mistakes += said_before(run, read_run_facts(package.files[RUN_FACTS]))
    check_package(package, run.path, mistakes)
    return package


def send_checkpoints(run: Run, push: Push, sleep: Sleep = time.sleep) -> Push:
    """Sends what waits in the outbox, a revision each.

    Raises:
        PerlError: The Hub refuses, or what waits is no longer what was put there.
        HubOutageError: The Hub cannot be reached; what was not sent stays.
    """
    for step in outbox.queued_steps(run, push.repo_id):
        folder = outbox.waiting_folder(run, push.repo_id, step)
        package = read_package(folder)
        check_package(package, run.path)  # it lay on the disk since it was looked at
        push_revision(package, push.repo_id, f"step-{step}", private=push.private, sleep=sleep)
        push = outbox.write_push(run, replace(push, steps=tuple(sorted({*push.steps, step}))))
        shutil.rmtree(folder)
    return push


def pack_checkpoint(run: Run, step: int, repo_id: str) -> None:
    """Puts a checkpoint into the outbox, without loading its base.

    Raises:
        PerlError: As in :func:`pack`, or the adapter cannot be loaded.
    """
    candidate = find_candidate(run, step)
    check_files(candidate.folder)
    outbox.queue_checkpoint(run, repo_id, step, pack(candidate, repo_id))


def targets(run: Run, repo_id: str | None) -> list[str | None]:
    """Where to push: where it is asked for; else to every repository for which a push is queued, if there is any."""
    if repo_id is not None:
        return [repo_id]
    return [push.repo_id for push in outbox.read_pushes(run) if push.status == "queued"] or [None]


def wanted_push(
    run: Run,
    repo_id: str | None = None,
    which: Literal["final", "best"] | None = None,
    *,
    checkpoints: bool = False,
    private: bool = False,
    message: str | None = None,
    overwrite: bool = False,
) -> Push:
    """What to push: what is asked for; where that says nothing, what is queued, then what the recipe says.

    Raises:
        RunFolderError: No repository is named.
    """
    hub = Recipe.of_run(run.path / "recipe.yaml").hub
    if repo_id is not None and re.fullmatch(HUB_NAME, repo_id) is None:
        raise PerlError(f"is not a name on the Hub: {repo_id!r}", "--repo", "user/name")
    newest = [push for push in reversed(outbox.read_pushes(run)) if repo_id in (None, push.repo_id)]
    before = max(newest, key=lambda push: push.status == "queued", default=None)
    target = repo_id or (before.repo_id if before else None) or hub.repo_id
    if target is None:
        raise RunFolderError("does not say where to push it", str(run.path), "--repo user/name")
    private_there = hub.private and target == hub.repo_id
    new = Push("queued", target, "best" if hub.push == "best" else "final", private_there)
    if before is None or before.status == "done":
        before = replace(new, sent=before.sent, steps=before.steps) if before else new
    return replace(
        before,
        which=which or before.which,
        private=private or before.private,
        checkpoints=checkpoints or before.checkpoints,
        message=message or before.message,
        replace=overwrite or before.replace,
    )


def publish(hub: HubSection, run: Run, sleep: Sleep = time.sleep) -> None:
    """At the end of a training: publishes as its recipe asks, if it does and it has not been done.

    An outage, or a Hub that refuses, is a warning that names the command; the run is done all the same.

    Raises:
        BrokenPromiseError: The adapter's files are not the trained adapter.
    """
    if hub.push is None:
        return
    try:
        known = outbox.read_push(run, hub.repo_id) if hub.repo_id else None
        if known is not None and known.status == "done":
            return
        wanted = wanted_push(run, hub.repo_id, "best" if hub.push == "best" else "final", private=hub.private)
        # Not on the accelerator: the policy is still there.
        done, _ = push_run(run, wanted, torch.device("cpu"), sleep)
        logger.info("pushed %s", done.url)
    except BrokenPromiseError:
        raise
    except HubOutageError as error:
        warn("PRL308", "%s; the push is kept in %s: `perl push %s` finishes it", error, run.path, run.path)
    except PerlError as error:
        warn("PRL308", "not pushed: %s; `perl push %s` tries again", error, run.path)


def write_log(folder: Path, log: Sequence[Mapping[str, Any]]) -> None:
    """Writes the steps of a trainer's log beside the adapter, if there are any."""
    rows = [row for row in log if "reward" in row]
    # The entry that closes a training has the values of the last step once more, unless more steps came after that one.
    rows = [row for last, row in zip([{}, *rows], rows, strict=False) if row["step"] != last.get("step")]
    if rows:
        (folder / METRICS).write_bytes(thinned(rows))


def pack_folder(folder: Path) -> PushPackage:
    """What lies in a folder, in memory and looked through.

    Raises:
        PerlError: It holds what must not leave this machine, or the card is wrong.
    """
    package = read_package(folder)
    check_package(package, folder)
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
    package: PushPackage, repo_id: str, *, message: str, private: bool, revision: str | None, blocking: bool
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
