"""The methods of TRL and transformers that are overridden are the ones that the overrides were written against.

``docs/trainer.md`` lists them: ours, why, where theirs is, and the begin of the SHA-256 of their source.
``python -m tests.trainer.test_upstream`` prints the rows as they are now.
"""

import hashlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from perl import PeftGRPOTrainer
from tests.conftest import CHECKOUT

ROW = re.compile(r"^\| `(?:GRPOTrainer|_BaseTrainer|Trainer)\.(\w+)` \|.*\|$", flags=re.MULTILINE)


def overridden() -> dict[str, Callable[..., Any]]:
    """Their methods, by name."""
    return {
        name: inspect.unwrap(getattr(GRPOTrainer, name))
        for name, ours in vars(PeftGRPOTrainer).items()
        if callable(ours) and hasattr(GRPOTrainer, name)
    }


def library(theirs: Callable[..., Any]) -> str:
    name = theirs.__module__.partition(".")[0]
    return f"{'TRL' if name == 'trl' else name} {importlib.metadata.version(name)}"


def digest(theirs: Callable[..., Any]) -> str:
    return hashlib.sha256(inspect.getsource(theirs).encode()).hexdigest()[:16]


def row(name: str) -> str:
    """Of the document's table."""
    theirs = overridden()[name]
    file, line = theirs.__module__.replace(".", "/"), inspect.getsourcelines(theirs)[1]
    why = (inspect.getdoc(vars(PeftGRPOTrainer)[name]) or "").partition("\n")[0].replace("``", "`").replace("|", "/")
    return f"| `{theirs.__qualname__}` | {why} | {file}.py:{line} | `{digest(theirs)}` |"


def documented() -> dict[str, str]:
    text = Path(CHECKOUT, "docs", "trainer.md").read_text()
    return {found[1]: found[0] for found in ROW.finditer(text)}


def test_the_document_lists_every_override():
    assert sorted(documented()) == sorted(overridden())


def test_what_is_overridden_is_what_it_was():
    for name, written in documented().items():
        theirs = overridden()[name]
        changed = f"{library(theirs)}'s {theirs.__qualname__} changed: compare the override with it, then renew its row"
        assert f"`{digest(theirs)}`" in written, f"{changed} in docs/trainer.md:\n{row(name)}"
        assert written == row(name), f"docs/trainer.md has to say:\n{row(name)}"


if __name__ == "__main__":
    print("\n".join(row(name) for name in overridden()))  # noqa: T201
