"""What a model or a data set is called where others read it.

name, path -> name without a path
"""

import re
from pathlib import Path, PurePath

from perl.recipe.sections import is_data_file
from perl.sandbox import PREFIX, is_sandbox
from perl.sandbox.tasks import TASKS

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_FILE_NAME = re.compile(r"\w[\w.+-]{0,200}")


def has_hub_form(name: str) -> bool:
    """Whether a name is ``user/name``: what a published file says of the Hub does not depend on who reads it where."""
    return _HUB_NAME.fullmatch(name) is not None and not is_data_file(name)


def is_data_name(name: str) -> bool:
    """Whether a card can show a data set's name: of the sandbox, ``user/name``, or a file without its folder."""
    if is_sandbox(name):
        return name.removeprefix(PREFIX) in TASKS
    return has_hub_form(name) or (is_data_file(name) and _FILE_NAME.fullmatch(name) is not None)


def shown_file(name: str) -> str:
    """A data file's name as a card can show it: without its folder, with dashes for spaces and marks."""
    return re.sub(r"[^\w.+-]+", "-", PurePath(name).name).lstrip("-.+")


def is_hub_name(name: str) -> bool:
    """Whether a name is ``user/name`` and no folder or file here, which is what libraries look for first."""
    return has_hub_form(name) and not Path(name).exists()


def label(name: str) -> str:
    """A model's or data set's name as others may see it: of a path only the last part."""
    return name if is_hub_name(name) or is_sandbox(name) else PurePath(name).name


def published_label(name: str) -> str:
    """The same of a name in a published file, whatever lies where it is read."""
    return name if has_hub_form(name) or is_sandbox(name) else PurePath(name).name
