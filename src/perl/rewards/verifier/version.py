"""Which verifier gave a verdict.

-> ``1 (math-verify 0.5.2, ...)``
"""

import functools
from importlib.metadata import version

VERSION = 5
"""Raised with every change of the code after which any verdict may be another one."""
# Libraries on which verdicts depend.
_LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")


@functools.cache
def verifier_version() -> str:
    """Our version and those of the libraries that verdicts depend on; verdicts of one version are the same."""
    return f"{VERSION} ({', '.join(f'{name} {version(name)}' for name in _LIBRARIES)})"
