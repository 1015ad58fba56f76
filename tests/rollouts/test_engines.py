"""Engines are told apart by what they can do."""

import json
import re
import sys
from typing import get_args

import pytest
from packaging.version import Version

from perl.errors import MissingExtraError, ModelError
from perl.recipe.rollout_section import ENGINES, OF_TRL, Backend, RolloutSection, best_backend, capabilities
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.vllm.in_process import InProcessEngine
from perl.rollouts.vllm.release import NEWER, OLDEST, TESTED, calls_of
from perl.rollouts.vllm.servers import ServerPool
from perl.sandbox import BASE_FOLDER

CLASSES = {"transformers": TransformersEngine, "vllm": InProcessEngine, "vllm-server": ServerPool}
SERVERS = {"vllm-server": ["http://localhost:8000"]}


def test_every_name_but_auto_has_a_row_and_a_class_that_declares_it_and_auto_has_those_of_transformers():
    assert set(ENGINES) == set(get_args(Backend)) - {"auto"} == set(CLASSES)
    assert {name: row.name for name, row in ENGINES.items()} == {name: name for name in ENGINES}
    assert [name for name, row in ENGINES.items() if CLASSES[name].capabilities is not row] == []
    assert OF_TRL == {"colocate": "vllm", "server": "vllm-server"}  # TRL's two ways to run vLLM
    for backend in get_args(Backend):
        how = RolloutSection(backend=backend, servers=SERVERS.get(backend, []))
        assert how.capabilities is capabilities(backend) is ENGINES.get(backend, ENGINES["transformers"])
        assert how.decided == (backend != "auto")


@pytest.mark.parametrize("backend", sorted(ENGINES))
def test_prefetch_is_taken_by_engines_that_sample_ahead_and_refused_by_the_others(backend):
    given = {"backend": backend, "servers": SERVERS.get(backend, []), "prefetch": 1}
    if ENGINES[backend].samples_ahead:
        assert RolloutSection(**given).prefetch == 1
    else:
        with pytest.raises(ValueError, match="prefetch"):
            RolloutSection(**given)


@pytest.mark.parametrize(
    ("on_gpu", "vllm_installed", "servers", "expected"),
    [
        (True, True, False, "vllm"),
        (True, False, False, "transformers"),
        (False, True, False, "transformers"),
        (False, False, True, "vllm-server"),
        (True, True, True, "vllm-server"),
    ],
)
def test_auto_is_the_servers_else_vllm_on_a_gpu_else_transformers(
    monkeypatch, on_gpu, vllm_installed, servers, expected
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: vllm_installed or None)
    assert best_backend(on_gpu=on_gpu, servers=servers) == expected


def test_without_vllm_the_command_that_installs_it_is_named():
    if "vllm" in sys.modules:
        pytest.skip("this environment has vLLM")
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'vllm{TESTED}'")):
        InProcessEngine(str(BASE_FOLDER), max_lora_rank=8)


def test_what_is_called_of_each_vllm_is_what_that_has(checkout):
    """As the sources of each have it; ``benchmarks/vllm_versions.py`` has trained with them."""
    found = {version: calls_of(version) for version in ("0.28.0", "0.29.0", "0.30.1", "0.31.0", "0.32.0", "0.40")}
    assert [calls.renaming for calls in found.values()] == ["get_unstacked_mapper", *["get_rename_mapper"] * 5]
    assert [calls.releases_cache for calls in found.values()] == [False] * 3 + [True] * 3
    tried = json.loads((checkout / "benchmarks" / "results" / "vllm_versions.json").read_text())["versions"]
    assert {f"{row['ended']}" for version in tried.values() for row in version["ways"].values()} == {"done"}
    assert min(map(Version, tried)) == OLDEST
    assert max(map(Version, tried)) < NEWER


def test_a_rank_that_no_slot_holds_is_refused_before_anything_is_loaded():
    with pytest.raises(ModelError, match=r"rank 513.*at most 512"):
        InProcessEngine(str(BASE_FOLDER), max_lora_rank=513)
