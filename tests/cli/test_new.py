"""``perl new`` writes a recipe that passes a dry run and trains; what cannot be is refused by its option."""

import json
from pathlib import Path

import pytest

from perl.cli.commands import run
from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER

ROWS = [{"problem": f"{i}+{j}=", "answer": str(i + j), "id": str(i)} for i in range(5) for j in range(5)]
ASKED = ("new", "--model", str(BASE_FOLDER), "--data", "sums.jsonl", "--gpu", "cpu")


@pytest.fixture(autouse=True)
def _sums():
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def test_from_nothing_to_a_finished_run(capsys):
    assert run([*ASKED, "-o", "mine.yaml"], "perl") == EXIT_DONE
    said = capsys.readouterr().out
    assert said.startswith('written  mine.yaml\nprompt   "')
    assert "\nneeds " in said
    assert "train    perl train mine.yaml" in said
    assert run(["train", "mine.yaml", "--dry-run"], "perl") == EXIT_DONE
    short = ["train.max_steps=2", "data.prompt_template=null", "rollout.max_completion_length=32", "-q"]
    assert run(["train", "mine.yaml", *short], "perl") == EXIT_DONE
    facts = json.loads(Path("runs/mine/run.json").read_text())
    assert (facts["status"], facts["steps"]) == ("done", 2)


def test_a_file_that_is_there_is_replaced_only_if_that_is_asked_for_and_a_link_stays_one(capsys):
    Path("mine.yaml").write_text("precious")
    Path("link.yaml").symlink_to("mine.yaml")
    for output in ("mine.yaml", "link.yaml"):
        assert run([*ASKED, "-o", output], "perl") == EXIT_USER_MISTAKE
        assert f"{output}: is there already" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "precious"
    assert run([*ASKED, "-o", "link.yaml", "--force"], "perl") == EXIT_DONE
    assert Path("link.yaml").is_symlink()
    assert load_recipe("mine.yaml").data.train.name == "sums.jsonl"


@pytest.mark.parametrize(
    ("changed", "option", "said"),
    [
        (("--data", "broken.jsonl"), "--data", "broken.jsonl cannot be read: line 2"),
        (("--data", "asked.jsonl"), "--prompt", "end with the assistant's answer"),
        (("--data", "sandbox:addition", "--prompt", "id"), "--data", "has columns of its own"),
        (("--eval", "other.jsonl"), "--eval", "which column holds the question?"),
        (("--model", "sandbox:bse"), "--model", "did you mean sandbox:base?"),
        (("--answer", "anwser"), "--answer", "has no column 'anwser'"),
        (("--gpu", "T5"), "--gpu", "no hardware 'T5'"),
        (("--reward", "acuracy"), "--reward", "did you mean accuracy?"),
        (("--output", "new"), "new", "a recipe's file ends in .yaml"),
        (("--output", "absent/new.yaml"), "absent", "no such folder"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option_and_nothing_is_written(capsys, changed, option, said):
    Path("broken.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2=" "answer": "3"}\n')
    Path("other.jsonl").write_text('{"x": "1+1=", "y": "2"}\n')
    asked = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    Path("asked.jsonl").write_text(json.dumps({"messages": asked}))
    assert run([*ASKED, "-o", "new.yaml", *changed], "perl") == EXIT_USER_MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {option}: ")
    assert said in line
    assert not list(Path().glob("**/*.yaml"))
