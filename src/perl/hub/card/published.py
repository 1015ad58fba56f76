"""The files of a published adapter: its card, and what that is made of, each read as what it is and no more.

name in the repository -> bytes -> config, recipe, results, log; Recipe -> YAML without paths, servers, folders;
text of a card -> mistakes, a line each; card, older card -> card with its author's words

The files are untrusted: the YAML of a card is read as plain values, and no more of it than a card may have. A recipe is
published as others may have it: what was done, without where. Loading it trains the same on another machine, once files
that were local lie in the current folder.
"""

import hashlib
import posixpath
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import yaml
from peft import PeftConfig

from perl.errors import Mistake, PerlError, RecipeError, first_line
from perl.evaluation.scoring.results import RESULTS, Results, parse_results
from perl.hub.gate import largest
from perl.policy.model import public_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS, public_adapter, read_config
from perl.recipe import Recipe, load_recipe
from perl.recipe.plain_yaml import dump, plain_value, refuse_tags
from perl.recipe.sections import is_data_file
from perl.run.logs import log_rows

CARD, PUBLIC_RECIPE, METRICS, SCORES = "README.md", "perl_recipe.yaml", "metrics.jsonl", f"eval/{RESULTS}"
"""What files of a published adapter are called."""
LARGEST_CARD = largest(CARD) or 0
AGAIN = "perl card RUN writes it anew"
AUTHOR = "## Said by the author, not checked"
"""The last heading of a card, below which its author's own words stand as a quotation."""
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?(?:\n|\Z)", re.DOTALL)
_FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_HTML = re.compile(r"<[A-Za-z/!?][^>\n]*>?")
_LINK = re.compile(r"(!?)\[[^\]\n]*\]\(\s*<?([^)>\s]+)")
# In an author's own words nothing is taken for code, which HTML could be hidden in; what a reference in brackets names
# would hold in the whole card.
_NOT_IN_WORDS = re.compile(r"<[A-Za-z/!?]|!\[|\]:")
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
# Where things are on the machine it was trained on.
_PLACES = {
    "engine": ("address", "storage"),
    "eval": ("data",),
    "rollout": ("servers", "server_timeout", "sync_folder", "sync_folder_on_servers"),
}
# Arguments of the trainer that say where things go or what they are called there.
_OF_ONE_MACHINE = re.compile(r"_dir$|_path$|^hub_|^run_name$|^project$|_token$|_server_|^report_to$|^trackio_")
# Not `/no_think`, which is a word to some models.
_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\|~\w*/|\.{1,2}/|/[^/\s]+/")

Row = TypeVar("Row")
Files = Mapping[str, bytes | Path | None]
"""Name in the repository -> its content, or the file that holds it; None: it is there and was not read."""


def content_of(files: Files, name: str) -> bytes | None:
    """A file's bytes; None: it is not there, or was not read."""
    held = files.get(name)
    return held.read_bytes() if isinstance(held, Path) else held


def config_in(files: Files) -> PeftConfig | None:
    """The adapter's config; None: there is none.

    Raises:
        PerlError: It is not a config of PEFT.
    """
    content = content_of(files, CONFIG)
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_bytes(content)
        try:
            return read_config(Path(folder))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)[:100]}"
            raise PerlError(f"is not a config of PEFT: {reason}", CONFIG) from None


def public_recipe_in(files: Files) -> Recipe | None:
    """The recipe; None: there is none.

    Raises:
        PerlError: It does not stand alone.
    """
    content = content_of(files, PUBLIC_RECIPE)
    if content is None:
        return None
    try:
        text = content.decode("utf-8")
        refuse_tags(text, PUBLIC_RECIPE)
        values = plain_value(text)
        if not isinstance(values, dict) or "extends" in values or not all(isinstance(key, str) for key in values):
            raise PerlError("is not a recipe that stands alone", PUBLIC_RECIPE, "perl push writes one")
        return load_recipe(values)
    except RecipeError as error:
        problem = error.mistakes[0]
        raise PerlError(f"{problem.where}: {problem.message}", PUBLIC_RECIPE, problem.hint) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)[:100]}"
        raise PerlError(f"is not plain YAML: {reason}", PUBLIC_RECIPE) from None


def results_in(files: Files) -> Results | None:
    """The scores; None: there are none.

    Raises:
        PerlError: They were not written by ``perl eval``.
    """
    content = content_of(files, SCORES)
    return parse_results(content, SCORES) if content is not None else None


def log_in(files: Files, step: int | None = None) -> list[dict[str, Any]]:
    """What was logged, up to a step; what is no row of a log is left out."""
    rows = log_rows((content_of(files, METRICS) or b"").decode("utf-8", errors="replace"))
    return [row for row in rows if step is None or (row.get("step") or 0) <= step]


def digests_in(files: Files, weights_sha256: str | None) -> dict[str, str]:
    """SHA-256 of those files of which a card shows too little to tell that one was changed.

    Args:
        files: Of an adapter.
        weights_sha256: Of its weights; None: it is not known.
    """
    contents = {name: content_of(files, name) for name in (CONFIG, PUBLIC_RECIPE)}
    found = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items() if content is not None}
    return found if weights_sha256 is None else {**found, WEIGHTS: weights_sha256}


def evenly(rows: list[Row], most: int) -> list[Row]:
    """At most so many rows, evenly apart, the first and the last among them."""
    return rows if len(rows) <= most else [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


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
            # Without its folder, with dashes for spaces and marks, as a card can show it.
            source["name"] = re.sub(r"[^\w.+-]+", "-", PurePath(without_paths(source["name"])).name).lstrip("-.+")
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


def card_mistakes(card: str, files: Collection[str]) -> list[Mistake]:
    """Why a card is not fit for the Hub: links to files that are not there, pictures of somebody else's, HTML.

    Args:
        card: ``README.md``.
        files: Paths of all files beside it.
    """
    metadata, mistakes = read_front_matter(card)
    if metadata is None:
        return mistakes
    # Every line keeps its number, of which those below the last heading are the author's.
    ours = split_author(card)[0].count("\n")
    bare = FRONT_MATTER.sub(lambda match: "\n" * match[0].count("\n"), card)
    bare = _FENCES.sub(lambda match: "\n" * match[0].count("\n"), bare)
    for number, line in enumerate(bare.split("\n"), 1):
        where = f"{CARD}:{number}"
        for mark, target in _LINK.findall(line):
            remote, what = _REMOTE.match(target), "picture" if mark else "file"
            if not remote and posixpath.normpath(target.partition("#")[0]) not in files:
                mistakes.append(Mistake(f"there is no {what} {shown(target)}", where))
            elif remote and mark:
                hint = "the next reader sees another"
                mistakes.append(Mistake(f"shows a picture from elsewhere: {shown(target)}", where, hint))
        tags = _HTML.findall(_CODE.sub("", line)) if number <= ours else _NOT_IN_WORDS.findall(line)
        for tag in tags:
            what = "HTML" if number <= ours else "HTML, a picture or a reference in its author's words"
            mistakes.append(Mistake(f"holds {what}: {shown(tag)}", where, "a card is Markdown"))
    return mistakes


def read_front_matter(card: str) -> tuple[dict[str, Any] | None, list[Mistake]]:
    """A card's metadata; None, and why, if it has none that is plain YAML."""
    if len(card) > LARGEST_CARD:
        return None, [Mistake(f"has {len(card):,} characters, a card has at most {LARGEST_CARD:,}", CARD)]
    match = FRONT_MATTER.match(card)
    if match is None:
        return None, [Mistake("has no YAML between --- and --- at its beginning", CARD, AGAIN)]
    try:
        refuse_tags(match[1], CARD)
        metadata = plain_value(match[1])
    except PerlError as error:
        return None, [Mistake(mistake.message, mistake.where) for mistake in error.mistakes]
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a number too long for Python
        reason = getattr(error, "problem", None) or type(error).__name__
        return None, [Mistake(f"its front matter is not valid YAML: {reason}", CARD)]
    if not isinstance(metadata, dict):
        return None, [Mistake("its front matter is not a mapping", CARD, AGAIN)]
    return metadata, []


def split_author(card: str) -> tuple[str, list[str]]:
    """A card without its last section, and the lines of that: what its author says."""
    ours, _, words = f"{card}\n".partition(f"\n{AUTHOR}\n")
    return ours.rstrip("\n") + "\n", words.strip().splitlines()


def with_author(card: str, older: str) -> str:
    """A card with the author's words of an older one below it, quoted so that none can be taken for a part of it."""
    words = split_author(older)[1]
    quoted = [line if line.startswith(">") else f"> {line}".rstrip() for line in words]
    return "\n".join([card.rstrip("\n"), "", AUTHOR, "", *quoted]) + "\n" if quoted else card


def shown(text: str, most: int = 80) -> str:
    """Somebody's text on a line of ours: cut, and without characters that a terminal obeys."""
    plain = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."
