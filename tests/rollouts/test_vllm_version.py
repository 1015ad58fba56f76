"""Which vLLM is taken, which is warned of, which is refused; in the process and on servers."""

import logging
from types import SimpleNamespace

import pytest

import perl.rollouts.vllm.in_process
from perl.errors import PerlError
from perl.rollouts.vllm import version as vllm_version
from perl.rollouts.vllm.version import check_version, explained
from perl.sandbox import BASE_FOLDER

SERVER = "http://localhost:8000"


@pytest.fixture(autouse=True)
def nothing_was_said():
    vllm_version._warn_of.cache_clear()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1+cpu", "0.32.1.dev4+g1234"])
def test_tested_versions_are_taken_in_silence(version, caplog):
    check_version(version, SERVER)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0rc1", "0.33.0.dev9+gabc.cu130", "0.40.1", "1.0"])
def test_newer_versions_are_taken_with_one_line_however_often_they_are_met(version, caplog):
    with caplog.at_level(logging.WARNING, "perl"):
        for port in range(3):
            check_version(version, f"http://localhost:{port}")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"vLLM {version} is newer than the newest tested (>=0.32,<0.33)")
    assert "\n" not in line


@pytest.mark.parametrize("version", ["0.31.9", "0.32.0rc1", "0.9", "dev"])
def test_older_versions_and_those_without_a_number_are_refused_with_what_is_taken(version):
    with pytest.raises(PerlError) as raised:
        check_version(version, SERVER)
    message = f"{SERVER}: vLLM {version} is not supported (install vllm>=0.32; >=0.32,<0.33 is tested)"
    assert str(raised.value) == message


@pytest.mark.parametrize("error", [AttributeError("no manager"), ImportError("no LoRAModel"), TypeError("got seed")])
def test_what_a_newer_version_has_changed_is_said_in_one_line(error):
    said = r"vLLM 0\.40\.0, newer than the newest tested.*install vllm>=0\.32,<0\.33"
    with pytest.raises(PerlError, match=said) as raised, explained("0.40.0"):
        raise error
    assert str(error) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("version", ["0.32.0", ""])
def test_an_error_of_a_tested_version_stays_what_it_is(version):
    with pytest.raises(AttributeError, match="ours"), explained(version):
        raise AttributeError("ours")


def test_an_error_of_the_run_stays_what_it_is_under_a_newer_version():
    with pytest.raises(ValueError, match="ours"), explained("0.40.0"):
        raise ValueError("ours")


def test_a_newer_vllm_in_the_process_whose_inner_parts_moved_ends_in_one_line(monkeypatch, caplog):
    moved = SimpleNamespace(__version__="0.40.0")  # no LLM in it, and no vllm.platforms beside it
    monkeypatch.setattr(perl.rollouts.vllm.in_process, "_vllm", lambda: check_version(moved.__version__) or moved)
    with pytest.raises(PerlError, match=r"vLLM 0\.40\.0, newer than the newest tested, cannot be called") as raised:
        perl.rollouts.vllm.in_process.InProcessEngine(str(BASE_FOLDER), max_lora_rank=8)
    assert "rollout.backend: transformers" in str(raised.value)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
