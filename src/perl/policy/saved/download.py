"""Adapters from the Hub and from the zoo: two files of each, of one commit, verified.

repository and revision, or zoo:NAME -> folder

Nothing else of a repository is ever asked for: no code, no pickles, no card.
"""

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from perl.errors import Mistake, ModelError, PerlError, first_line, warn
from perl.policy.hub_files import check_declared, check_sha256, fetch, has_id, list_files, look_up
from perl.run.files import named, sha256_of, write_text
from perl.zoo.catalogue import PREFIX, Zoo, open_zoo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST_CONFIG = 1_000_000
"""Bytes; a config with every setting has two thousand."""
LARGEST_WEIGHTS = 8_000_000_000
"""Bytes; rank 16 on all linear layers of 70 billion parameters has 0.8e9 in half precision."""

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_FOLDER = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_CONVERT = (
    "opening a pickle can run its author's code; ask the author for safetensors, or where that does no harm: "
    "save_file(torch.load(FILE, weights_only=True), 'adapter_model.safetensors') with safetensors.torch"
)


def fetch_adapter(
    repo: str,
    revision: str | None = None,
    subfolder: str | None = None,
    sha256: Mapping[str, str] | None = None,
    largest: int = LARGEST_WEIGHTS,
) -> Path:
    """An adapter's config and weights from the Hub, in its cache.

    The repository is asked first what it holds; what is too large or no safetensors is not downloaded. Where
    ``HF_HUB_OFFLINE`` forbids asking, what is cached is taken.

    Args:
        repo: ``user/name``.
        revision: Branch, tag or commit; whatever it is, both files are of one commit.
        subfolder: Folder within the repository.
        sha256: File name -> SHA-256 that it must have.
        largest: Bytes that the weights may have.

    Returns:
        The folder with both files.

    Raises:
        ModelError: There is no such adapter, it is not safe to load, or other bytes arrived than were promised.
    """
    if not _REPOSITORY.fullmatch(repo) or ".." in repo:
        raise ModelError(f"{repo!r} is not a name on the Hub", hint="user/name")
    if subfolder is not None and not _is_folder(subfolder):
        raise ModelError(f"{repo}: {subfolder!r} is not a folder of a repository", hint="as in checkpoints/step-64")
    prefix = f"{subfolder}/" if subfolder else ""
    commit = look_up("model", repo, revision)
    if isinstance(commit, Mistake):
        raise ModelError(commit.message, commit.where, commit.hint)
    if commit is None:
        return _cached(repo, revision, prefix, sha256 or {})
    files = list_files(repo, commit)
    pickles = sorted(name for name in files if name.startswith(f"{prefix}adapter_model") and name.endswith(_PICKLES))
    for name in (CONFIG, WEIGHTS):
        if f"{prefix}{name}" not in files:
            if pickles and name == WEIGHTS:
                raise ModelError(f"{repo} holds no {name}, only a pickle, {pickles[0]}", hint=_CONVERT)
            raise ModelError(f"{repo} holds no adapter: {prefix}{name} is absent")
    declared = {name: files[f"{prefix}{name}"] for name in (CONFIG, WEIGHTS)}
    limits, expected = {CONFIG: LARGEST_CONFIG, WEIGHTS: largest}, sha256 or {}
    for name, file in declared.items():  # both, before one is downloaded
        check_declared(repo, file, limits[name], expected.get(name))
    paths = [fetch(repo, commit, file, limits[name], expected.get(name)) for name, file in declared.items()]
    snapshot, branch = Path(str(paths[0])[: -len(f"{prefix}{CONFIG}")]), revision or "main"
    if snapshot.parent.name == "snapshots" and branch != commit and _is_folder(branch):
        note = snapshot.parent.parent / "refs" / branch  # which commit it was, for a time without a network
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, commit)
    return paths[0].parent


def zoo_adapter(name: str, zoo: Zoo | None = None) -> Path:
    """The folder with the files of an adapter of the zoo, verified.

    Args:
        name: With or without ``zoo:``.
        zoo: None: the one in use.

    Raises:
        PerlError: There is no such entry, nobody says where its files are, or they are not those that it lists.
    """
    zoo = zoo or open_zoo()
    entry = zoo.entry(name)
    place, called = entry.adapter, f"{PREFIX}{entry.name}"
    if place.shipped:
        folder = zoo.shipped_folder(entry)
        for file in (CONFIG, WEIGHTS):
            _check_listed(called, folder / file, place.sha256.get(file))
        return folder
    if place.repo is None:
        what = f"{called} cannot be loaded: its entry names no files, only scores ({entry.provenance})"
        raise ModelError(what, hint=f"see {entry.source}" if entry.source else "")
    if not place.sha256:
        at = f"@{place.revision}" if place.revision else ""
        warn("PRL331", "%s: nobody has verified the files of %s%s; its entry lists no SHA-256", called, place.repo, at)
    return fetch_adapter(place.repo, place.revision, place.subfolder, place.sha256)


def pull(zoo: Zoo, name: str, destination: Path) -> Path:
    """Copies an adapter of the zoo into a folder: its config, its weights and, if it is shipped, what else it lists.

    The folder appears whole, or not at all.

    Args:
        zoo: Where the entry is.
        name: With or without ``zoo:``.
        destination: A folder that is absent or empty.

    Returns:
        The folder.

    Raises:
        PerlError: There is no such adapter, its files are not those that its entry lists, or something is in the way.
    """
    entry = zoo.entry(name)
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise PerlError("is in the way", str(destination), "name a folder that is absent or empty")
    target = destination.resolve()
    source = zoo_adapter(name, zoo)
    others = sorted(entry.adapter.sha256.keys() - {CONFIG, WEIGHTS}) if entry.adapter.shipped else []
    if paths := [file for file in others if not _is_folder(file) or "/" in file]:
        raise ModelError(f"{PREFIX}{entry.name} lists {paths[0]!r}, which is not a file name")
    with named(destination):
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for file in (CONFIG, WEIGHTS, *others):
                shutil.copyfile(source / file, staged / file)
                if entry.adapter.sha256:
                    _check_listed(f"{PREFIX}{entry.name}", staged / file, entry.adapter.sha256.get(file))
            staged.chmod(0o755)
            staged.rename(target)  # over an empty folder, or one that somebody filled meanwhile, which fails
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return destination


def _check_listed(called: str, file: Path, expected: str | None) -> None:
    """A file of the zoo must be the one that the entry lists."""
    if expected is None:
        raise ModelError(f"{called} lists no SHA-256 of {file.name}, so it cannot be verified")
    if not file.is_file():
        raise ModelError(f"{called} ships no {file.name}", str(file.parent))
    found = sha256_of(file)
    if found != expected:
        what = f"{called}: {file.name} is not the file that its entry lists"
        raise ModelError(f"{what} (SHA-256 {found[:12]}, not {expected[:12]})")


def _is_folder(name: str) -> bool:
    """Whether it leads from a folder to one below it, on every system."""
    return _FOLDER.fullmatch(name) is not None and not {".", ".."} & set(name.split("/"))


def _cached(repo: str, revision: str | None, prefix: str, sha256: Mapping[str, str]) -> Path:
    """The folder in the Hub's cache, without a network; files whose bytes are not those of their name are refused."""
    names = [f"{prefix}{name}" for name in (CONFIG, WEIGHTS)]
    try:
        root = snapshot_download(repo, revision=revision, allow_patterns=names, local_files_only=True)
    except (OSError, ValueError) as error:
        name = f"{repo}@{revision}" if revision else repo
        hint = "unset HF_HUB_OFFLINE to ask the Hub" if constants.HF_HUB_OFFLINE else ""
        raise ModelError(f"{name} cannot be downloaded from the Hub: {first_line(error)}", hint=hint) from error
    folder = Path(root, prefix)
    for name in (CONFIG, WEIGHTS):
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{repo} holds no adapter: {prefix}{name} is absent in the Hub's cache")
        promised = path.resolve().name  # the Hub's cache keeps a file under its SHA-256 or git's id
        if path.is_symlink() and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", promised) and not has_id(path, promised):
            raise ModelError(f"{repo}: {prefix}{name} is damaged in the Hub's cache", str(path), "delete it")
        if expected := sha256.get(name):
            check_sha256(repo, path, expected)
    return folder
