"""Every kind of edit of a published adapter is found, or listed as one that cannot be."""

import hashlib
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from perl.errors import PerlError
from perl.evaluation.recounting.files import read_published
from perl.evaluation.recounting.recount import Recount, recount
from perl.hub.card.check import check_card
from perl.hub.card.published import results_in
from perl.hub.cards import find_card, run_package, write_card
from tests.hub.card_runs import make_quantised_run, make_run
from tests.hub.forgeries import FORGERIES, RECIPE, SAMPLES, SCORES, WEIGHTS, Files, value
from tests.hub.push_runs import publishable


@cache
def published(quantised: bool = False) -> Files:
    """Everything that is published of a run, its samples among it."""
    if quantised:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed, there is no quantised base")
    make = make_quantised_run if quantised else make_run
    return dict(run_package(make(Path(mkdtemp()) / "a-run"), "user/adapter").files)


@cache
def counted(quantised: bool) -> Recount:
    """Its scores, counted again, which need not be done for each edit of something else."""
    there = published(quantised)
    return recount(results_in(there), read_published(there[SAMPLES], SAMPLES))


def said(files: Files, quantised: bool = False) -> list[str]:
    same = all(files.get(name) == published(quantised)[name] for name in (SCORES, SAMPLES))
    digest = hashlib.sha256(files[WEIGHTS]).hexdigest() if WEIGHTS in files else None
    found = check_card(files, digest, counted(quantised) if same else None)
    return [str(mistake) for mistake in found.mistakes]


def check_found(name: str) -> list[str]:
    try:
        found = find_card(name)
    except PerlError as error:
        return [str(mistake) for mistake in error.mistakes]
    return [str(mistake) for mistake in check_card(found.files, found.weights_sha256, found.counted).mistakes]


def test_honest_files_are_sound_also_on_a_base_in_4_bits():
    assert said(published()) == []
    assert json.loads(published(quantised=True)["perl_run.json"])["quantization"] == "nf4"
    assert said(published(quantised=True), quantised=True) == []


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda f: f.name)
def test_a_forgery_is_caught_by_a_line_that_names_the_place_or_known_not_to_be(forgery):
    lines = said(forgery.forged(published(forgery.quantised)), forgery.quantised)
    if forgery.named is None:
        assert lines == []
    else:
        assert any(forgery.named in line for line in lines), lines
        assert all("\n" not in line and len(line) < 400 for line in lines)


def test_how_completions_were_asked_is_reported_only_and_no_line_holds_the_hash_that_a_forger_needs():
    hidden = {one.name: one for one in FORGERIES if one.name.startswith("examples left out")}
    whole = hidden["examples left out of results and hash"].forged(published())
    found = check_card(whole, hashlib.sha256(whole[WEIGHTS]).hexdigest())
    assert found.mistakes == ()
    assert any(line.startswith("reported only: ") and "few-shot examples" in line for line in found.lines())
    right = results_in(whole).tasks[0].protocol_hash
    lines = said(hidden["examples left out of the results"].forged(published()))
    assert not any(right in line for line in lines)


def test_a_change_of_whatever_a_recipe_says_is_told():
    for section, key, changed in (("rollout", "repetition_penalty", 3.0), ("train", "save_steps", 7)):
        files = dict(published())
        value(RECIPE, section, key, to=changed)(files)
        (line,) = said(files)
        assert line.startswith(f"{RECIPE}: has SHA-256 "), line


RUN_EDITS = {
    "run.json": ('"seed": 3', '"seed": 7', "seed"),
    "recipe.yaml": ("seed: 3", "seed: 7", "perl_recipe.yaml"),
    "metrics.jsonl": ('"reward": 0.5,', '"reward": 0.9,', "README.md:"),
    "adapter/README.md": ("| optimizer steps | 50 |", "| optimizer steps | 500 |", "README.md:"),
    "adapter/perl_run.json": ('"loss": "dapo"', '"loss": "cispo"', "loss"),
    "adapter/adapter_config.json": ('"lora_alpha": 32.0', '"lora_alpha": 320.0', ""),
    "eval/results.json": ('"majority": 0.8', '"majority": 0.9', "majority"),
    "eval/samples.jsonl": ('"status": "wrong"', '"status": "right"', "verdicts are not those of the texts"),
}


def test_an_edit_of_a_run_folder_is_caught(tmp_path):
    run = publishable(tmp_path / "a-run")
    write_card(run)
    assert check_found(str(run.path)) == []
    for name, (before, after, named) in RUN_EDITS.items():
        file = run.path / name
        whole = file.read_text()
        assert before in whole, name
        file.write_text(whole.replace(before, after, 1))
        lines = check_found(str(run.path))
        assert any(named in line for line in lines), (name, lines)
        file.write_text(whole)
