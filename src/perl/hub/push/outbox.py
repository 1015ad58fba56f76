"""What a run has still to send: kept in the run folder, so that neither an outage nor a kill loses it.

what is to be pushed -> RUN/push.json, RUN/outbox/USER--NAME/step-N/ -> what is left
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import StringConstraints, TypeAdapter, ValidationError

from perl.errors import RunFolderError
from perl.hub.push.package import PushPackage
from perl.run.files import new_folder, read_regular, write_text
from perl.run.folder import Run

PUSH, OUTBOX = "push.json", "outbox"
_LOCK = ".push.lock"
HUB_NAME = r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"
"""``user/name``; it names a folder of the outbox too."""


@dataclass(frozen=True)
class Push:
    """A push of a run's adapter to a repository, under way or done.

    Attributes:
        status: ``queued``: begun or waiting; ``done``.
        repo_id: Where to.
        which: Which adapter.
        private: Whether to create the repository for its owner only.
        checkpoints: Whether its checkpoints go along.
        message: Of the commit; None: the usual.
        steps: Checkpoints that are there.
        commit: Of the adapter, if it is there.
        sha256: Of the adapter's weights at that commit.
        url: For people.
        replace: Whether what is there and is not this run's may be overwritten; kept only while an outage lasts.
        sent: Digests of the weights and cards that this run has sent there, or began to send.
        error: Why the last try failed.
    """

    status: Literal["queued", "done"]
    repo_id: Annotated[str, StringConstraints(pattern=HUB_NAME)]
    which: Literal["final", "best"] = "final"
    private: bool = False
    checkpoints: bool = False
    message: str | None = None
    steps: tuple[int, ...] = ()
    commit: str | None = None
    sha256: str | None = None
    url: str | None = None
    replace: bool = False
    sent: tuple[str, ...] = ()
    error: str | None = None


_READER = TypeAdapter(tuple[Push, ...])


def read_pushes(run: Run) -> list[Push]:
    """What became of the run's pushes, the last one of each repository, the newest last.

    Raises:
        RunFolderError: The file cannot be read.
    """
    path = run.path / PUSH
    try:
        return list(_READER.validate_json(read_regular(path), strict=True))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RunFolderError(f"cannot be read: {what}", str(path), "delete it and push again") from None


def read_push(run: Run, repo_id: str | None = None) -> Push | None:
    """What became of the run's last push, or of the last one to a repository; None: there was none.

    Raises:
        RunFolderError: The file cannot be read.
    """
    pushes = [push for push in read_pushes(run) if repo_id in (None, push.repo_id)]
    return pushes[-1] if pushes else None


def write_push(run: Run, push: Push) -> Push:
    """Keeps what became of a push; of those to other repositories nothing is lost."""
    others = [other for other in read_pushes(run) if other.repo_id != push.repo_id]
    write_text(run.path / PUSH, json.dumps([asdict(one) for one in (*others, push)], indent=1) + "\n")
    return push


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Within it nobody else pushes this run.

    Raises:
        RunFolderError: Somebody does.
    """
    with (run.path / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError("another process is pushing this run", str(run.path), "wait for it") from None
        except OSError:  # a file system without locks
            pass
        yield


def queue_checkpoint(run: Run, repo_id: str, step: int, package: PushPackage) -> None:
    """Keeps the package of a checkpoint, which the run may delete before it is sent."""
    with new_folder(waiting_folder(run, repo_id, step)) as staged:
        package.write(staged)


def queued_steps(run: Run, repo_id: str) -> list[int]:
    """Steps of the checkpoints that are still to be sent there, in order."""
    names = [path.name.removeprefix("step-") for path in waiting_folder(run, repo_id, 0).parent.glob("step-*")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def tidy_outbox(run: Run) -> None:
    """Takes away folders that hold nothing any more; not while checkpoints are being put there."""
    outbox = run.path / OUTBOX
    for folder in (*outbox.glob("*"), outbox):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def waiting_folder(run: Run, repo_id: str, step: int) -> Path:
    """Where a package waits, which no link leads to."""
    folder = run.path / OUTBOX / repo_id.replace("/", "--") / f"step-{step}"
    for part in (folder.parent.parent, folder.parent, folder, folder.with_name(f".{folder.name}.tmp")):
        if part.is_symlink():
            raise RunFolderError("is a link, and links are not published", str(part), "take it away")
    return folder
