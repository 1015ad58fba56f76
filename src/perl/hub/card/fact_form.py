"""What form the facts have that a card takes over as they are: words, plain values, settings that we know.

text of anybody -> the same text, or why it is refused

None can be taken for a score, a heading, a link or a picture.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from pydantic import AfterValidator, Field, JsonValue

from perl.algorithms.critic_settings import CRITIC, CRITIC_ADAPTER, IN_REWARD, PENALTY, WORDS
from perl.algorithms.named import ALGORITHMS
from perl.hub.card.names import has_hub_form
from perl.methods.registry import METHODS
from perl.recipe.sections import MEMORY_WORDS, REFILL_WORDS

_LONGEST_TEXT, _LONGEST_WORD = 500, 200
_HTML = re.compile(r"<[A-Za-z/!?]")
_MARKS = ("%", "±", "](", "`", "**")
_WORD = re.compile(r"\w[\w.+:/-]*")
_NOT_OF_A_WORD = re.compile(r"[^\w.+:/-]+")
_NUMBER = r"[\d.e+-]+"
# Of what :attr:`perl.recipe.sections.PromptsSection.shown` says, with "; " between.
_OF_PROMPTS = (
    rf"{MEMORY_WORDS} \(explore {_NUMBER}, floor {_NUMBER}\)",
    rf"{REFILL_WORDS} \(at most {_NUMBER} x a batch more\)",
    rf"easy first by a column \({_NUMBER} of them at first, all after {_NUMBER} of the training\)",
)
# Names that runs and scripts give to what a trainer was asked for, and the form of their texts.
_OURS = {
    "continues": re.compile(r"\w[\w.+:/@-]*"),
    "continued base loaded as": re.compile(r"[\w-]{1,40}"),
    "base loaded as": re.compile(r"[\w-]{1,40}"),
    "teacher": re.compile(
        r"the base with (?:(?:another adapter|a hint|a system prompt)(?:, )?){1,3}"
        r"; KL over (?:the vocabulary|the \d+ likeliest tokens) x [\d.e+-]+"
    ),
    "teacher adapter": re.compile(r"\w[\w.+:/@-]*"),
    "teacher adapter SHA-256": re.compile(r"[0-9a-f]{64}"),
    "prompts": re.compile("(?:; )?".join(f"(?:{part})?" for part in _OF_PROMPTS)),
    CRITIC: WORDS,
    CRITIC_ADAPTER: re.compile(r"\w[\w.+:/@-]*"),
    PENALTY: re.compile(IN_REWARD),
    "optimizer": re.compile(r"\w+"),
    "trained by": re.compile(r"verl [\w.+-]+, \w+ on \d+ processes"),
    "learning rate": re.compile(r"[\d.e+-]+"),
    "KL coefficient (beta)": re.compile(r"[\d.e+-]+"),
    "completions a prompt": re.compile(r"\d+"),
    "batch": re.compile(
        r"\d+ prompts x \d+ generations = \d+ completions a step = \d+ rows x \d+ passes(?: x \d+ processes)?"
    ),
    "sampling": re.compile(r"temperature [\d.e+-]+, at most \d+ tokens"),
}
_UNBROKEN = re.compile(r"\S+")  # of an adapter's config: names, patterns


def plain_word(text: str) -> str:
    """The nearest word, as names of folders may be anything."""
    return _NOT_OF_A_WORD.sub("-", text).strip("-.+:/")[:_LONGEST_WORD] or "adapter"


def showable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a card can show: of an adapter's config a pattern may hold what looks like a link."""
    found = {}
    for name, value in settings.items():
        try:
            found[name] = _setting(name, value) if name in _setting_names() else value
        except ValueError:
            continue
    return found


def _plain(text: str) -> str:
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"has {len(text):,} characters, at most {_LONGEST_TEXT} are meant")
    if not text.isprintable() or _HTML.search(text):
        raise ValueError("is not plain text of one line")
    return text


def _unmarked(text: str) -> str:
    if any(mark in text for mark in _MARKS):
        raise ValueError("holds a mark of scores, links or code")
    return _plain(text)


def _fact(text: str) -> str:
    if "://" in text or "www." in text:
        raise ValueError("holds a link")
    return _unmarked(text)


def _word(text: str) -> str:
    if len(text) > _LONGEST_WORD or _WORD.fullmatch(text) is None or "://" in text:
        raise ValueError("is not a name: letters, digits and . _ - + : / only")
    return text


def _hub_id(text: str) -> str:
    if not has_hub_form(text):
        raise ValueError("is not user/name")
    return text


def _settings(settings: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name, value in settings.items():
        if name not in _setting_names():
            raise ValueError(f"{name[:_LONGEST_WORD]!r} is not a setting of a run")
        _setting(name, value)
    return settings


def _overridden(settings: dict[str, JsonValue]) -> dict[str, JsonValue]:
    known = {name for row in ALGORITHMS.values() for name in row.sets}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{name[:_LONGEST_WORD]!r} is not a setting of an algorithm")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is non-finite")
    return settings


@functools.cache
def _setting_names() -> frozenset[str]:
    """Every name that a setting can have: ours, a method's, and those of PEFT's configs."""
    of_methods = {name for method in METHODS.values() for name in (*method.settings, *method.options)}
    of_peft = {field.name for config in PEFT_TYPE_TO_CONFIG_MAPPING.values() for field in fields(config)}
    return frozenset({*_OURS, *of_methods, *of_peft})


def _setting(name: str, value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        if _OURS.get(name, _UNBROKEN).fullmatch(value) is None:
            raise ValueError(f"{name} has a malformed value")
        _fact(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is non-finite")
    elif isinstance(value, dict | list):
        if name in _OURS:
            raise ValueError(f"{name} has a malformed value")
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _setting(name, inner)
    return value


Fact = Annotated[str, Field(min_length=1), AfterValidator(_fact)]
"""Plain text of one line without marks or links."""
Link = Annotated[str, Field(min_length=1), AfterValidator(_unmarked)]
"""Likewise, and may be an address."""
Word = Annotated[str, AfterValidator(_word)]
"""A name: of a run, a method, a reward, a version."""
HubId = Annotated[str, AfterValidator(_hub_id)]
Overridden = Annotated[dict[str, bool | int | float | Word | None], AfterValidator(_overridden)]
"""Field of ``train`` that an algorithm's name sets -> what a run has there."""
Settings = Annotated[dict[str, JsonValue], AfterValidator(_settings)]
"""Name -> value of what a run was asked for."""
