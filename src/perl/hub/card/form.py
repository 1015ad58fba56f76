"""Is a card fit for the Hub: front matter that is plain YAML, no placeholders, paths, HTML, or links to nothing?

text, names of files -> mistakes, a line each

A card is text from anywhere: its YAML is read as plain values, and no more of it than a card may have. Whether what it
says is true is for :mod:`perl.hub.card.check`; a card of others, which nothing here can render, is only looked at.
"""

import posixpath
import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from perl.errors import Mistake, PerlError
from perl.hub.card.front_matter import OURS, SANDBOX_TAGS, adapter_tag
from perl.hub.card.names import has_hub_form
from perl.hub.gate.gate import largest
from perl.hub.gate.leaks import ROOTS
from perl.recipe.plain_yaml import plain_value, refuse_tags

CARD = "README.md"
LARGEST_CARD = largest(CARD) or 0
LARGEST_FRONT_MATTER = 200_000
AGAIN = "perl card RUN writes it anew"
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?(?:\n|\Z)", re.DOTALL)
_FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_HTML = re.compile(r"<[A-Za-z/!?][^>\n]*>?")
# What templates leave where nobody knew better.
_PLACEHOLDER = re.compile(r"\[More Information Needed\]|\{\{|\{%|\bTODO\b|\bNone\b|\b[Nn]a[Nn]\b|\bUndefined\b")
_ALWAYS_PLACEHOLDER = re.compile(r"\[More Information Needed\]")
_LOCAL_PATH = re.compile(rf"(?<![\w.:/~-])(?:/(?:{ROOTS})/[^\s`\"')]*|~/[^\s`\"')]+|[A-Z]:\\[^\s`\"')]+|file://\S+)")
_LINK = re.compile(r"(!?)\[[^\]\n]*\]\(\s*<?([^)>\s]+)")
_IMAGE_TAG = re.compile(r"<img\b[^>]*\bsrc\s*=\s*[\"']?([^\"'\s>]+)", re.IGNORECASE)
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
_REQUIRED = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": f"[{OURS}, ...]"}


def card_mistakes(card: str, files: Collection[str], notes: int = 0) -> list[Mistake]:
    """Why a card is not fit for the Hub.

    Args:
        card: ``README.md``.
        files: Paths of all files beside it.
        notes: Line from 1 from which on its author's own words stand, in which nothing is a placeholder; 0: none.
    """
    metadata, mistakes = read_front_matter(card)
    if metadata is None:
        return mistakes
    return [*_metadata_mistakes(metadata), *_placeholders(card, notes), *_text_mistakes(card, files)]


def read_front_matter(card: str) -> tuple[dict[str, Any] | None, list[Mistake]]:
    """A card's metadata; None, and why, if it has none that is plain YAML."""
    if len(card) > LARGEST_CARD:
        return None, [Mistake(f"has {len(card):,} characters, a card has at most {LARGEST_CARD:,}", CARD)]
    match = FRONT_MATTER.match(card)
    if match is None:
        return None, [Mistake("has no YAML between --- and --- at its beginning", CARD, AGAIN)]
    if len(match[1]) > LARGEST_FRONT_MATTER:
        return None, [Mistake(f"its front matter has {len(match[1]):,} characters, more than any needs", CARD)]
    try:
        refuse_tags(match[1], CARD)
        metadata = plain_value(match[1])
    except PerlError as error:
        return None, [Mistake(mistake.message, mistake.where) for mistake in error.mistakes]
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        return None, [Mistake(f"its front matter is not valid YAML: {reason}", CARD)]
    except (RecursionError, ValueError) as error:  # ValueError: a number of more digits than Python reads
        return None, [Mistake(f"its front matter cannot be read: {type(error).__name__}", CARD)]
    if not isinstance(metadata, dict):
        return None, [Mistake("its front matter is not a mapping", CARD, AGAIN)]
    return metadata, []


def _metadata_mistakes(metadata: Mapping[str, Any]) -> list[Mistake]:
    """What the Hub needs in a card's metadata and does not find there."""
    tuned = metadata.get("base_model_relation") == "finetune" or "base_model" not in metadata
    whole = metadata.get("library_name") == "transformers" and tuned
    tags = metadata.get("tags")
    tags = tags if isinstance(tags, list) else []
    found = [_about(key, "is absent", value) for key, value in _REQUIRED.items() if not metadata.get(key)]
    if metadata.get("library_name") not in ("peft", None) and not whole:
        found.append(_about("library_name", f"is {metadata['library_name']!r}, which does not load adapters", "peft"))
    if metadata.get("pipeline_tag") not in ("text-generation", None):
        found.append(_about("pipeline_tag", f"is {metadata['pipeline_tag']!r}", "text-generation"))
    if tags and OURS not in tags:
        found.append(_about("tags", f"lack {OURS}", "by which others find it"))
    if metadata.get("license") == "other" and not (metadata.get("license_name") and metadata.get("license_link")):
        found.append(_about("license", "other needs license_name and license_link"))
    data = metadata.get("datasets", [])
    found += [
        _about("datasets", f"{name!r} is not a name on the Hub", "user/name")
        for name in (data if isinstance(data, list) else [data])
        if not (isinstance(name, str) and has_hub_form(name))
    ]
    return found + _base_mistakes(metadata.get("base_model"), metadata.get("base_model_relation"), tags, whole=whole)


def _base_mistakes(base: object, relation: object, tags: list[Any], *, whole: bool) -> list[Mistake]:
    if base is None and any(tag in tags for tag in SANDBOX_TAGS.values()):
        return []
    if base is None:
        return [_about("base_model", "is absent", "the Hub id of the base; push the base first if it has none")]
    if not (isinstance(base, str) and has_hub_form(base)):
        return [_about("base_model", f"{base!r} is not a name on the Hub", "user/name")]
    if whole:
        return []
    found = [_about("base_model_relation", f"is {relation!r}", "adapter")] if relation != "adapter" else []
    if adapter_tag(base) not in tags:
        found.append(_about("tags", f"lack {adapter_tag(base)}", "by which the Hub finds a base's adapters"))
    return found


def _about(key: str, message: str, hint: str = "") -> Mistake:
    return Mistake(message, f"{CARD}: {key}", hint)


def _placeholders(card: str, notes: int) -> list[Mistake]:
    """What a template left. In code ``None`` is a word of the language, and braces are somebody's template."""
    bare = _FENCES.sub(lambda match: "\n" * match[0].count("\n"), card)
    left = [(number, match[0]) for number, match in _matches(_PLACEHOLDER, bare)]
    left += [(number, match[0]) for number, match in _matches(_ALWAYS_PLACEHOLDER, card)]
    return [
        Mistake(f"a placeholder is left: {text}", f"{CARD}:{number}", "leave out what is unknown")
        for number, text in dict.fromkeys(left)
        if not 0 < notes <= number
    ]


def _text_mistakes(card: str, files: Collection[str]) -> list[Mistake]:
    """Paths of a machine, links to files that are not there, pictures of somebody else's, HTML."""
    found = [
        Mistake(f"a path of somebody's machine: {shown(match[0])}", f"{CARD}:{number}", "name it without the path")
        for number, match in _matches(_LOCAL_PATH, card)
    ]
    bare = _without_code(card)
    links = [(number, "picture" if match[1] else "file", match[2]) for number, match in _matches(_LINK, bare)]
    links += [(number, "picture", match[1]) for number, match in _matches(_IMAGE_TAG, bare)]
    for number, what, target in links:
        where, remote = f"{CARD}:{number}", _REMOTE.match(target)
        if not remote and posixpath.normpath(target.partition("#")[0]) not in files:
            found.append(Mistake(f"there is no {what} {shown(target)}", where))
        elif remote and what == "picture":
            hint = "the next reader sees another"
            found.append(Mistake(f"shows a picture from elsewhere: {shown(target)}", where, hint))
    return found + [
        Mistake(f"holds HTML: {shown(match[0])}", f"{CARD}:{number}", "a card is Markdown")
        for number, match in _matches(_HTML, _CODE.sub("", bare))
    ]


def _without_code(card: str) -> str:
    """The card without its front matter and fenced code; every line keeps its number."""
    body = FRONT_MATTER.sub(lambda match: "\n" * match[0].count("\n"), card)
    return _FENCES.sub(lambda match: "\n" * match[0].count("\n"), body)


def shown(text: str, most: int = 80) -> str:
    """Somebody's text on a line of ours: cut, and without characters that a terminal obeys."""
    plain = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def _matches(pattern: re.Pattern[str], text: str) -> list[tuple[int, re.Match[str]]]:
    """Number of a line from 1, and match."""
    return [(number, m) for number, line in enumerate(text.split("\n"), 1) for m in pattern.finditer(line)]
