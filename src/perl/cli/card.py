"""``perl card``: write the model card of a run, or look whether a card is true."""

from pathlib import Path

import click

from perl.cli.output import say, set_up_output
from perl.errors import PerlError, raise_all

EPILOG = """\b
Examples:
  perl card runs/quickstart
  perl card runs/quickstart --repo user/name
  perl card runs/quickstart --check
  perl card user/name --check
"""


@click.command("card", epilog=EPILOG, short_help="Write a run's model card, or render one again and compare.")
@click.argument("source", metavar="RUN|FOLDER|HUB-ID")
@click.option("--check", is_flag=True, help="Write nothing; say what is wrong with the card that is there.")
@click.option("--repo", metavar="USER/NAME", help="Where the adapter will lie on the Hub [default: the recipe's].")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="File to write [default: the adapter's README.md]."
)
def command(*, source: str, check: bool, repo: str | None, output: str | None) -> None:
    """Write the card of a run, all of it from the run folder, or check one.

    With --check a card of a run, of a folder or on the Hub is rendered again from the files that it lies among, its
    scores are counted again, and the files are held against each other; each problem is a line, and the exit code 2.
    The last lines say what was compared, and what is only reported.
    """
    set_up_output(quiet=True)
    if check:
        if repo or output:
            raise PerlError("--check writes nothing", "--repo" if repo else "--output", "leave it out")
        from perl.hub.card.check import check_card
        from perl.hub.cards import find_card

        found = find_card(source)
        checked = check_card(found.files, found.weights_sha256, found.counted)
        # A card that was written with its scores differs everywhere from one without, for one reason.
        raise_all(PerlError, [found.unscored] if found.unscored and checked.mistakes else checked.mistakes)
        say("\n".join([f"{found.place}: nothing is wrong with it", *checked.lines()]))
    else:
        say(_write(source, repo, output))


def _write(source: str, repo: str | None, output: str | None) -> str:
    from perl.hub.card.candidate import candidate_mistakes, shown_candidate
    from perl.hub.card.facts import is_hub_name
    from perl.hub.card.published import AUTHOR, CARD, read_front_matter, shown
    from perl.hub.card.render import OURS
    from perl.hub.cards import run_card, run_folder, write_card
    from perl.hub.gate import gate_mistakes, this_machine
    from perl.run.files import write_text
    from perl.run.folder import Run

    folder = run_folder(source)
    if folder is None:
        raise PerlError("is not a run, and only a run's card can be written", source, "--check looks at a card")
    if repo is not None and not is_hub_name(repo):
        raise PerlError(f"{repo!r} is not a name on the Hub", "--repo", "user/name")
    run = Run.read(folder)
    raise_all(PerlError, candidate_mistakes(shown_candidate(run)))
    # Before it lies where somebody uploads it by hand.
    raise_all(PerlError, gate_mistakes({CARD: run_card(run, repo).encode()}, this_machine(run.path)))
    if output is None:
        gone = write_card(run, repo)
        if gone:
            more = f", and {len(gone) - 1} more lines" if len(gone) > 1 else ""
            line = f"{run.card}:{gone[0][0]}: edited by hand and gone: {shown(gone[0][1])}{more}"
            say(f"{line} (your own words stand below “{AUTHOR}”)", err=True)
        return str(run.card)
    card, file = run_card(run, repo), Path(output)
    if file.exists() and (there := file.read_text(encoding="utf-8", errors="replace")) != card:
        tags = (read_front_matter(there)[0] or {}).get("tags")
        if not (isinstance(tags, list) and OURS in tags):
            raise PerlError("was not written by perl, so it is not overwritten", output, "choose another name")
    write_text(file, card)
    return output
