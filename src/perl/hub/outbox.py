"""What a run has still to send: kept in the run folder, so that neither an outage nor a kill loses it.

what is to be pushed -> RUN/push.json, RUN/outbox/USER--NAME/step-N/ -> what is left

Knows nothing of the Hub.
"""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import StringConstraints, TypeAdapter, ValidationError

from perl.errors import PerlError, RunFolderError
from perl.hub.package import Package, read_package
from perl.run import Run, write_text
from perl.strict_json import parse_mapping

PUSH, OUTBOX = "push.json", "outbox"
VERSION: Literal[1] = 1
HUB_NAME = r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"
"""``user/name``; it names a folder of the outbox too."""


@dataclass(frozen=True)
class Push:
    """A push of a run's adapter, under way or done.

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
        replace: Whether an adapter that is there and is not this run's may be overwritten.
        sent: Repository -> SHA-256 of the weights that this run has sent there, or begun to.
        error: Why the last try failed.
        tries: Since it was queued.
        updated: When.
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
    sent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    error: str | None = None
    tries: int = 0
    updated: str = ""
    version: Literal[1] = VERSION


_READER = TypeAdapter(Push)


def read_push(run: Run) -> Push | None:
    """What became of the run's last push; None: there was none.

    Raises:
        RunFolderError: The file cannot be read.
    """
    path = run.path / PUSH
    try:
        parse_mapping(path.read_bytes())
        return _READER.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise RunFolderError(f"cannot be read: {what}", str(path), "delete it and push again") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot be read: {error}", str(path), "delete it and push again") from None


def write_push(run: Run, push: Push) -> Push:
    """Keeps what became of a push.

    Returns:
        It, with the time.
    """
    push = replace(push, updated=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    write_text(run.path / PUSH, json.dumps(asdict(push), indent=1) + "\n")
    return push


def queue_checkpoint(run: Run, repo_id: str, step: int, package: Package) -> Path:
    """Keeps the package of a checkpoint, which the run may delete before it is sent.

    Returns:
        Its folder.
    """
    folder = _outbox(run, repo_id) / f"step-{step}"
    staged = folder.with_name(f".{folder.name}.tmp")
    _refuse_links(staged, folder)
    for old in (staged, folder):
        shutil.rmtree(old, ignore_errors=True)
    staged.mkdir(parents=True)
    package.write(staged)
    staged.rename(folder)
    return folder


def queued_steps(run: Run, repo_id: str) -> list[int]:
    """Steps of the checkpoints that are still to be sent there, in order."""
    names = [path.name.removeprefix("step-") for path in _outbox(run, repo_id).glob("step-*")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def queued_checkpoint(run: Run, repo_id: str, step: int) -> Package:
    """The package of a checkpoint that is still to be sent.

    Raises:
        PerlError: As in :func:`perl.hub.package.read_package`: what lies there is no longer what was put there.
    """
    folder = _outbox(run, repo_id) / f"step-{step}"
    _refuse_links(folder)
    return read_package(folder)


def forget_checkpoint(run: Run, repo_id: str, step: int) -> None:
    """It has been sent."""
    shutil.rmtree(_outbox(run, repo_id) / f"step-{step}")


def tidy_outbox(run: Run) -> None:
    """Takes away folders that hold nothing any more; not while checkpoints are being put there."""
    outbox = run.path / OUTBOX
    for folder in (*outbox.glob("*"), outbox):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _outbox(run: Run, repo_id: str) -> Path:
    """Of a repository.

    Raises:
        PerlError: A folder of that name is a link, so that what it holds lies elsewhere.
    """
    folder = run.path / OUTBOX / repo_id.replace("/", "--")
    _refuse_links(folder.parent, folder)
    return folder


def _refuse_links(*folders: Path) -> None:
    for folder in folders:
        if folder.is_symlink():
            raise PerlError("is a link, and links are not published", str(folder), "delete it")
