"""An author's own words stay on a card, below its last heading, and are named as what nobody checked."""

from perl.hub.card.check import check_card
from perl.hub.card.notes import notes_mistakes, split_notes
from perl.hub.found_card import find_card
from perl.hub.run_card import run_package, write_card
from tests.hub.card_runs import make_run
from tests.hub.published import FILES

WORDS = "## Notes\n\nMine, with love. On my own exam it got 97 of 100.\n"


def test_they_are_kept_and_their_numbers_named(tmp_path):
    run = make_run(tmp_path / "a-run")
    write_card(run)
    alone = run.card.read_text()
    run.card.write_text(f"{alone}\n{WORDS}")
    write_card(run)
    assert run.card.read_text() == f"{alone}\n{WORDS}"
    assert run_package(run, "user/adapter").files["README.md"].decode().endswith(WORDS)
    found = find_card(str(run.path))
    checked = check_card(found.files, found.weights_sha256, found.counted)
    assert checked.mistakes == ()
    line = alone.count("\n") + 4
    assert checked.unchecked == (
        f"README.md:{line}, in the author's own words: Mine, with love. On my own exam it got 97 of 100.",
    )
    assert checked.lines()[-1].startswith("not checked: README.md:")


LIKE_A_CARD = [
    "# Results",
    "  ## Results",
    "Results\n===",
    "| a |\n|---|",
    "a | b | c",
    "<b>99</b>",
    "![x](y.png)",
    "```\n99\n```",
    "a \n:-:\n99",
    "AIME\n-|-\n99",
    "> ## Results",
    "> 99",
    "- ## Results",
    "1. ## Results",
    "1) 1) ## Results",
    "- - ## Results",
    "- > ## Results",
    "- a\n  - b",
    "- a\n\n      99",
    "so\r## Results",
    "so\r\r    99",
    "Results\r---",
    "\t99",
    "    99",
    "~~~\n99\n~~~",
    "***",
    "[x]: https://evil.example",
    "[^1]: 99",
    "$$\n99\n$$",
    "~~~99",
    "$$99$$",
    "so\x0c99",
    "so\u202e99",
    "so\u202899",
]


def test_what_looks_like_a_part_of_the_card_is_refused_and_plain_prose_and_lists_are_kept():
    for words in LIKE_A_CARD:
        _, notes, first = split_notes(f"# x\n\n## Notes\n\n{words}\n")
        assert first == 3, words
        assert notes_mistakes(notes, first), words
    for card in ("---\n## Notes\n---\n# x\n", "# x\n```\n## Notes\n```\n"):  # a heading in code or front matter is none
        assert split_notes(card) == (card, "", 0)
    for words in (
        "None of this was tuned. Nothing to do: TODO is a word, nan is bread.",
        "Mine, with love.\nIt got ninety-seven of a hundred.",
        "- one thing\n- *another*, `code`\n* a third\n1. first\n2) second",
        "**Thanks** to all. [Here](https://example.org) is more.",
        "“Quoted” (and bracketed), größer als 3, 数学 is fine.\n  So is a margin.",
    ):
        card = f"{FILES['README.md'].decode()}\n## Notes\n\n{words}\n"
        checked = check_card({**FILES, "README.md": card.encode()})
        assert checked.mistakes == (), words
