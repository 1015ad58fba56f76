"""Places that keep a run's states for other machines: a folder, an object store, a private repository of the Hub.

name of a place -> Store; folder of a state -> step-N/ there; step-N/ -> folder

A state counts once its manifest is there, which is written last.
"""

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from pyarrow import ArrowException, fs  # type: ignore[import-untyped]

from perl.errors import EXIT_FAILED, PerlError, first_line
from perl.hub.push.requests import retry
from perl.recipe.engine_section import ON_HUB, check_storage

MANIFEST = "manifest.json"
BRANCH = "resume"
"""Of a repository: its other branches stay as they are."""
_STATE = "step-"


class Store(Protocol):
    """Keeps states by their steps. Each method raises PerlError where the place cannot be reached, read or written."""

    name: str

    def prepare(self) -> None:
        """Makes the place, and sees that it can be written."""

    def states(self) -> dict[int, bool]:
        """The steps of which anything is there, and whether their manifests are."""

    def manifest(self, step: int) -> bytes:
        """Of a state."""

    def fetch(self, step: int, folder: Path) -> None:
        """Copies the files of a state into a folder."""

    def put(self, step: int, folder: Path, manifest: bytes, drop: Collection[int]) -> None:
        """Keeps a folder's files as the state of a step, in place of an older one; then drops the states of others."""


def store_at(name: str, where: str) -> Store:
    """The store of a name, of which nothing is asked yet.

    Args:
        name: ``hub:user/name``, a URI or a folder.
        where: What names it, for errors.

    Raises:
        PerlError: It names no such place.
    """
    try:
        check_storage(name)
    except ValueError as error:
        raise PerlError(str(error), where) from None
    return HubStore(name.removeprefix(ON_HUB)) if name.startswith(ON_HUB) else FileStore(name)


class FileStore:
    """A place of pyarrow's file systems."""

    def __init__(self, name: str) -> None:
        """Takes a URI or a folder."""
        self.name = name if "://" in name else str(Path(name).expanduser().absolute())
        with self._told():
            self._files, self._root = fs.FileSystem.from_uri(self.name)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (ArrowException, OSError) as error:
            told = PerlError(first_line(error).partition("; Details:")[0], self.name)
            told.exit_code = EXIT_FAILED  # perhaps an outage: the same command may succeed later
            raise told from error

    def _path(self, step: int, *below: str) -> str:
        return "/".join((self._root, f"{_STATE}{step}", *below))

    def holds(self, file: str) -> bool:
        """Whether a file lies there."""
        with self._told():
            return self._files.get_file_info(f"{self._root}/{file}").is_file

    def prepare(self) -> None:
        """See :class:`Store`."""
        probe = f"{self._root}/.writable"
        with self._told():
            if isinstance(self._files, fs.LocalFileSystem):
                self._files.create_dir(self._root)
            with self._files.open_output_stream(probe) as file:
                file.write(b"\n")
            self._files.delete_file(probe)

    def states(self) -> dict[int, bool]:
        """See :class:`Store`."""
        with self._told():
            there = self._files.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        return _states([one.path[len(self._root) :].strip("/") for one in there if one.is_file])

    def manifest(self, step: int) -> bytes:
        """See :class:`Store`."""
        with self._told(), self._files.open_input_stream(self._path(step, MANIFEST)) as file:
            return bytes(file.read())

    def fetch(self, step: int, folder: Path) -> None:
        """See :class:`Store`."""
        with self._told():
            there = self._files.get_file_info(fs.FileSelector(self._path(step), recursive=True))
            if outside := [one.path for one in there if ".." in one.path.split("/")]:  # of an object store any name is
                raise PerlError("is a name that leads out of its folder, and nothing is copied", outside[0])
            fs.copy_files(self._path(step), str(folder), self._files, fs.LocalFileSystem())

    def put(self, step: int, folder: Path, manifest: bytes, drop: Collection[int]) -> None:
        """See :class:`Store`."""
        with self._told():
            if self._files.get_file_info(self._path(step)).type != fs.FileType.NotFound:
                with contextlib.suppress(FileNotFoundError):  # first, since without it the rest does not count
                    self._files.delete_file(self._path(step, MANIFEST))
                self._files.delete_dir(self._path(step))
            fs.copy_files(str(folder), self._path(step), fs.LocalFileSystem(), self._files)
            with self._files.open_output_stream(self._path(step, MANIFEST)) as file:
                file.write(manifest)
            for other in drop:
                self._files.delete_dir(self._path(other))


class HubStore:
    """A branch of a private repository of the Hub: a commit a state, all others forgotten."""

    def __init__(self, repo_id: str) -> None:
        """Takes ``user/name``."""
        self.name, self._repo = f"{ON_HUB}{repo_id}", repo_id

    def prepare(self) -> None:
        """See :class:`Store`; refuses a public repository, since states are not looked through as what is published."""
        api = HfApi()

        def make() -> None:
            api.create_repo(self._repo, private=True, exist_ok=True)
            if api.model_info(self._repo).private is False:
                what = "is public, and a run's state holds completions and paths of this machine"
                raise PerlError(what, self.name, f"another name, or hf repos settings {self._repo} --private")
            api.create_branch(self._repo, branch=BRANCH, exist_ok=True)

        retry(make, self._repo)

    def states(self) -> dict[int, bool]:
        """See :class:`Store`."""
        return _states(retry(self._names, self._repo))

    def _names(self) -> list[str]:
        api = HfApi()
        if BRANCH not in {branch.name for branch in api.list_repo_refs(self._repo).branches}:
            return []
        return api.list_repo_files(self._repo, revision=BRANCH)

    def manifest(self, step: int) -> bytes:
        """See :class:`Store`."""
        name = f"{_STATE}{step}/{MANIFEST}"
        return retry(lambda: Path(hf_hub_download(self._repo, name, revision=BRANCH)).read_bytes(), self._repo)

    def fetch(self, step: int, folder: Path) -> None:
        """See :class:`Store`."""
        state = f"{_STATE}{step}"
        for name in retry(self._names, self._repo):
            if name.startswith(f"{state}/"):
                retry(_downloading(self._repo, name, folder), self._repo)
        shutil.copytree(folder / state, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / state)

    def put(self, step: int, folder: Path, manifest: bytes, drop: Collection[int]) -> None:
        """See :class:`Store`: all in one commit."""
        files: dict[str, Path | bytes] = {p.relative_to(folder).as_posix(): p for p in _files_of(folder)}
        new = {f"{_STATE}{step}/{name}": file for name, file in {**files, MANIFEST: manifest}.items()}
        gone = tuple(f"{_STATE}{one}/" for one in (step, *drop))
        api = HfApi()

        def commit() -> None:
            stale = [name for name in self._names() if name.startswith(gone) and name not in new]
            added = [CommitOperationAdd(name, file) for name, file in new.items()]
            removed = [CommitOperationDelete(name) for name in stale]
            api.create_commit(self._repo, [*added, *removed], commit_message=f"{_STATE}{step}", revision=BRANCH)
            # Else each state would stay in the branch's history, and count as storage for ever.
            api.super_squash_history(self._repo, branch=BRANCH)

        retry(commit, self._repo)


def _downloading(repo_id: str, name: str, folder: Path) -> Callable[[], object]:
    return lambda: hf_hub_download(repo_id, name, revision=BRANCH, local_dir=folder)


def _files_of(folder: Path) -> Sequence[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _states(names: Sequence[str]) -> dict[int, bool]:
    """The steps of which files are there, of names below a place, and whether one is a manifest."""
    found: dict[int, bool] = {}
    for name in names:
        state, _, below = name.partition("/")
        number = state.removeprefix(_STATE)
        if below and state != number and number.isdecimal():
            found[int(number)] = found.get(int(number), False) or below == MANIFEST
    return found
