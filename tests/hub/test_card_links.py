"""What a card links to is there: beside the card of a run, of a checkpoint and of a script, and in a repository."""

import posixpath
import shutil

import pytest

from perl.hub.card.published import PUBLIC_RECIPE, SCORES
from perl.hub.push.publish import push
from perl.hub.run_card import write_card
from tests.documents.pages import links
from tests.hub.push_runs import REPO, files_of, publishable

LINKED = {SCORES}


def inner_links(card):
    return {target for target in links(card) if not target.startswith("https://")}


def test_the_links_of_a_local_card_lead_to_the_files_of_its_run():
    run = publishable()
    write_card(run)
    assert inner_links(run.card) == LINKED
    assert all((run.adapter / name).is_file() for name in (*LINKED, PUBLIC_RECIPE))
    shutil.rmtree(run.path / "eval")  # what is no longer published does not stay beside the card
    write_card(run)
    assert inner_links(run.card) == set()
    assert not (run.adapter / SCORES).exists()


def test_the_links_of_a_pushed_card_lead_to_files_of_its_commit(hub, tmp_path):
    push(publishable(), REPO)
    files = files_of(hub)
    (tmp_path / "card.md").write_bytes(files["README.md"])
    found = inner_links(tmp_path / "card.md")
    assert found == LINKED
    assert {posixpath.normpath(name) for name in found} <= set(files)


@pytest.mark.parametrize("place", ["adapter", "checkpoints/checkpoint-2"])
def test_the_links_of_the_cards_that_a_training_writes_work(place, short_run):
    card = short_run.path / place / "README.md"
    assert [target for target in inner_links(card) if not (card.parent / target).is_file()] == []


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    from perl import train

    settings = ["train.max_steps=2", "eval.limit=4", "eval.k=1"]
    return train("quickstart", settings, str(tmp_path_factory.mktemp("short") / "run"))
