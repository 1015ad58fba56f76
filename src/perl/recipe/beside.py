"""A recipe's own modules are found beside it, from whatever folder it is trained.

origins of its rewards -> ``sys.path``
"""

import os
import sys
from pathlib import Path

from perl.recipe.layers import Layer


def find_beside(layer: Layer) -> None:
    """Lets modules of rewards, ``module:function``, be imported from the folder of the file that names them.

    The folder comes last: it hides no installed package, and what lies in the current folder is still taken first.
    """
    rewards = layer.values.get("rewards")
    for name in rewards if isinstance(rewards, dict) else ():
        file = Path(layer.origins.get(("rewards", name), "").rpartition(":")[0])
        folder = os.path.dirname(os.path.abspath(file))
        if ":" in str(name) and file.is_file() and folder not in sys.path:
            sys.path.append(folder)
