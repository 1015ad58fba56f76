"""What somebody wrote is not overwritten without a word: on the Hub, in a run, in a script's folder, elsewhere."""

import pytest
from click.testing import CliRunner

from perl.cli.card import command as card
from perl.cli.push import command as push_command
from perl.errors import PerlError
from perl.hub.card.folder_card import write_folder_card
from perl.hub.push.commit import push_package
from perl.hub.push.outbox import Push, read_push, read_pushes, write_push
from perl.hub.push.package import Package
from perl.hub.push.publish import push, push_run, wanted_push
from perl.hub.push.retries import HubOutageError
from perl.hub.run_card import run_card, write_card
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from tests.hub.files import weights
from tests.hub.published import RUN
from tests.hub.push_runs import REPO, files_of, publishable
from tests.hub_fixtures import TOKEN, USER, taken_for_the_hub
from tests.local_hub import LocalHub

pytestmark = pytest.mark.usefixtures("nothing_waits")
OURS = {WEIGHTS: weights(b"mine"), CONFIG: b"{}", "README.md": b"---\nlibrary_name: peft\n---\nours\n"}


def test_a_card_edited_on_the_hub_is_refused_in_one_line_and_stays_but_that_of_a_new_repository_is_nobodys(hub):
    run = publishable()
    push(run, REPO)
    edited = files_of(hub)["README.md"] + b"\nDo not use it for medicine.\n"
    hub.commit(REPO, {"README.md": edited})
    (run.path / "plots" / "curves.png").unlink()  # so that there is something to commit
    with pytest.raises(PerlError) as caught:
        push(run, REPO)
    assert str(caught.value) == (
        "user/adapter: its README.md was written or edited by somebody, not by a push of this run "
        "(take over its words below ## Notes, then --replace overwrites it, or another --repo)"
    )
    assert files_of(hub)["README.md"] == edited
    push(run, REPO, replace=True)
    assert b"medicine" not in files_of(hub)["README.md"]
    (run.path / "eval" / "problems.png").unlink()
    push(run, REPO)  # its own card is no stranger's
    hub.create("user/new", {"README.md": b"---\nlicense: mit\n---\n"})
    push_package(Package(OURS), "user/new")
    assert hub.repo("user/new").files()["README.md"] == OURS["README.md"]


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "weights-00001-of-00002.safetensors"])
def test_another_model_in_the_repository_is_refused(hub, name):
    hub.create(REPO, {name: weights(b"a model")})
    with pytest.raises(PerlError, match=rf"^user/adapter: holds another model: {name} \(--replace puts the adapter"):
        push_package(Package(OURS), REPO)
    push_package(Package(OURS), REPO, may_replace=None)
    push_package(Package(OURS), REPO)  # an adapter's repository by now
    assert name in files_of(hub)


def test_an_own_adapter_is_known_where_the_hub_keeps_no_large_files(tmp_path):
    with (
        LocalHub(tmp_path / "store", USER, TOKEN, lfs_patterns=()) as plain,
        taken_for_the_hub(plain, tmp_path / "home"),
    ):
        run = publishable()
        first = push(run, REPO)
        sent = read_push(run).sent
        assert push_package(Package(OURS), REPO, may_replace=sent).replaced == first.commit


def test_a_queued_push_is_not_lost_by_another_and_does_not_lend_it_its_settings(hub):
    run = publishable()
    hub.faults.cut(1, times=10**6)
    with pytest.raises(HubOutageError):
        push_run(run, wanted_push(run, "user/a", private=True, message="mine"))
    hub.faults.clear()
    push(run, "user/b")
    assert [(one.repo_id, one.status) for one in read_pushes(run)] == [("user/a", "queued"), ("user/b", "done")]
    assert wanted_push(run, "user/a").private
    said = CliRunner().invoke(push_command, [str(run.path)])
    assert said.exit_code == 0, said.output
    assert hub.repo("user/a").visibility.private
    assert not hub.repo("user/b").visibility.private
    assert hub.repo("user/a").head.title == "mine"
    assert {one.status for one in read_pushes(run)} == {"done"}
    push(run, "user/a")
    assert wanted_push(run).repo_id == "user/a"  # nothing is queued, so the newest
    run = publishable("another")
    write_push(run, Push("queued", REPO, private=True, steps=(10,), tries=3))
    other = wanted_push(run, "user/other")
    assert (other.repo_id, other.private, other.steps, other.tries) == ("user/other", False, (), 0)
    assert wanted_push(run).private
    assert wanted_push(run, REPO).steps == (10,)


def test_of_what_was_refused_nothing_counts_as_sent_and_replace_does_not_outlive_it(hub):
    hub.create(REPO, OURS | {"pickle.bin": b"\x80\x04"})
    run = publishable()
    with pytest.raises(PerlError, match="holds pickles"):
        push(run, REPO, replace=True)
    hub.commit(REPO, {}, delete=["pickle.bin"])
    with pytest.raises(PerlError, match="holds another adapter"):
        push(run)
    assert files_of(hub)[WEIGHTS] == OURS[WEIGHTS]
    hub.create("user/new", {"pickle.bin": b"\x80\x04"})
    run = publishable("another")
    with pytest.raises(PerlError, match="holds pickles"):
        push(run, "user/new")
    push_of = read_push(run)
    assert (push_of.sent, push_of.trying) == ((), ())


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
