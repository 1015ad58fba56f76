"""The one name of a policy: a SHA-256 over everything that defines it.

digest of the base, digest of the weights, config -> 64 hexadecimal digits

Score keys, results, cards, the zoo and what is resumed call a policy by this name. It needs texts and digests only, so
that files on the Hub are named like files here.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perl.run.files import parse_json, sha256_of

# Keys of a config that do not change what a policy answers, and why. Whatever is not listed here counts.
NOT_OF_THE_ADAPTER: Mapping[str, str] = MappingProxyType(
    {
        "base_model_name_or_path": "the base is named by the digest of its weights",
        "revision": "likewise",
        "inference_mode": "whether the adapter's parameters ask for a gradient",
        "auto_mapping": "which class opens it where the caller names none",
        "peft_version": "which version of PEFT wrote the file",
        "runtime_config": "how one process loads it; never saved",
    }
)
NOT_OF_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "_name_or_path": "where it was loaded from; its weights are named by their digest",
        "_commit_hash": "likewise",
        "transformers_version": "which version of transformers wrote the file",
        "use_cache": "whether keys and values are kept between tokens",
        "output_attentions": "what a pass returns beside its answer",
        "output_hidden_states": "likewise",
        "return_dict": "the form of what a pass returns",
        "bos_token_id": "prompts are tokens already",
        "eos_token_id": "which tokens end a completion is part of how it is asked",
        "pad_token_id": "what fills a batch is masked",
    }
)


def policy_name(base_sha256: str, weights_sha256: str | None = None, config_sha256: str | None = None) -> str:
    """The name of a policy.

    Args:
        base_sha256: Fingerprint of the base's weights.
        weights_sha256: Of the weights of what was trained on it: an adapter's file, or :func:`weights_digest` of a
            whole model; None: the base alone.
        config_sha256: From :func:`adapter_config_digest`, or :func:`model_config_digest` of a whole model.
    """
    return _digest({"base": base_sha256, "weights": weights_sha256, "config": config_sha256})


def adapter_config_digest(config: str | bytes) -> str:
    """SHA-256 of what an ``adapter_config.json`` says of the policy, however it is written down.

    Args:
        config: The file's text.

    Raises:
        ValueError: It is not a mapping of plain values.
    """
    return _config_digest(config, NOT_OF_THE_ADAPTER)


def model_config_digest(config: str | bytes | Mapping[str, Any]) -> str:
    """As :func:`adapter_config_digest`, of a whole model's ``config.json``.

    Raises:
        ValueError: It is not a mapping of plain values.
    """
    return _config_digest(config, NOT_OF_THE_MODEL)


def adapter_policy_name(config: str | bytes, weights_sha256: str, base_sha256: str) -> str:
    """The name of an adapter on a base, from files that may lie anywhere.

    Args:
        config: The text of its ``adapter_config.json``.
        weights_sha256: Of its weights' file.
        base_sha256: Fingerprint of the base.

    Raises:
        ValueError: The config is not a mapping of plain values.
    """
    return policy_name(base_sha256, weights_sha256, adapter_config_digest(config))


def weights_digest(folder: Path) -> str:
    """SHA-256 of a whole model's weights: of their file, or of the names and digests of all the files they are cut in.

    Raises:
        OSError: There are none, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no weights in {folder.name}")
    digests = {path.name: sha256_of(path) for path in files}
    return next(iter(digests.values())) if len(digests) == 1 else _digest(digests)


def _config_digest(config: str | bytes | Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    facts = parse_json(config) if isinstance(config, str | bytes) else dict(config)
    if not isinstance(facts, dict):
        raise ValueError("it is not a mapping")
    return _digest({key: _plain(value) for key, value in facts.items() if key not in left_out})


def _plain(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """The same value however it was written: 16.0 is 16."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
