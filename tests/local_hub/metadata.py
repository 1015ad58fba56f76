"""What a Hub reads out of a repository's card, and what it shows of a repository.

card -> problems; repository -> model or data set info

Knows nothing of HTTP. The messages are the real Hub's.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from tests.local_hub.store import Commit, Repository, StoredFile

REPO_ID = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}")
_LICENCES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m openrail++ afl-3.0 artistic-2.0 bsl-1.0 bsd
    bsd-2-clause bsd-3-clause cc cc0-1.0 cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0
    cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-4.0 cdla-permissive-2.0 ecl-2.0 epl-2.0
    eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc llama2 llama3 llama3.1 llama3.2 llama3.3
    llama4 gemma lppl-1.3c ms-pl apple-ascl mpl-2.0 odc-by odbl ofl-1.1 openmdw-1.0 postgresql pddl unlicense
    wtfpl zlib deepfloyd-if-license other unknown
"""
LICENCES = frozenset(_LICENCES.split())
_FRONT_MATTER = re.compile(r"^\s*---[\r\n]+([\s\S]*?)[\r\n]+---([\r\n]|$)")


def metadata_of(card: str) -> dict[str, Any]:
    """A card's front matter; empty where it has none or it cannot be read."""
    found = _FRONT_MATTER.match(card)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return json.loads(json.dumps(data, default=str)) if isinstance(data, dict) else {}


def validate_card(card: str) -> tuple[list[str], list[str]]:
    """Errors and warnings of a card's front matter, as ``/api/validate-yaml`` gives them."""
    found = _FRONT_MATTER.match(card)
    if not found:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        return [f"YAML metadata is invalid: {error}"], []
    if not isinstance(data, dict):
        return ["YAML metadata must be a mapping"], []
    errors = [
        f'"{key}" with value "{name}" is not valid. Use an id from https://hf.co.'
        for key in ("base_model", "datasets")
        for name in _many(data.get(key))
        if not isinstance(name, str) or not REPO_ID.fullmatch(name) or name.startswith((".", "-")) or ".." in name
    ]
    if any(licence not in LICENCES for licence in _many(data.get("license"))):
        errors.append(f'"license" must be one of [{", ".join(sorted(LICENCES))}]')
    errors += [
        f'"{key}" must be an array' for key in ("tags", "model-index") if not isinstance(data.get(key, []), list)
    ]
    for number, model in enumerate(_many(data.get("model-index"))):
        errors += [] if model.get("name") else [f'"model-index[{number}].name" is required']
        for row, result in enumerate(model.get("results") or []):
            place = f"model-index[{number}].results[{row}]"
            errors += [f'"{place}.{key}" is required' for key in ("task", "dataset", "metrics") if not result.get(key)]
            errors += [
                f'"{place}.dataset.{key}" is required' for key in ("type", "name") if key not in result["dataset"]
            ]
    return errors, []


def tags_of(metadata: Mapping[str, Any]) -> list[str]:
    """The tags by which a repository is found: the card's own and those the Hub derives."""
    bases = [base for base in _many(metadata.get("base_model")) if base]
    tags = [metadata["library_name"]] if "library_name" in metadata else []
    tags += [str(tag) for tag in _many(metadata.get("tags"))]
    tags += [f"base_model:{base}" for base in bases] + [f"base_model:adapter:{base}" for base in bases]
    return list(dict.fromkeys([*tags, *(f"license:{name}" for name in _many(metadata.get("license")))]))


def describe(repository: Repository, commit: Commit, with_blobs: bool) -> dict[str, Any]:
    """All that the Hub says of a repository at a commit."""
    readme = commit.tree.get("README.md")
    metadata = metadata_of(repository.bytes_of(readme).decode("utf-8", "replace")) if readme else {}
    facts: dict[str, Any] = {
        "_id": hashlib.sha256(repository.name.encode()).hexdigest()[:24],
        "id": repository.name,
        "modelId": repository.name,
        "author": repository.name.split("/")[0],
        "sha": commit.oid,
        "lastModified": commit.date,
        "createdAt": repository.commits[0].date,
        "private": repository.private,
        "gated": False,
        "disabled": False,
        "downloads": repository.downloads,
        "likes": 0,
        "tags": tags_of(metadata),
        "siblings": [_sibling(path, file, with_blobs) for path, file in sorted(commit.tree.items())],
    }
    if metadata:
        facts["cardData"] = metadata
    return facts | {key: metadata[key] for key in ("library_name", "pipeline_tag", "model-index") if key in metadata}


def _sibling(path: str, file: StoredFile, with_blobs: bool) -> dict[str, Any]:
    if not with_blobs:
        return {"rfilename": path}
    facts = {"rfilename": path, "size": file.size, "blobId": file.blob_id}
    return facts | ({"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 134}} if file.lfs else {})


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
