"""The card of an adapter that lies in a folder of its own, without a run: a script's, a checkpoint's.

what the trainer reports -> FOLDER/README.md, FOLDER/perl_run.json
"""

from pathlib import Path

from perl.hub.card.facts import CURVES, METRICS, facts_from_files
from perl.hub.card.form import CARD
from perl.hub.card.notes import with_notes
from perl.hub.card.render import render_card
from perl.hub.card.run_facts import RUN_FACTS, RunFacts
from perl.policy.saved.adapter import CONFIG
from perl.run.files import write_text


def write_folder_card(folder: Path, facts: RunFacts) -> None:
    """Writes a card and the facts that only the trainer knows, from which and the other files it is rendered again.

    An author's notes on an older card there are kept.

    Args:
        folder: With the adapter, its log and its curves, as far as there are any.
        facts: What the trainer reports.
    """
    written = facts.to_json()
    files = {name: folder / name for name in (CONFIG, METRICS, CURVES) if (folder / name).is_file()}
    card = render_card(facts_from_files({**files, RUN_FACTS: written}))
    old = folder / CARD
    card = with_notes(card, old.read_text(encoding="utf-8", errors="replace") if old.is_file() else "")
    write_text(folder / RUN_FACTS, written.decode())
    write_text(old, card)
