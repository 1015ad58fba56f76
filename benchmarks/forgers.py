"""What somebody may do to a published adapter to make it look better, and the line that catches it.

Run as ``python benchmarks/forgers.py``. A run whose scores stand on samples is pushed to a Hub on this machine; each
edit of ``tests/hub/forgeries.py`` is committed there, in a repository of its own, and ``perl card --check`` looks at
it. Edits that only the header of the weights gives away are checked in a folder: weights that the Hub keeps as a large
file are not downloaded. Prints a table of edit and first line that names it, or the reason why it cannot be
caught; writes ``results/forgers.json``.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_lines import as_lines

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, for its tests

from tests.local_hub import LocalHub

RESULTS = Path(__file__).parent / "results" / "forgers.json"
REPO = "user/adapter"


def rows(hub: LocalHub) -> list[dict[str, Any]]:
    """Every edit, with what became of it."""
    from perl.hub.card.candidate import find_candidate
    from perl.hub.push.commit import push_package
    from perl.hub.push.package import Package
    from perl.hub.push.publish import pack
    from tests.hub.card_runs import make_quantised_run, make_run
    from tests.hub.forgeries import FORGERIES

    place = Path(tempfile.mkdtemp())
    run = make_run(place / "a-run")
    push_package(pack(find_candidate(run), REPO), REPO)
    files = {name: data for name, data in hub.repo(REPO).files("main").items() if name != ".gitattributes"}
    quantised = pack(find_candidate(make_quantised_run(place / "quantised")), REPO)
    quantised.write(place / "sound")
    if said(REPO) or said(str(place / "sound")):
        raise SystemExit("what was pushed is not sound")
    found = []
    for number, forgery in enumerate(FORGERIES):
        in_a_folder = forgery.quantised
        name = str(place / f"forged-{number}") if in_a_folder else f"user/forged-{number}"
        forged = forgery.forged(dict(quantised.files if forgery.quantised else files))
        if in_a_folder:
            Package(forged).write(Path(name))
        else:
            hub.create(name, forged)
        lines = said(name)
        caught = next((line for line in lines if forgery.named and forgery.named in line), None)
        expected = bool(caught) if forgery.named else not lines
        found.append(
            {
                "edit": forgery.name,
                "card rendered anew": forgery.anew,
                "checked in": "a folder" if in_a_folder else "a repository",
                "caught by": caught.replace(name, REPO) if caught else None,
                "lines": len(lines),
                "why not": forgery.reason or None,
                "as expected": expected,
            }
        )
    return found


def said(name: str) -> list[str]:
    """The lines of ``perl card NAME --check``."""
    from perl.errors import PerlError
    from perl.hub.card.check import check_card
    from perl.hub.found_card import find_card

    try:
        found = find_card(name)
    except PerlError as error:
        return [str(mistake) for mistake in error.mistakes]
    return [str(mistake) for mistake in check_card(found.files, found.weights_sha256, found.counted).mistakes]


def main() -> None:
    """Prints the table and writes it."""
    from tests.hub_fixtures import TOKEN, USER, taken_for_the_hub

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with LocalHub(USER, TOKEN) as hub, taken_for_the_hub(hub, folder / "home"):
            table = rows(hub)
    for row in table:
        print(f"{row['edit']:44} {row['caught by'] or 'not caught: ' + row['why not']}")
    caught = sum(row["caught by"] is not None for row in table)
    print(f"{len(table)} edits: {caught} caught, {len(table) - caught} not, each with its reason")
    if not all(row["as expected"] for row in table):
        raise SystemExit("an edit came out otherwise than expected")
    facts = {"edits": len(table), "caught": caught, "not caught": len(table) - caught, "table": table}
    RESULTS.write_text(as_lines(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
