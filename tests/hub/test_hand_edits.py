"""What somebody wrote is kept as the author's words, and nothing of others is overwritten without a word."""

from click.testing import CliRunner

from perl.cli.card import command as card
from perl.hub.card.check import check_card
from perl.hub.card.published import AUTHOR, with_author
from perl.hub.cards import find_card, run_card, run_package, write_card, write_folder_card
from tests.hub.published import FILES, RUN
from tests.hub.push_runs import publishable


def test_an_authors_words_stay_below_the_last_heading_quoted_and_named_as_not_checked(tmp_path):
    write_folder_card(tmp_path, RUN)
    file = tmp_path / "README.md"
    first = file.read_text()
    file.write_text(f"{first}\n{AUTHOR}\n\nIt got 97 of 100.\n\n## Results\n")
    write_folder_card(tmp_path, RUN)
    words = f"{AUTHOR}\n\n> It got 97 of 100.\n>\n> ## Results\n"
    assert file.read_text() == f"{first}\n{words}"
    write_folder_card(tmp_path, RUN)
    assert file.read_text() == f"{first}\n{words}"
    run = publishable()
    write_card(run)
    alone = run.card.read_text()
    run.card.write_text(f"{alone}\n{words}")
    write_card(run)
    assert run.card.read_text() == f"{alone}\n{words}"
    assert run_package(run, "user/adapter").files["README.md"].decode().endswith(words)
    found = find_card(str(run.path))
    checked = check_card(found.files, found.weights_sha256, found.counted)
    assert checked.mistakes == ()
    assert checked.lines()[-1].startswith("not checked: README.md:")


def test_words_that_leave_their_quotation_or_hold_html_or_a_picture_are_refused():
    ours = FILES["README.md"].decode()

    def said(words):
        checked = check_card({**FILES, "README.md": f"{ours}\n{AUTHOR}\n\n{words}\n".encode()})
        return [str(mistake) for mistake in checked.mistakes]

    for words in ("> None of it was tuned. *TODO*, 数学.", "> ## Results\n> | a |\n> |---|", "> ```\n> x\n> ```"):
        assert said(words) == [], words
    outside = ("Mine.", "> a\n## Results", "> a\n\nb", "> so\r## Results", "> a\x0cb")
    for words in (*outside, "> <b>99</b>", "> ![x](y.png)"):
        assert any(line.startswith("README.md:") for line in said(words)), words
    quoted = with_author(ours, f"{ours}\n{AUTHOR}\n\nso\r## Results\u2028## More\n")
    assert quoted == f"{ours}\n{AUTHOR}\n\n> so\n> ## Results\n> ## More\n"


def test_a_card_written_again_reports_lost_edits_once_and_overwrites_no_file_of_another_kind(tmp_path):
    run = publishable()
    assert write_card(run) == []
    text = run.card.read_text().replace("## Training\n", "## Training\n\nOn my own machine.\n", 1)
    run.card.write_text(f"{text}\n{AUTHOR}\n\n> It is kind.\n")
    said = CliRunner().invoke(card, [str(run.path)])
    assert said.exit_code == 0, said.output
    number = text.split("\n").index("On my own machine.") + 1
    assert f"README.md:{number}: edited by hand and gone: On my own machine." in said.output
    assert AUTHOR in said.output
    assert "It is kind." in run.card.read_text()
    assert "gone" not in CliRunner().invoke(card, [str(run.path)]).output
    file = tmp_path / "notes.md"
    file.write_text("my diary")
    assert CliRunner().invoke(card, [str(run.path), "-o", str(file)]).exit_code != 0
    assert file.read_text() == "my diary"
    file.write_text(run_card(run).replace("## Training", "## Learning"))
    said = CliRunner().invoke(card, [str(run.path), "-o", str(file)])
    assert said.exit_code == 0, said.output
    assert file.read_text() == run_card(run)
