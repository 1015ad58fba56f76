"""Verdicts are named by the code that gave them: no change of it without another version."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import perl.rewards
from perl.rewards.verifier import verifier_version
from perl.rewards.verifier.version import VERSION

# Of the code that decides on verdicts. After a change of it: raise VERSION if any verdict may be another one, so that
# stored verdicts are known to be older, and then put both here.
KNOWN = (1, "3795496c1ebb47cb2a49b942b4ca49192e6fb23d89d6c167e35348499c80d4ac")
FOLDER = Path(perl.rewards.__file__).parent


def test_the_code_is_that_of_its_version():
    files = [FOLDER / "answers.py", *sorted((FOLDER / "verifier").glob("*.py"))]
    assert len(files) > 8
    digest = hashlib.sha256()
    for path in files:
        if path.name != "version.py":
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    assert (VERSION, digest.hexdigest()) == KNOWN


def test_it_names_the_libraries_that_verdicts_depend_on():
    assert verifier_version().startswith(f"{VERSION} (")
    for name in ("math-verify", "latex2sympy2_extended", "sympy"):
        assert f"{name} {version(name)}" in verifier_version()
