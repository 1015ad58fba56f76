"""A policy's name changes with everything that changes its answers, and with nothing else."""

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from peft import LoraConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from perl.policy.name import (
    NOT_OF_THE_ADAPTER,
    adapter_config_digest,
    adapter_policy_name,
    model_config_digest,
    policy_name,
    weights_digest,
)

BASE, WEIGHTS = "b" * 64, "a" * 64
CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], base_model_name_or_path="user/base").to_dict()
CONFIG = json.loads(json.dumps(CONFIG, default=list))


def name(**changes) -> str:
    return adapter_policy_name(json.dumps({**CONFIG, **changes}), WEIGHTS, BASE)


def test_it_is_the_digest_of_base_weights_and_config_by_hand():
    kept = {key: value for key, value in CONFIG.items() if key not in NOT_OF_THE_ADAPTER}
    kept = {key: int(v) if isinstance(v, float) and v == int(v) else v for key, v in kept.items()}

    def digest(facts):
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    assert name() == digest({"base": BASE, "config": digest(kept), "weights": WEIGHTS})
    assert policy_name(BASE) == digest({"base": BASE, "config": None, "weights": None})
    assert re.fullmatch("[0-9a-f]{64}", name())


CHANGES_ANSWERS = (
    {"lora_alpha": 16},
    {"use_rslora": True},
    {"use_dora": True},
    {"rank_pattern": {"q_proj": 2}},
    {"alpha_pattern": {"q_proj": 2}},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": "q_proj"},
    {"r": 8},
    {"fan_in_fan_out": True},
    {"layers_to_transform": [0]},
    {"init_lora_weights": "pissa"},
    {"peft_type": "ADALORA"},
    {"a_key_of_tomorrow": None},
)
SAYS_WHERE_OR_WHO = (
    {"base_model_name_or_path": "/a/folder"},
    {"revision": "abc"},
    {"inference_mode": False},
    {"peft_version": "9.9"},
    {"auto_mapping": {"base_model_class": "X", "parent_library": "transformers"}},
    {"lora_alpha": 8.0},
)


def test_whatever_may_change_an_answer_changes_the_name_and_nothing_else():
    """Of any type of PEFT only keys that were decided on are left out."""
    assert [change for change in CHANGES_ANSWERS if name(**change) == name()] == []
    assert [change for change in SAYS_WHERE_OR_WHO if name(**change) != name()] == []
    turned = dict(reversed(CONFIG.items()))
    assert adapter_config_digest(json.dumps(turned, indent=4)) == adapter_config_digest(json.dumps(CONFIG).encode())
    text = json.dumps(CONFIG)
    assert len({name(), adapter_policy_name(text, "c" * 64, BASE), adapter_policy_name(text, WEIGHTS, "c" * 64)}) == 3
    every = {field.name for kind in PEFT_TYPE_TO_CONFIG_MAPPING.values() for field in fields(kind)}
    assert NOT_OF_THE_ADAPTER.keys() - {"runtime_config"} <= every
    digests = {key: [adapter_config_digest(json.dumps({key: value})) for value in ("one", "other")] for key in every}
    assert {key for key, (one, other) in digests.items() if one == other} == every & NOT_OF_THE_ADAPTER.keys()


def test_what_is_no_config_is_refused_in_one_line():
    for text in ("", "{", "[]", "3", '{"a": NaN}', '{"a": 1e999}', "[" * 10_000, b"\xff", "null"):
        with pytest.raises(ValueError, match=r"\w") as caught:
            adapter_config_digest(text)
        assert len(str(caught.value).splitlines()) == 1, text[:20]


def test_a_model_in_one_file_is_named_by_it_and_one_in_many_by_all(tmp_path: Path):
    with pytest.raises(OSError, match="no weights"):
        weights_digest(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"one")
    alone = weights_digest(tmp_path)
    assert alone == hashlib.sha256(b"one").hexdigest()
    second = tmp_path / "model-00002-of-00002.safetensors"
    found = set()
    for content in (b"two", b"three"):
        second.write_bytes(content)
        found.add(weights_digest(tmp_path))
    second.rename(tmp_path / "model-00003-of-00003.safetensors")
    found.add(weights_digest(tmp_path))
    assert len(found | {alone}) == 4


def test_the_architecture_of_a_model_counts_and_where_it_lay_does_not():
    config = {"hidden_size": 64, "rope_theta": 10000.0, "_name_or_path": "x", "transformers_version": "5"}
    same = {**config, "_name_or_path": "y", "transformers_version": "6", "rope_theta": 10000}
    assert model_config_digest(config) == model_config_digest(json.dumps(same))
    assert model_config_digest(config) != model_config_digest({**config, "rope_theta": 500000.0})
