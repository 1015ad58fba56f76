"""Settings as Hydra's command line takes them.

key, value -> ``key=value``
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perl.errors import RecipeError

# What Hydra reads as text without quotes and as nothing else.
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_WORDS = {"true", "false", "null", "none", "yes", "no", "on", "off", "nan", "inf"}
FOLDER = "@FOLDER@"
"""Stands for the job's folder in its overrides; run.sh puts the path in its place."""


def override(key: str, value: Any) -> str:  # noqa: ANN401 (whatever a setting is)
    """One override.

    Args:
        key: As verl's files name it; ``+key`` where they do not have it.
        value: Text, number, truth, None, or lists and mappings of these.

    Raises:
        RecipeError: It is of more than one line, which neither a job's file nor Hydra can hold.
    """
    line = f"{key}={_shown(value)}"
    if len(line.splitlines()) > 1:
        raise RecipeError("a value of several lines cannot go to verl", key.lstrip("+~"), "write it in one line")
    return line


def _shown(value: Any) -> str:  # noqa: ANN401
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_shown(str(key))}:{_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _quoted(value)
    if isinstance(value, Sequence):
        return f"[{','.join(map(_shown, value))}]"
    raise TypeError(f"{value!r:.40} is no value of an override")


def _quoted(text: str) -> str:
    """In quotes; backslashes count before a quote only, and a reference to another key would be resolved."""
    escaped = re.sub(r"(\\*)'", lambda found: found.group(1) * 2 + "\\'", text)
    escaped = re.sub(r"(\\+)$", lambda found: found.group(1) * 2, escaped)
    return "'" + escaped.replace("${", "\\${") + "'"
