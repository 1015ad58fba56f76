"""The sizes of the recipes' bases, which ship with the package for where the Hub cannot be reached.

name on the Hub -> config, of what a run costs depends on alone
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

BASES: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Name on the Hub -> model type and what differs from its defaults."""


def shipped_config(name: str) -> PreTrainedConfig:
    """The config of one of the :data:`BASES`."""
    config: PreTrainedConfig = AutoConfig.for_model(dtype="bfloat16", **BASES[name])
    return config
