"""What the tests of evaluations share: an adapter that is made once, and what was said."""

import logging
from collections.abc import Callable
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


@pytest.fixture
def no_model(monkeypatch) -> None:
    """No weights are loaded from here on."""

    def refuse(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("perl.evaluation.drawing.policies.load_base", refuse)


@pytest.fixture
def said(caplog) -> Callable[[], list[str]]:
    """What the evaluations so far said."""
    caplog.set_level(logging.INFO, logger="perl")
    return lambda: [record.getMessage() for record in caplog.records]
