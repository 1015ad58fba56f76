"""Every edit that somebody may make to a published adapter is found, or listed with the reason why it cannot be."""

import hashlib
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from perl.hub.card_check import check_card
from perl.hub.run_card import run_package
from tests.hub.card_runs import make_run
from tests.hub.forgeries import FORGERIES, WEIGHTS, Files


@cache
def published() -> Files:
    """Everything that is published of a run, its samples among it."""
    return dict(run_package(make_run(Path(mkdtemp()) / "a-run"), "user/adapter").contents())


def said(files: Files) -> list[str]:
    return [str(problem) for problem in check_card(files, hashlib.sha256(files[WEIGHTS]).hexdigest()).problems]


def test_there_are_many_and_the_files_themselves_are_sound():
    assert len(FORGERIES) >= 40
    assert said(published()) == []
    assert len({forgery.name for forgery in FORGERIES}) == len(FORGERIES)


@pytest.mark.parametrize("forgery", [f for f in FORGERIES if f.named], ids=lambda f: f.name)
def test_a_forgery_is_caught_by_a_line_that_names_the_place(forgery):
    lines = said(forgery.forged(published()))
    assert any(forgery.named in line for line in lines), lines
    assert all("\n" not in line and len(line) < 400 for line in lines)


@pytest.mark.parametrize("forgery", [f for f in FORGERIES if not f.named], ids=lambda f: f.name)
def test_what_cannot_be_caught_has_a_reason(forgery):
    assert said(forgery.forged(published())) == []
    assert forgery.reason
