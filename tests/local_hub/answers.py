"""What a Hub answers to each request, whoever carries it.

request -> answer

Knows nothing of sockets. Each function is one of the Hub's routes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.local_hub.metadata import describe, validate_card
from tests.local_hub.store import Refused, Repository

if TYPE_CHECKING:
    from tests.local_hub.server import LocalHub


@dataclass(frozen=True)
class Asked:
    """One request; ``path`` as it came, ``token`` None for nobody."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    token: str | None

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


Route = Callable[["LocalHub", Asked, "re.Match[str]"], Answer]


def answer(hub: "LocalHub", asked: Asked) -> Answer:
    """Finds the route; a refusal becomes the answer that the client understands."""
    try:
        if hub.token and asked.token not in (None, hub.token) and not asked.path.startswith("/lfs/"):
            raise Refused(401, None, "Invalid credentials in Authorization header")
        for method, pattern, route in ROUTES:
            match = re.fullmatch(pattern, asked.path)
            if match and asked.method in method.split("|"):
                return route(hub, asked, match)
        raise Refused(404, None, f"no such route: {asked.method} {asked.path}")
    except Refused as refused:
        return refusal(refused)


def refusal(refused: Refused, headers: Mapping[str, str] | None = None) -> Answer:
    """The answer that says no."""
    said = {"X-Error-Message": refused.message, **(headers or {})}
    if refused.code:
        said["X-Error-Code"] = refused.code
    return Answer(refused.status, json.dumps({"error": refused.message}).encode(), said)


def _json(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(data).encode(), headers or {})


def _must_be_logged_in(hub: "LocalHub", asked: Asked) -> None:
    if hub.token and asked.token != hub.token:
        raise Refused(401, None, "Invalid username or password.")


def _must_own(hub: "LocalHub", asked: Asked, name: str) -> None:
    _must_be_logged_in(hub, asked)
    owner = name.split("/")[0]
    if hub.token and owner != hub.user:
        raise Refused(403, None, f"You don't have the rights to write under the namespace {owner!r}")


def _repository(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Repository:
    repository = hub.store.find(unquote(match["name"]))
    if repository.private and hub.token and asked.token != hub.token:
        raise Refused(404, "RepoNotFound", "Repository not found")
    return repository


def who_am_i(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    if asked.token is None:
        raise Refused(401, None, "Invalid username or password.")
    _must_be_logged_in(hub, asked)
    token = {"displayName": "test", "role": "write"}
    facts = {"type": "user", "id": "0", "name": hub.user, "fullname": hub.user, "isPro": False}
    return _json(facts | {"orgs": [], "auth": {"type": "access_token", "accessToken": token}})


def validate_yaml(_hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    errors, warnings = validate_card(asked.json()["content"])
    said = {"errors": [{"message": error} for error in errors], "warnings": [{"message": text} for text in warnings]}
    if errors:
        said["error"] = "Invalid metadata in README.md: " + "; ".join(errors)
    return _json(said, 400 if errors else 200)


def create_repository(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    wanted = asked.json()
    name = f"{wanted.get('organization') or hub.user}/{wanted['name']}"
    _must_own(hub, asked, name)
    private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
    if name in hub.store.repositories:
        message = "You already created this model repo"
        return _json({"error": message, "url": f"{hub.url}/{name}"}, 409, {"X-Error-Message": message})
    hub.store.create(name, private)
    return _json({"url": f"{hub.url}/{name}", "name": name, "id": name, "private": private})


def list_repositories(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    """Those that the asker may see, by tags; the newest first."""
    wanted = [tag for value in asked.query.get("filter", []) for tag in value.split(",")]
    seen = [r for r in hub.store.repositories.values() if not (r.private and asked.token != hub.token)]
    found = [describe(repository, repository.head, with_blobs=False) for repository in seen]
    found = [facts for facts in found if all(tag in facts["tags"] for tag in wanted)]
    found.sort(key=lambda facts: str(facts["lastModified"]), reverse=True)
    limit = int(asked.query.get("limit", [len(found)])[0])
    return _json([_shown(facts, asked.query) for facts in found[:limit]])


def _shown(facts: Mapping[str, Any], query: Mapping[str, list[str]]) -> Mapping[str, Any]:
    expanded = query.get("expand", query.get("expand[]"))
    return {k: v for k, v in facts.items() if k in ("_id", "id", "modelId", *expanded)} if expanded else facts


def info(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    commit = repository.at(unquote(match["revision"] or "main"))
    return _json(_shown(describe(repository, commit, "blobs" in asked.query), asked.query))


def preupload(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    _must_own(hub, asked, repository.name)
    tree = repository.at(unquote(match["revision"])).tree
    files = []
    for file in asked.json()["files"]:
        mode = "lfs" if hub.store.is_lfs(file["path"]) else "regular"
        known = {"oid": tree[file["path"]].oid} if file["path"] in tree else {}
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **known})
    return _json({"files": files})


def lfs_batch(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    _must_own(hub, asked, repository.name)
    objects = []
    for wanted in asked.json()["objects"]:
        one = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in hub.store.blobs:
            upload = {"href": f"{hub.url}/lfs/{wanted['oid']}", "header": {}}
            one["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/lfs/verify", "header": {}}}
        objects.append(one)
    return _json({"transfer": "basic", "objects": objects})


def lfs_upload(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    if hub.store.keep(asked.body) != match["oid"]:
        raise Refused(400, None, "the bytes do not have the SHA-256 under which they were announced")
    return Answer(200, headers={"ETag": f'"{match["oid"]}"'})


def lfs_verify(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    if asked.json()["oid"] not in hub.store.blobs:
        raise Refused(404, None, "no such LFS object")
    return _json({})


def commit(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    _must_own(hub, asked, repository.name)
    lines = [json.loads(line) for line in asked.body.splitlines() if line.strip()]
    branch = unquote(match["revision"])
    with hub.store.lock:
        if hub.faults.takes_stale():
            hub.store.commit(
                repository, {"slipped-in.txt": f"{len(repository.commits)}\n".encode()}, title="slipped in"
            )
        if branch not in repository.branches:
            repository.at(branch)
            raise Refused(400, None, f"{branch} is not a branch")
        made = hub.store.commit_lines(repository, branch, lines)
    address = f"{hub.url}/{repository.name}/commit/{made.oid}"
    return _json({"success": True, "commitOid": made.oid, "commitUrl": address, "hookOutput": ""})


def refs(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    branches, tags = (
        [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in names.items()]
        for kind, names in (("heads", repository.branches), ("tags", repository.tags))
    )
    return _json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


def tree(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    """The files of a folder, which are all of it here, or those that were asked for by name."""
    files = _repository(hub, asked, match).at(unquote(match["revision"])).tree
    wanted = asked.json()["paths"] if asked.method == "POST" else list(files)
    found = {path: files[path] for path in wanted if path in files}
    return _json([{"type": "file", "path": path, "oid": file.oid, "size": file.size} for path, file in found.items()])


def change_reference(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    _must_own(hub, asked, repository.name)
    name, wanted = unquote(match["revision"]), asked.json()
    # POST tag/{revision} {"tag": name}, but POST branch/{name} {"startingPoint": revision}.
    a_tag = match["what"] == "tag"
    names = repository.tags if a_tag else repository.branches
    new, start = (wanted["tag"], name) if a_tag else (name, wanted.get("startingPoint") or "main")
    with hub.store.lock:
        if new in names:
            raise Refused(409, None, f"Tag or branch {new} already exists")
        names[new] = repository.at(start).oid
    return _json({})


def squash(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    _must_own(hub, asked, repository.name)
    hub.store.squash(repository, unquote(match["revision"]))
    return _json({})


def resolve(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match)
    at = repository.at(unquote(match["revision"]))
    headers = {"X-Repo-Commit": at.oid, "Accept-Ranges": "bytes"}
    path = unquote(match["path"])
    file = at.tree.get(path)
    if file is None:
        return refusal(Refused(404, "EntryNotFound", "Entry not found"), headers)
    headers["ETag"] = f'"{file.oid}"'
    if file.lfs:
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
    data = repository.bytes_of(file)
    if asked.method == "HEAD":
        return Answer(200, data, headers, "application/octet-stream")
    repository.downloads += 1
    return Answer(200, hub.faults.body(path, data), headers, "application/octet-stream")


_REPO = r"/api/(?:models|datasets)/(?P<name>[^/]+/[^/]+)"
_FILES = r"(?:/datasets)?/(?P<name>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Route]] = [
    ("GET", r"/api/whoami-v2", who_am_i),
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("POST", r"/api/repos/create", create_repository),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", lfs_upload),
    ("POST", r"/lfs/verify", lfs_verify),
    ("POST", _FILES + r"\.git/info/lfs/objects/batch", lfs_batch),
    ("GET", r"/api/models", list_repositories),
    ("GET", _REPO + r"(?:/revision/(?P<revision>[^/]+))?", info),
    ("POST", _REPO + r"/preupload/" + _REVISION, preupload),
    ("POST", _REPO + r"/commit/" + _REVISION, commit),
    ("GET", _REPO + r"/refs", refs),
    ("GET", _REPO + r"/tree/" + _REVISION + r"(?:/(?P<path>.*))?", tree),
    ("POST", _REPO + r"/paths-info/" + _REVISION, tree),
    ("POST", _REPO + r"/(?P<what>tag|branch)/" + _REVISION, change_reference),
    ("POST", _REPO + r"/super-squash/" + _REVISION, squash),
    ("GET|HEAD", _FILES + r"/resolve/" + _REVISION + r"/(?P<path>.+)", resolve),
]
