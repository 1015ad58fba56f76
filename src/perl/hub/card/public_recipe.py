"""The recipe of a run as others may have it: what was done, without where.

Recipe -> YAML without paths, servers, folders

Loading that YAML trains the same on another machine, once files that were local lie in the current folder.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from perl.hub.card.names import shown_file
from perl.policy.model import public_name
from perl.policy.saved.adapter import public_adapter
from perl.recipe import Recipe
from perl.recipe.plain_yaml import dump
from perl.recipe.sections import is_data_file

# Where things are on the machine it was trained on.
_PLACES = {
    "eval": ("data",),
    "rollout": ("servers", "server_timeout", "sync_folder", "sync_folder_on_servers"),
}
# Arguments of the trainer that say where things go or what they are called there.
_OF_ONE_MACHINE = re.compile(r"_dir$|_path$|^hub_|^run_name$|^project$|_token$|_server_|^report_to$|^trackio_")
# Not `/no_think`, which is a word to some models.
_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\|~\w*/|\.{1,2}/|/[^/\s]+/")


def public_recipe(recipe: Recipe, teacher: str | None = None) -> str:
    """The recipe as YAML without anything of this machine.

    Of a local model, data set or adapter the last part of its path is left. The section ``hub`` is left out: who trains
    it again has a repository of their own.

    Args:
        recipe: Of the run.
        teacher: What the run called its teacher's adapter for others; None: what it is called by what lies here now.
    """
    sections = recipe.as_dict()
    del sections["hub"]
    sections["train"] = {key: value for key, value in sections["train"].items() if not _OF_ONE_MACHINE.search(key)}
    for section, keys in _PLACES.items():
        sections[section] = {key: value for key, value in sections[section].items() if key not in keys}
    if recipe.rollout.capabilities.needs_servers:  # it cannot be read without addresses
        of_servers = ("backend", "prefetch", "max_staleness", "in_flight")
        sections["rollout"] = {k: v for k, v in sections["rollout"].items() if k not in of_servers}
    for source in (sections["data"].get(role) for role in ("train", "eval")):
        if source is not None and is_data_file(source["name"]):
            source["name"] = shown_file(without_paths(source["name"]))
    name, revision = public_name(recipe.model.name, recipe.model.revision)
    sections["model"] |= {"name": name, "revision": revision}
    if recipe.teacher.adapter is not None:
        sections["teacher"]["adapter"] = teacher or public_adapter(recipe.teacher.adapter)
    if sections["train"].get("critic_adapter") is not None:
        sections["train"]["critic_adapter"] = public_adapter(sections["train"]["critic_adapter"])
    return dump({key: without_paths(value) for key, value in sections.items()})


def without_paths(value: Any) -> Any:  # noqa: ANN401 (YAML and JSON values)
    """The same value; of text that is a path only the last part, of keys too (``folder/own.py:reward``)."""
    if isinstance(value, str):
        return _last_part(value)
    if isinstance(value, Mapping):
        return {_last_part(str(key)): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return value


def _last_part(text: str) -> str:
    """The file's or folder's own name, if the text is a path and nothing else."""
    if _PATH.match(text) is None or (re.search(r"\s", text) and not Path(text).exists()):
        return text
    path = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    return path.name or "."
