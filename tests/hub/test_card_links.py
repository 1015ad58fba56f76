"""What the card of a run links to lies beside it, before anything is pushed."""

import shutil

from perl.hub.card.published import PUBLIC_RECIPE, SCORES
from perl.hub.run_card import write_card
from tests.documents.pages import links
from tests.hub.push_runs import publishable


def inner_links(card):
    return {target for target in links(card) if not target.startswith("https://")}


def test_the_links_of_a_local_card_lead_to_the_files_of_its_run_as_long_as_they_are_published():
    run = publishable()
    write_card(run)
    assert inner_links(run.card) == {SCORES}
    assert all((run.adapter / name).is_file() for name in (SCORES, PUBLIC_RECIPE))
    shutil.rmtree(run.path / "eval")
    write_card(run)
    assert inner_links(run.card) == set()
    assert not (run.adapter / SCORES).exists()
