"""The card of an adapter that lies in a folder of its own, without a run: a script's, a checkpoint's.

what the trainer reports -> FOLDER/README.md, FOLDER/perl_run.json
"""

from pathlib import Path

from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.facts import RUN_FACTS, RunFacts
from perl.hub.card.form import with_author
from perl.hub.card.published import CARD, METRICS
from perl.hub.card.render import render_card
from perl.policy.saved.adapter import CONFIG
from perl.run.files import write_text


def write_folder_card(folder: Path, facts: RunFacts) -> None:
    """Writes a card and the facts that only the trainer knows, from which and the other files it is rendered again.

    What its author says on an older card there is kept.

    Args:
        folder: With the adapter and its log, as far as there is one.
        facts: What the trainer reports.
    """
    written = facts.to_json()
    files = {name: folder / name for name in (CONFIG, METRICS) if (folder / name).is_file()}
    card = render_card(facts_from_files({**files, RUN_FACTS: written}))
    old = folder / CARD
    card = with_author(card, old.read_text(encoding="utf-8", errors="replace") if old.is_file() else "")
    write_text(folder / RUN_FACTS, written.decode())
    write_text(old, card)
