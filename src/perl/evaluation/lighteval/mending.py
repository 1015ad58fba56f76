"""Where lighteval 0.13 does not work beside the libraries that are tested here, and what lets it.

lighteval -> the same, which starts without a network and beside xxhash 4

Each part says what it is for; a lighteval that works anyway is not hurt by it.
"""

import importlib
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from lighteval.logging import info_loggers
from lighteval.tasks.registry import Registry

logger = logging.getLogger("perl")


class NoCache:
    """Stands where lighteval keeps generations, which it would find again by a model's name alone."""

    def _init_registry(self, registry: Registry) -> None:
        """The pipeline calls this."""


def let_xxhash_take_text() -> None:
    """From version 4 on xxhash refuses the text that lighteval hashes."""

    def xxh64(content: str | bytes = b"") -> Any:  # noqa: ANN401 (a hash object of a C module)
        return xxhash.xxh64(content.encode() if isinstance(content, str) else content)

    info_loggers.xxhash = types.SimpleNamespace(xxh64=xxh64)


def leave_out_broken_tasks() -> None:
    """Lets lighteval start although some of its own task modules cannot be imported: it imports all at each start.

    One downloads a file as it is imported, two call huggingface_hub as before its version 2.
    """
    Registry._load_from_files = staticmethod(
        lambda files, module_prefix: _configs([f"{module_prefix}.{file.stem}" for file in files])
    )
    Registry._load_from_subdirs = staticmethod(
        lambda subdirs: _configs([f"lighteval.tasks.tasks.{Path(folder).name}.main" for folder in subdirs])
    )


def _configs(modules: list[str]) -> dict[str, Any]:
    extract: Callable[[types.ModuleType], dict[str, Any]] = Registry._extract_configs
    found: dict[str, Any] = {}
    for name in modules:
        try:
            found |= extract(importlib.import_module(name))
        except (ImportError, OSError, TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
            logger.info("%s is left out: %s: %s", name, type(error).__name__, str(error)[:100])
    return found
