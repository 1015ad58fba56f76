"""A dry run refuses the output folder as the real command does, and leaves it as it is."""

import json
from pathlib import Path

import pytest

from perl.cli.commands import run as run_command
from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE, RunFolderError
from perl.run.folder import check_folder, open_run
from perl.training.prepare import read_recipe

SETTINGS = ("train.max_steps=40", "peft.rank=4")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recipe(*overrides, output="out"):
    return read_recipe("quickstart", (*SETTINGS, *overrides), output)


def a_run(status="done", **facts) -> Path:
    """A folder as a run with a logged step leaves it."""
    try:
        with open_run(recipe()) as run:
            run.record(**facts)
            run.metrics.write_text('{"step": 1}\n')
            if status != "done":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert json.loads((run.path / "run.json").read_text())["status"] == status
    return run.path


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refusals(*overrides, output="out") -> str:
    """What both refuse, in the same words; the check first, and it leaves nothing."""
    before = everything_in(Path())
    with pytest.raises(RunFolderError) as checked:
        check_folder(recipe(*overrides, output=output))
    assert everything_in(Path()) == before
    with pytest.raises(RunFolderError) as opened, open_run(recipe(*overrides, output=output)):
        pass
    assert str(checked.value) == str(opened.value)
    return str(checked.value)


def test_what_opening_takes_the_check_takes_and_makes_nothing():
    check_folder(recipe())
    assert everything_in(Path()) == {}
    a_run("interrupted")
    before = everything_in(Path())
    check_folder(recipe())  # goes on
    check_folder(recipe("engine.threads=1"))
    check_folder(recipe("eval.scorer_timeout=60"))
    assert everything_in(Path()) == before
    Path("out/metrics.jsonl").unlink()
    check_folder(recipe("peft.rank=8"))  # what came to nothing makes room


def test_what_opening_refuses_the_check_refuses_in_the_same_words():
    Path("file").touch()
    Path("full").mkdir()
    Path("full/thesis.tex").touch()
    assert "cannot be written: Not a directory" in refusals(output="file/deep/out")
    assert "is not empty and holds no run: thesis.tex" in refusals(output="full")
    folder = a_run()
    assert "peft.rank is 4 there, 8 here" in refusals("peft.rank=8")
    with open_run(recipe()):
        assert "another process is training here" in refusals()
    check_folder(recipe())
    (folder / "run.json").write_text("{")
    assert "run.json" in refusals()


@pytest.mark.parametrize(
    ("facts", "status", "changed", "words"),
    [
        (
            {"method": "lora"},
            "done",
            ("train.max_steps=60",),
            ("`perl train RECIPE peft.adapter=out --output ANOTHER`",),
        ),
        (
            {"method": "full"},
            "done",
            ("train.max_steps=60",),
            ("`perl train RECIPE model.name=out/model --output ANOTHER`",),
        ),
        ({"method": "lora"}, "interrupted", ("train.max_steps=60",), ("finish it as it is",)),
    ],
)
def test_a_run_that_is_to_be_longer_says_how(facts, status, changed, words):
    a_run(status, **facts)
    said = refusals(*changed)
    assert f"{changed[0].partition('=')[0]} is 40 there" in said
    assert all(word in said for word in words)


def test_the_dry_run_prints_the_line_of_the_real_command_and_no_plan(capsys):
    a_run(method="lora")
    before = everything_in(Path())
    longer = ["train", "quickstart", *SETTINGS, "train.max_steps=60", "--output", "out"]
    said = []
    for further in (["--dry-run"], []):
        assert run_command([*longer, *further], "perl") == EXIT_USER_MISTAKE
        printed = capsys.readouterr()
        assert printed.out == ""
        said.append([line for line in printed.err.splitlines() if line.startswith("error: ")])
        assert further == [] or everything_in(Path()) == before
    assert said[0] == said[1]
    (line,) = said[0]
    assert line.endswith("to train it further: `perl train RECIPE peft.adapter=out --output ANOTHER`) [PRL204]")
    assert run_command(["train", "quickstart", *SETTINGS, "--output", "new", "--dry-run"], "perl") == EXIT_DONE
    assert not Path("new").exists()
