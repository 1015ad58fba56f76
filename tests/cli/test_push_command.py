"""``perl push`` as it is typed: what it shows, what it sends, how it ends."""

import re

import pytest

from perl.cli.commands import run as run_command
from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE
from tests.hub.push_runs import FILES, add_checkpoint, publishable

REPO = "user/adapter"


pytestmark = pytest.mark.usefixtures("nothing_waits")


def perl(*arguments):
    return run_command(["push", *arguments], "perl")


def test_it_says_where_the_adapter_is_how_it_was_checked_and_what_was_kept(hub, capsys):
    run = publishable()
    assert perl("run", "--repo", REPO, "--message", "first") == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"pushed   {hub.url}/{REPO}"
    assert lines[1].startswith(f"commit   {hub.repo(REPO).head.oid[:12]}: ")
    assert lines[2].startswith("checked  loaded anew, ")
    assert lines[2].endswith(" nats from the trained policy")
    assert hub.repo(REPO).head.title == "first"
    assert perl("run") == EXIT_DONE
    assert ", which was there already: " in capsys.readouterr().out
    add_checkpoint(run, 10)
    hub.create("user/other", {"LICENSE": b"mine", ".eval_results/aime24.yaml": b"old"})
    assert perl("run", "--repo", "user/other", "--checkpoints") == EXIT_DONE
    printed = capsys.readouterr().out
    assert "kept     LICENSE: not ours" in printed
    assert "deleted  .eval_results/aime24.yaml" in printed
    assert "steps    step-10, each a revision" in printed
    assert "step-10" in hub.repo("user/other").tags


def test_a_dry_run_shows_files_and_card_and_asks_nobody(hub, capsys, tmp_path):
    run = publishable()
    assert perl("run", "--repo", REPO, "--dry-run") == EXIT_DONE
    printed = capsys.readouterr().out
    table, card = printed.split("---\n", 1)
    names = [line.split()[0] for line in table.splitlines() if line]
    assert names[: len(FILES)] == FILES
    sizes = [int(line.split()[1].replace(",", "")) for line in table.splitlines()[: len(FILES)]]
    (total,) = re.findall(rf"([\d,]+) bytes, for {REPO}", table)
    assert int(total.replace(",", "")) == sum(sizes)
    stored = {path.name: path.stat().st_size for path in run.adapter.glob("*.safetensors")}
    assert stored == {name: size for name, size in zip(names, sizes, strict=False) if name in stored}
    assert "nothing was sent; the adapter was not loaded and compared" in table
    assert "library_name: peft" in card
    assert hub.requests == 0
    assert not (run.path / "push.json").exists()
    (tmp_path / "hf-home" / "token").unlink()  # nor is a login needed
    assert perl("run", "--repo", REPO, "--dry-run") == EXIT_DONE
    assert hub.requests == 0
    assert "library_name" in capsys.readouterr().out


def test_what_cannot_be_pushed_is_one_line(capsys, hub):
    publishable()
    for arguments, said in (
        (("absent", "--repo", REPO), "absent: no such folder"),
        (("run",), "run: does not say where to push it (--repo user/name)"),
        (("run", "--repo", "name"), "--repo: is not a name on the Hub: 'name' (user/name)"),
        (("run", "--repo", REPO, "--which", "best"), "run: keeps no best adapter"),
    ):
        assert perl(*arguments) == EXIT_USER_MISTAKE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {said}")
    assert hub.requests == 0
