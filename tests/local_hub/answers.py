"""What a Hub answers to each request, whoever carries it.

request -> answer

Knows nothing of sockets. Each function is one of the Hub's routes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlencode

from tests.local_hub.metadata import describe, validate_card
from tests.local_hub.store import Commit, Refused, Repository, StoredFile, Visibility

if TYPE_CHECKING:
    from tests.local_hub.server import LocalHub

LISTED = ("_id", "id", "modelId", "likes", "private", "downloads", "tags", "pipeline_tag", "library_name", "createdAt")


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
    """What is sent back. ``file``: the path of the file that it is, for faults of downloads."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    file: str | None = None


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
    if hub.token and owner not in (hub.user, *hub.organisations):
        raise Refused(403, None, f"You don't have the rights to write under the namespace {owner!r}")


def _repository(hub: "LocalHub", asked: Asked, kind: str, name: str) -> Repository:
    repository = hub.store.find("dataset" if kind.startswith("dataset") else "model", unquote(name))
    if repository.visibility.private and hub.token and asked.token != hub.token:
        raise Refused(404, "RepoNotFound", "Repository not found")
    return repository


def _web_address(hub: "LocalHub", repository: Repository) -> str:
    return f"{hub.url}/{'datasets/' if repository.kind == 'dataset' else ''}{repository.name}"


def who_am_i(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    if asked.token is None:
        raise Refused(401, None, "Invalid username or password.")
    _must_be_logged_in(hub, asked)
    token = {"displayName": "test", "role": "write"}
    facts = {"type": "user", "id": "0", "name": hub.user, "fullname": hub.user, "isPro": False}
    orgs = [{"type": "org", "id": name, "name": name, "fullname": name} for name in hub.organisations]
    return _json(facts | {"orgs": orgs, "auth": {"type": "access_token", "accessToken": token}})


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
    kind = wanted.get("type") or "model"
    if (kind, name) in hub.store.repositories:
        there = hub.store.repositories[kind, name]
        message = f"You already created this {kind} repo"
        return _json({"error": message, "url": _web_address(hub, there)}, 409, {"X-Error-Message": message})
    made = hub.store.create(kind, name, Visibility(private))
    return _json({"url": _web_address(hub, made), "name": name, "id": name, "private": private})


def delete_repository(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    wanted = asked.json()
    name = f"{wanted.get('organization') or hub.user}/{wanted['name']}"
    _must_own(hub, asked, name)
    repository = hub.store.find(wanted.get("type") or "model", name)
    del hub.store.repositories[repository.kind, name]
    return Answer(200, b"OK", content_type="text/plain")


def change_settings(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
    _must_own(hub, asked, repository.name)
    wanted = asked.json()
    if "private" in wanted or "visibility" in wanted:
        repository.visibility.private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
    return _json({})


def list_repositories(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    query = asked.query
    kind = match["kind"].removesuffix("s")
    found = []
    for repository in list(hub.store.repositories.values()):
        private = repository.visibility.private and hub.token and asked.token != hub.token
        if repository.kind == kind and not private:
            facts = describe(repository, repository.head, with_blobs=False)
            if _is_wanted(facts, query):
                found.append(facts)
    order = query.get("sort", ["createdAt"])[0]
    found.sort(key=lambda facts: facts.get(order) or 0, reverse=True)
    size = min(int(query.get("limit", [hub.page_size])[0]), hub.page_size)
    start = int(query.get("cursor", ["0"])[0])
    headers = {}
    if len(found) > start + size:
        after = {**query, "cursor": [str(start + size)]}
        headers["Link"] = f'<{hub.url}/api/{match["kind"]}?{urlencode(after, doseq=True)}>; rel="next"'
    return _json([_shown(facts, query) for facts in found[start : start + size]], headers=headers)


def _is_wanted(facts: Mapping[str, Any], query: Mapping[str, list[str]]) -> bool:
    tags = [tag for value in query.get("filter", []) for tag in value.split(",")]
    return (
        all(tag in facts["tags"] for tag in tags)
        and all(facts["author"] == name for name in query.get("author", []))
        and all(text.lower() in facts["id"].lower() for text in query.get("search", []))
        and all(facts.get("pipeline_tag") == name for name in query.get("pipeline_tag", []))
        and all(bool(facts["gated"]) == (value.lower() == "true") for value in query.get("gated", []))
    )


def _shown(facts: Mapping[str, Any], query: Mapping[str, list[str]]) -> dict[str, Any]:
    expanded = query.get("expand", query.get("expand[]"))
    if expanded:
        return {key: value for key, value in facts.items() if key in ("_id", "id", "modelId", *expanded)}
    shown = {key: value for key, value in facts.items() if key in LISTED}
    if "full" in query:
        shown |= {key: facts[key] for key in ("author", "gated", "lastModified", "sha", "siblings")}
    if ("full" in query or "cardData" in query) and "cardData" in facts:
        shown["cardData"] = facts["cardData"]
    return shown


def info(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
    commit = repository.at(unquote(match["revision"] or "main"))
    facts = describe(repository, commit, "blobs" in asked.query)
    expanded = asked.query.get("expand", asked.query.get("expand[]"))
    return _json(_shown(facts, asked.query) if expanded else facts)


def preupload(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
    _must_own(hub, asked, repository.name)
    tree = repository.at(unquote(match["revision"])).tree
    files = []
    for file in asked.json()["files"]:
        mode = "lfs" if hub.store.is_lfs(file["path"]) else "regular"
        known = {"oid": tree[file["path"]].oid} if file["path"] in tree else {}
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **known})
    return _json({"files": files})


def lfs_batch(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"] or "model", match["name"])
    _must_own(hub, asked, repository.name)
    objects = []
    for wanted in asked.json()["objects"]:
        one = {"oid": wanted["oid"], "size": wanted["size"]}
        if not hub.store.has(wanted["oid"]):
            upload = {"href": f"{hub.url}/lfs/{wanted['oid']}", "header": {}}
            one["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/lfs/verify", "header": {}}}
        objects.append(one)
    return _json({"transfer": "basic", "objects": objects})


def lfs_upload(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    if hub.store.keep(asked.body) != match["oid"]:
        raise Refused(400, None, "the bytes do not have the SHA-256 under which they were announced")
    return Answer(200, headers={"ETag": f'"{match["oid"]}"'})


def lfs_verify(hub: "LocalHub", asked: Asked, _match: "re.Match[str]") -> Answer:
    if not hub.store.has(asked.json()["oid"]):
        raise Refused(404, None, "no such LFS object")
    return _json({})


def commit(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
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
        request = None
        if "create_pr" in asked.query:
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.branches)
            request = f"{_web_address(hub, repository)}/discussions/{number}"
            repository.branches[f"refs/pr/{number}"] = repository.branches[branch]
            branch = f"refs/pr/{number}"
        made = hub.store.commit_lines(repository, branch, lines)
    address = f"{_web_address(hub, repository)}/commit/{made.oid}"
    said = {"success": True, "commitOid": made.oid, "commitUrl": address, "hookOutput": "", "pullRequestUrl": request}
    return _json(said)


def tree(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    at = _repository(hub, asked, match["kind"], match["name"]).at(unquote(match["revision"]))
    folder = unquote(match["path"] or "").strip("/")
    start = f"{folder}/" if folder else ""
    recursive = asked.query.get("recursive", ["false"])[0].lower() in ("true", "1")
    rows: dict[str, dict[str, Any]] = {}
    for path, file in sorted(at.tree.items()):
        if not path.startswith(start):
            continue
        parts = path[len(start) :].split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            inside = start + "/".join(parts[:depth])
            rows.setdefault(inside, {"type": "directory", "oid": "0" * 40, "size": 0, "path": inside})
        if recursive or len(parts) == 1:
            rows[path] = _entry(path, file, at, asked)
    if folder and not rows:
        raise Refused(404, "EntryNotFound", f"{folder} does not exist on {match['revision']}")
    return _json(list(rows.values()))


def paths_info(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    at = _repository(hub, asked, match["kind"], match["name"]).at(unquote(match["revision"]))
    form = "json" not in asked.headers.get("Content-Type", "")
    paths = parse_qs(asked.body.decode()).get("paths", []) if form else asked.json()["paths"]
    rows = []
    for path in [paths] if isinstance(paths, str) else paths:
        if path in at.tree:
            rows.append(_entry(path, at.tree[path], at, asked))
        elif any(known.startswith(path.rstrip("/") + "/") for known in at.tree):
            rows.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
    return _json(rows)


def _entry(path: str, file: StoredFile, at: Commit, asked: Asked) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "oid": file.blob_id, "size": file.size, "path": path}
    if file.lfs:
        row["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    if asked.query.get("expand", ["false"])[0].lower() in ("true", "1"):
        row["lastCommit"] = {"id": at.oid, "title": at.title, "date": at.date}
    return row


def refs(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
        for name, oid in repository.branches.items()
        if not name.startswith("refs/")
    ]
    tags = [{"name": name, "ref": f"refs/tags/{name}", "targetCommit": oid} for name, oid in repository.tags.items()]
    return _json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


def commits(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
    at: Commit | None = repository.at(unquote(match["revision"]))
    rows = []
    while at:
        authors = [{"user": repository.name.split("/")[0]}]
        rows.append({"id": at.oid, "title": at.title, "message": at.message, "date": at.date, "authors": authors})
        at = repository.at(at.parent) if at.parent else None
    return _json(rows)


def change_reference(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"], match["name"])
    _must_own(hub, asked, repository.name)
    names = repository.tags if match["what"] == "tag" else repository.branches
    name = unquote(match["revision"])
    with hub.store.lock:
        if asked.method == "DELETE":
            if names.pop(name, None) is None:
                raise Refused(404, "RevisionNotFound", f"Invalid rev id: {name}")
            return _json({})
        wanted = asked.json()
        # POST tag/{revision} {"tag": name}, but POST branch/{name} {"startingPoint": revision}.
        new, start = (
            (wanted["tag"], name) if names is repository.tags else (name, wanted.get("startingPoint") or "main")
        )
        if new in names:
            raise Refused(409, None, f"Tag or branch {new} already exists")
        names[new] = repository.at(start).oid
    return _json({})


def resolve(hub: "LocalHub", asked: Asked, match: "re.Match[str]") -> Answer:
    repository = _repository(hub, asked, match["kind"] or "model", match["name"])
    if repository.visibility.gated:
        raise Refused(403 if asked.token else 401, "GatedRepo", f"Access to model {repository.name} is restricted")
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
    data = hub.faults.body(path, data)
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.headers.get("Range", ""))
    if not wanted:
        return Answer(200, data, headers, "application/octet-stream", path)
    first = int(wanted[1]) if wanted[1] else max(len(data) - int(wanted[2]), 0)
    last = min(int(wanted[2]), len(data) - 1) if wanted[1] and wanted[2] else len(data) - 1
    if first > last:
        return Answer(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
    return Answer(206, data[first : last + 1], headers, "application/octet-stream", path)


_REPO = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
_FILES = r"/(?:(?P<kind>datasets)/)?(?P<name>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Route]] = [
    ("GET", r"/api/whoami-v2", who_am_i),
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("POST", r"/api/repos/create", create_repository),
    ("DELETE", r"/api/repos/delete", delete_repository),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", lfs_upload),
    ("POST", r"/lfs/verify", lfs_verify),
    ("POST", _FILES + r"\.git/info/lfs/objects/batch", lfs_batch),
    ("GET", r"/api/(?P<kind>models|datasets)", list_repositories),
    ("GET", _REPO + r"(?:/revision/(?P<revision>[^/]+))?", info),
    ("PUT", _REPO + r"/settings", change_settings),
    ("POST", _REPO + r"/preupload/" + _REVISION, preupload),
    ("POST", _REPO + r"/commit/" + _REVISION, commit),
    ("GET", _REPO + r"/tree/" + _REVISION + r"(?:/(?P<path>.*))?", tree),
    ("POST", _REPO + r"/paths-info/" + _REVISION, paths_info),
    ("GET", _REPO + r"/refs", refs),
    ("GET", _REPO + r"/commits/" + _REVISION, commits),
    ("POST|DELETE", _REPO + r"/(?P<what>tag|branch)/" + _REVISION, change_reference),
    ("GET|HEAD", _FILES + r"/resolve/" + _REVISION + r"/(?P<path>.+)", resolve),
]
