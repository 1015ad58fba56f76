"""What somebody wrote is not overwritten without a word: in a run, in a script's folder, elsewhere."""

from click.testing import CliRunner

from perl.cli.card import command as card
from perl.hub.card.folder_card import write_folder_card
from perl.hub.run_card import run_card, write_card
from tests.hub.published import RUN
from tests.hub.push_runs import publishable


def test_a_card_written_again_keeps_notes_reports_lost_edits_once_and_overwrites_no_file_of_another_kind(tmp_path):
    write_folder_card(tmp_path, RUN)
    file = tmp_path / "README.md"
    first = file.read_text()
    file.write_text(f"{first}\n## Notes\n\nIt is kind.\n")
    write_folder_card(tmp_path, RUN)
    assert file.read_text() == f"{first}\n## Notes\n\nIt is kind.\n"
    run = publishable()
    assert write_card(run) == []
    text = run.card.read_text().replace("## Training\n", "## Training\n\nOn my own machine.\n", 1)
    run.card.write_text(f"{text}\n## Notes\n\nIt is kind.\n")
    said = CliRunner().invoke(card, [str(run.path)])
    assert said.exit_code == 0, said.output
    number = text.split("\n").index("On my own machine.") + 1
    assert f"README.md:{number}: edited by hand and gone: On my own machine. (your own words" in said.output
    assert "It is kind." in run.card.read_text()
    again = CliRunner().invoke(card, [str(run.path)])
    assert "gone" not in again.output
    file = tmp_path / "notes.md"
    file.write_text("my diary")
    said = CliRunner().invoke(card, [str(run.path), "-o", str(file)])
    assert said.exit_code != 0
    assert file.read_text() == "my diary"
    file.write_text(run_card(run).replace("## Training", "## Learning"))
    said = CliRunner().invoke(card, [str(run.path), "-o", str(file)])
    assert said.exit_code == 0, said.output
    assert file.read_text() == run_card(run)
