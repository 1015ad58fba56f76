"""An adapter that the tests of evaluations score, made once."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """The folder of a LoRA on the sandbox's base; tests that change it copy it first."""
    from tests.saved_adapters import save_adapter  # here: the quick tests need not import what it takes

    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(saved) -> Path:
    """The same, where an adapter is what is meant."""
    return saved
