"""The card of a run folder, as it would be published, and of a folder of a script's trainer.

Run -> adapter/README.md, and beside it the facts that only the run knows and the files that the card leads to;
what a trainer reports -> FOLDER/README.md, FOLDER/perl_run.json

They lie beside what the run trained, so that the card can be rendered again from the folder, and its links work.
"""

import hashlib
from functools import partial
from pathlib import Path

from perl.errors import PerlError, raise_all
from perl.evaluation.drawing.subject import model_digests
from perl.evaluation.scoring.results import RESULTS, Results, read_results
from perl.hub.card.candidate import RunAdapter, base_of_run, find_candidate, identity_mistakes, owns
from perl.hub.card.card_facts import facts_from_files
from perl.hub.card.facts import RUN_FACTS, RunFacts
from perl.hub.card.form import split_author, with_author
from perl.hub.card.published import CARD, METRICS, PUBLIC_RECIPE, SCORES
from perl.hub.card.render import render_card
from perl.hub.push.package import PushPackage, package_candidate
from perl.policy.saved.adapter import CONFIG
from perl.run.files import write_file, write_text
from perl.run.folder import Run


def run_package(run: Run, repo_id: str | None = None) -> PushPackage:
    """What would be published of a run's final adapter, or of the model that it trained.

    Args:
        run: The run.
        repo_id: Where it will lie on the Hub; None: where the run's recipe says.

    Raises:
        PerlError: The run has no adapter, or another than it trained, or its recipe cannot be read.
    """
    candidate = shown_candidate(run)
    raise_all(PerlError, identity_mistakes(candidate))
    return package_candidate(candidate, repo_id)


def run_card(run: Run, repo_id: str | None = None) -> str:
    """The card in :func:`run_package`, with its arguments and errors."""
    return run_package(run, repo_id).files[CARD].decode()


def write_card(run: Run, repo_id: str | None = None) -> list[tuple[int, str]]:
    """Writes :func:`run_card` beside what the run trained.

    Returns:
        Where somebody has edited the older card above its author's words: its lines that are gone, with their numbers.
    """
    package = run_package(run, repo_id)
    card = package.files[CARD].decode()
    gone = _edited_lines(run, card)
    # With the files that it leads to; one that is no longer published goes.
    for name in (SCORES, PUBLIC_RECIPE, RUN_FACTS, CARD):
        place = run.adapter / name
        if name in package.files:
            place.parent.mkdir(exist_ok=True)
            write_file(place, partial(Path.write_bytes, data=package.files[name]))
        else:
            place.unlink(missing_ok=True)
    run.record(card=_digest(card))
    return gone


def _edited_lines(run: Run, card: str) -> list[tuple[int, str]]:
    """Lines of the card that is there which another one lacks; none if the one that is there is as it was written."""
    if not run.card.is_file():
        return []
    there = run.card.read_text(encoding="utf-8", errors="replace")
    if run.facts.get("card") in (None, _digest(there)):
        return []
    kept = set(card.split("\n"))
    lines = enumerate(split_author(there)[0].split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip() and line not in kept]


def _digest(card: str) -> str:
    """Of a card without its author's words."""
    return hashlib.sha256(split_author(card)[0].rstrip().encode()).hexdigest()


def shown_candidate(run: Run) -> RunAdapter:
    """What a run's card is of: its final adapter, or the model that it trained, which is not one to publish."""
    if run.facts.get("method") != "full":
        return find_candidate(run)
    digests, folder = model_digests(run.adapter), run.path / "eval"
    results: Results | None = read_results(folder) if (folder / RESULTS).is_file() else None
    if results is not None and not owns(results, *digests, base_of_run(run)):
        results = None
    steps = int(run.facts.get("steps", 0))
    return RunAdapter(run, "final", run.adapter, steps, digests[0], folder if results else None, results, digests[1])


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
