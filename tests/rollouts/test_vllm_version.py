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


TESTED = ("0.32.0", "0.32.7", "0.32.1+cpu", "0.32.1.dev4+g1234")
NEWER = ("0.33.0", "0.33.0rc1", "0.33.0.dev9+gabc.cu130", "0.40.1", "1.0")
OLDER = ("0.31.9", "0.32.0rc1", "0.9", "dev")  # the last has no number


def test_tested_versions_are_taken_in_silence_newer_ones_with_one_line_and_older_ones_refused(caplog):
    for version in TESTED:
        check_version(version, SERVER)
    assert not caplog.records
    for version in NEWER:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "perl"):
            for port in range(3):  # however often it is met
                check_version(version, f"http://localhost:{port}")
        (line,) = caplog.messages
        assert f"vLLM {version} is newer than the newest tested (>=0.32,<0.33)" in line
        assert "\n" not in line
    for version in OLDER:
        with pytest.raises(PerlError) as raised:
            check_version(version, SERVER)
        words = (SERVER, f"vLLM {version} is not supported", "install vllm>=0.32", ">=0.32,<0.33 is tested")
        assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("error", [AttributeError("no manager"), ImportError("no LoRAModel"), TypeError("got seed")])
def test_what_a_newer_version_has_changed_is_said_in_one_line(error):
    said = r"vLLM 0\.40\.0, newer than the newest tested.*install vllm>=0\.32,<0\.33"
    with pytest.raises(PerlError, match=said) as raised, explained("0.40.0"):
        raise error
    assert str(error) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("version", "kind"), [("0.32.0", AttributeError), ("", AttributeError), ("0.40.0", ValueError)]
)
def test_an_error_of_a_tested_version_or_of_the_run_itself_stays_what_it_is(version, kind):
    with pytest.raises(kind, match="ours"), explained(version):
        raise kind("ours")


def test_a_newer_vllm_in_the_process_whose_inner_parts_moved_ends_in_one_line(monkeypatch, caplog):
    moved = SimpleNamespace(__version__="0.40.0")  # no LLM in it, and no vllm.platforms beside it
    monkeypatch.setattr(perl.rollouts.vllm.in_process, "_vllm", lambda: check_version(moved.__version__) or moved)
    with pytest.raises(PerlError, match=r"vLLM 0\.40\.0, newer than the newest tested, cannot be called") as raised:
        perl.rollouts.vllm.in_process.InProcessEngine(str(BASE_FOLDER), max_lora_rank=8)
    assert "rollout.backend: transformers" in str(raised.value)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
