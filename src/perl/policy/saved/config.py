"""An adapter's ``adapter_config.json``, read as untrusted data.

file -> PeftConfig

What names code, asks for absurd sizes or cannot be shown to a person is refused with ``ValueError`` and one line.
"""

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from perl.errors import ModelError, warn
from perl.policy.saved.download import CONFIG, LARGEST_CONFIG
from perl.sandbox import is_sandbox

MOST_ENTRIES = 4_000
"""Of a list or mapping; PEFT shortens lists of modules when it saves them."""
# Keys that make some library import or run what they name.
_NAMES_CODE = ("auto_map", "trust_remote_code", "custom_pipeline", "custom_generate", "_target_")
# Libraries of which PEFT may be told to import a module.
_KNOWN_LIBRARIES = re.compile(r"(transformers|peft)(\.\w+)*", re.ASCII)
# Sizes that some side of a tensor in the file must have.
_RANKS = ("r", "init_r", "target_r", "num_vectors", "num_virtual_tokens")
_USUAL_RANK = 4096
_NAMES_OF_MODULES = ("target_modules", "exclude_modules", "modules_to_save", "feedforward_modules", "layers_pattern")
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_LONGEST_NAME = 250


def read_config(folder: Path) -> PeftConfig:
    """Reads the config of an adapter.

    Raises:
        ValueError: It is malformed, or nothing should be built from it.
        KeyError: PEFT has no such type; its name.
        TypeError: PEFT refuses an argument.
    """
    path = folder / CONFIG
    size = path.stat().st_size
    if size > LARGEST_CONFIG:
        raise ValueError(f"{CONFIG} has {size:,} bytes, at most {LARGEST_CONFIG:,} are read")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        _check_values(facts)
    except RecursionError:
        raise ValueError(f"{CONFIG} is nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{CONFIG} is not a mapping")
    if not facts.get("peft_type"):
        raise ValueError(f"{CONFIG} names no peft_type")
    check_facts(facts)
    for name in ("base_model_name_or_path", "revision"):
        said = facts.get(name)
        if not isinstance(said, str | None) or any(len(part) > _LONGEST_NAME for part in (said or "").split("/")):
            raise ValueError(f"{CONFIG}: {name} is no name")
    kind = facts["peft_type"]
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise KeyError(str(kind)[:60])
    # What this PEFT does not know it ignores; where that is set to something, the adapter may be another one.
    fields = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])} | {"runtime_config"}
    unknown = sorted(name for name, value in facts.items() if name not in fields and value not in (None, False, [], {}))
    if unknown:
        shown = ", ".join(name[:40] for name in unknown[:5])
        warn("PRL330", "%s: this version of PEFT does not know %s and ignores it", CONFIG, shown)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")  # said above
        warnings.filterwarnings("ignore", ".*runtime_config")
        warnings.filterwarnings("ignore", "Specified to not save")  # which bases are drawn again is in the config
        try:
            return PeftConfig.from_pretrained(str(folder))
        except (AttributeError, LookupError, ArithmeticError, RuntimeError) as error:  # of values it does not look at
            raise ValueError(f"PEFT refuses {CONFIG}: {type(error).__name__}: {error}") from error


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuses what no adapter may say, one that is read and one that is attached: it could not be read again.

    Raises:
        ValueError: It is of the wrong kind, names code, or makes another base.
    """
    for name in _NAMES_OF_MODULES:
        value = facts.get(name)
        names = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(one, str) for one in names):
            raise ValueError(f"{CONFIG}: {name} is neither a name nor a list of names")
    for name in _RANKS:
        if isinstance(facts.get(name), bool) or not isinstance(facts.get(name), int | None):
            raise ValueError(f"{CONFIG}: {name} is no whole number")
    for name, value in facts.items():
        if name.endswith("_pattern") and name not in _NAMES_OF_MODULES and not isinstance(value, dict | None):
            raise ValueError(f"{CONFIG}: {name} is not a mapping")
    mapping = facts.get("auto_mapping") or {}
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping  # which PEFT imports
    if library and not (isinstance(library, str) and _KNOWN_LIBRARIES.fullmatch(library)):
        raise ValueError(f"{CONFIG}: auto_mapping names {library!r:.60}, which is no part of transformers")
    if facts.get("megatron_config") or facts.get("megatron_core") not in (None, "megatron.core"):
        raise ValueError(f"{CONFIG}: megatron_core would import a module that it names; such an adapter is not loaded")
    if facts.get("layer_replication"):
        raise ValueError(f"{CONFIG}: layer_replication makes another base, with layers repeated")


def check_ranks(config: PeftConfig, largest_side: int) -> None:
    """Refuses a rank that no tensor in the file has, before an adapter of that size is built.

    Args:
        config: The adapter's.
        largest_side: Of any tensor in its file.

    Raises:
        ValueError: The config asks for more.
    """
    asked = {name: getattr(config, name, None) for name in _RANKS}
    asked |= {f"rank_pattern.{name}": rank for name, rank in (getattr(config, "rank_pattern", None) or {}).items()}
    for name, rank in asked.items():
        if isinstance(rank, int) and not 0 <= rank <= max(_USUAL_RANK, largest_side):
            raise ValueError(f"{CONFIG} asks for {name} {rank:,}, the largest side of a tensor is {largest_side:,}")


def is_name_of_a_base(name: str) -> bool:
    """Whether an untrusted name of a base can be looked up: on the Hub or in the sandbox, no path and no address."""
    return is_sandbox(name) or (_ON_THE_HUB.fullmatch(name) is not None and ".." not in name)


def _check_values(value: Any, key: str = "") -> None:  # noqa: ANN401 (JSON)
    """Refuses what no document may hold, and what is inside of it."""
    if not key.isprintable() or (isinstance(value, str) and not value.isprintable()):
        raise ValueError(f"{CONFIG}: {key!r:.60} holds control characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{CONFIG}: {key} is {value}, which is no number")
    if isinstance(value, dict | list) and len(value) > MOST_ENTRIES:
        raise ValueError(f"{CONFIG}: {key:.60} has {len(value):,} entries, at most {MOST_ENTRIES:,} are read")
    if key.rpartition(".")[2] in _NAMES_CODE and value:
        raise ValueError(f"{CONFIG}: {key} would run code that it names; such an adapter is not loaded")
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        _check_values(inner, f"{key}.{name}" if key else str(name))


def check_patterns(config: PeftConfig, where: str) -> None:
    """Refuses malformed patterns, which PEFT would raise a traceback for.

    Args:
        config: The adapter's.
        where: Where the adapter is named.

    Raises:
        ModelError: With the first such pattern.
    """
    for text in _patterns(config):
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{text!r:.80} in its config is no pattern: {error}", where) from None


def _patterns(config: PeftConfig) -> Iterator[str]:
    for name in ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern", "modules_to_save"):
        value = getattr(config, name, None) or ()
        if isinstance(value, str):
            yield value
        elif name in ("layers_pattern", "modules_to_save"):
            yield from map(str, value)
    for name, value in vars(config).items():
        if name.endswith("_pattern") and isinstance(value, dict):
            yield from value
