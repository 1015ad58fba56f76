"""What a Hub keeps: repositories of models with their commits, branches and tags, and the bytes of their files.

files -> commit -> files of a revision

Knows nothing of HTTP. Bytes are kept once, under their SHA-256.
"""

import base64
import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from typing import Any

INITIAL_FILE = ".gitattributes"  # what the Hub puts into every new repository


class Refused(Exception):
    """The Hub says no: a status, its code for the client, and a sentence."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit: where its bytes are, and under which name Git has it."""

    sha256: str
    size: int
    blob_id: str
    lfs: bool

    @property
    def oid(self) -> str:
        """What the client compares with its own file to see that nothing changed."""
        return self.sha256 if self.lfs else self.blob_id


@dataclass(frozen=True)
class Commit:
    """One commit, with all files as they are after it."""

    oid: str
    title: str
    parent: str | None
    date: str
    tree: Mapping[str, StoredFile] = field(repr=False)


@dataclass
class Repository:
    """One repository.

    Attributes:
        commits: Oldest first.
        branches: Name -> commit.
        tags: Name -> commit.
    """

    name: str
    blobs: Mapping[str, bytes] = field(repr=False)
    private: bool = False
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    downloads: int = 0

    @property
    def head(self) -> Commit:
        """The newest commit of the main branch."""
        return self.at("main")

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """All files of a branch, a tag or a commit."""
        return {path: self.bytes_of(file) for path, file in sorted(self.at(revision).tree.items())}

    def bytes_of(self, file: StoredFile) -> bytes:
        """The bytes of one of its files."""
        return self.blobs[file.sha256]

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag or (the beginning of) a commit's id names."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        for commit in self.commits:
            if commit.oid == oid or (len(oid) >= 7 and commit.oid.startswith(oid)):
                return commit
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")


class Store:
    """All repositories; a lock for whoever changes several things at once."""

    def __init__(self, lfs_patterns: Sequence[str]) -> None:
        self.blobs: dict[str, bytes] = {}
        self.lfs_patterns = tuple(lfs_patterns)
        self.repositories: dict[str, Repository] = {}
        self.lock = threading.RLock()

    def is_lfs(self, path: str) -> bool:
        """Whether the Hub wants this file by LFS."""
        return any(fnmatch(path, pattern) for pattern in self.lfs_patterns)

    def keep(self, data: bytes) -> str:
        """Stores bytes; gives their SHA-256."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.blobs[sha256] = data
        return sha256

    def stored(self, data: bytes, lfs: bool) -> StoredFile:
        """Keeps a file's bytes."""
        blob_id = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        return StoredFile(self.keep(data), len(data), blob_id, lfs)

    def find(self, name: str) -> Repository:
        """A repository that is there."""
        if name not in self.repositories:
            raise Refused(404, "RepoNotFound", "Repository not found")
        return self.repositories[name]

    def create(self, name: str, private: bool) -> Repository:
        """A new repository with its first commit."""
        with self.lock:
            repository = self.repositories[name] = Repository(name, self.blobs, private)
            lines = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in self.lfs_patterns)
            self._append(repository, "main", "initial commit", {INITIAL_FILE: self.stored(lines.encode(), lfs=False)})
        return repository

    def commit(
        self,
        repository: Repository,
        files: Mapping[str, bytes],
        delete: Collection[str] = (),
        title: str = "change",
    ) -> Commit:
        """Adds and deletes files on the main branch, as somebody else's client would."""
        with self.lock:
            tree = {path: file for path, file in repository.head.tree.items() if path not in delete}
            tree |= {path: self.stored(data, self.is_lfs(path)) for path, data in files.items()}
            return self._append(repository, "main", title, tree)

    def commit_lines(self, repository: Repository, branch: str, lines: Sequence[dict[str, Any]]) -> Commit:
        """Carries out a commit request: its header line, then one line for each operation."""
        header = lines[0]["value"]
        with self.lock:
            head = repository.at(branch)
            parent = header.get("parentCommit")
            if parent and not head.oid.startswith(parent):
                raise Refused(412, None, "A commit has happened since. Please refresh and try again.")
            tree = dict(head.tree)
            for line in lines[1:]:
                self._apply(tree, line["key"], line["value"])
            return self._append(repository, branch, header["summary"], tree)

    def squash(self, repository: Repository, branch: str) -> None:
        """Makes one commit of a branch; those that no other branch or tag names are forgotten."""
        with self.lock:
            tree = repository.at(branch).tree
            del repository.branches[branch]
            made = self._append(repository, branch, "Super-squash branch", tree)
            named, kept = {*repository.branches.values(), *repository.tags.values()}, {made.oid}
            for commit in reversed(repository.commits):
                kept |= {commit.oid} & named
                kept |= {commit.parent} if commit.oid in kept and commit.parent else set()
            repository.commits = [commit for commit in repository.commits if commit.oid in kept]

    def _apply(self, tree: dict[str, StoredFile], operation: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if operation == "file":
            tree[path] = self.stored(base64.b64decode(value["content"]), lfs=False)
        elif operation == "lfsFile":
            if value["oid"] not in self.blobs:
                raise Refused(400, None, f"LFS object {value['oid']} was never uploaded")
            tree[path] = self.stored(self.blobs[value["oid"]], lfs=True)
        elif operation == "deletedFile":
            if tree.pop(path, None) is None:
                raise Refused(404, "EntryNotFound", f"{path} does not exist")
        else:
            raise Refused(400, None, f"unknown operation {operation}")

    def _append(self, repository: Repository, branch: str, title: str, tree: dict[str, StoredFile]) -> Commit:
        parent = repository.branches.get(branch)
        number = len(repository.commits)
        text = repr((repository.name, parent, number, title, sorted(tree.items())))
        oid = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        commit = Commit(oid, title, parent, now(), tree)
        repository.commits.append(commit)
        repository.branches[branch] = oid
        return commit


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{datetime.now(UTC).microsecond // 1000:03d}Z"
