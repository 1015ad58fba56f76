"""Every edit that somebody may make to a published adapter is found, or listed with the reason why it cannot be."""

import hashlib
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from perl.errors import PerlError
from perl.evaluation.recounting.published_samples import read_published
from perl.evaluation.recounting.recount import Recount, recount
from perl.hub.card.check import check_card
from perl.hub.card.facts import results_in
from perl.hub.found_card import find_card
from perl.hub.run_card import run_package, write_card
from tests.hub.card_runs import make_run
from tests.hub.forgeries import FORGERIES, SAMPLES, SCORES, WEIGHTS, Files


@cache
def published() -> Files:
    """Everything that is published of a run, its samples among it."""
    return dict(run_package(make_run(Path(mkdtemp()) / "a-run"), "user/adapter").files)


@cache
def counted() -> Recount:
    """Its scores, counted again, which need not be done for each edit of something else."""
    return recount(results_in(published()), read_published(published()[SAMPLES], SAMPLES))


def said(files: Files) -> list[str]:
    same = all(files.get(name) == published()[name] for name in (SCORES, SAMPLES))
    digest = hashlib.sha256(files[WEIGHTS]).hexdigest() if WEIGHTS in files else None
    return [str(problem) for problem in check_card(files, digest, counted() if same else None).problems]


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


RUN_EDITS = {
    "run.json": ('"seed": 3', '"seed": 7', "seed"),
    "recipe.yaml": ("seed: 3", "seed: 7", "perl_run.json: seed"),
    "metrics.jsonl": ('"reward": 0.5,', '"reward": 0.9,', "README.md:"),
    "adapter/README.md": ("| optimizer steps | 50 |", "| optimizer steps | 500 |", "README.md:"),
    "adapter/perl_run.json": ('"loss": "dapo"', '"loss": "cispo"', "loss"),
    "adapter/adapter_config.json": ('"lora_alpha": 32.0', '"lora_alpha": 320.0', ""),
    "eval/results.json": ('"majority": 0.8', '"majority": 0.9', "majority"),
    "eval/samples.jsonl": ('"status": "wrong"', '"status": "right"', "verdicts are not those of the texts"),
}


@pytest.mark.parametrize("name", RUN_EDITS)
def test_an_edit_of_a_run_folder_is_caught(name, tmp_path):
    run = make_run(tmp_path / "a-run")
    write_card(run)
    assert check_found(str(run.path)) == []
    before, after, named = RUN_EDITS[name]
    file = run.path / name
    text = file.read_text()
    assert before in text, text[:2000]
    file.write_text(text.replace(before, after, 1))
    lines = check_found(str(run.path))
    assert lines
    assert any(named in line for line in lines), lines


def check_found(name: str) -> list[str]:
    try:
        found = find_card(name)
    except PerlError as error:
        return [str(problem) for problem in error.mistakes]
    return [str(problem) for problem in check_card(found.files, found.weights_sha256, found.counted).problems]
