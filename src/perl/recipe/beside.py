"""A recipe's own modules are found beside it, from whatever folder it is trained.

origins of its rewards -> ``sys.path``
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from perl.recipe.layers import Layer


def find_beside(layer: Layer) -> None:
    """Lets modules of rewards, ``module:function``, be imported from the folder of the file that names them.

    The folder comes last: it hides no installed package, and what lies in the current folder is still taken first.
    """
    find_in(folders_beside(layer))


def folders_beside(layer: Layer) -> list[str]:
    """The folders of the files that name the rewards, each once."""
    rewards = layer.values.get("rewards")
    found = []
    for name in rewards if isinstance(rewards, dict) else ():
        file = Path(layer.origins.get(("rewards", name), "").rpartition(":")[0])
        if ":" in str(name) and file.is_file():
            found.append(os.path.dirname(os.path.abspath(file)))
    return list(dict.fromkeys(found))


def find_in(folders: Sequence[str]) -> None:
    """Lets modules be imported from folders, after what can be imported already."""
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)
