"""``perl new`` writes a recipe that passes a dry run and trains; at a terminal it asks, elsewhere options tell it."""

import io
import json
import sys
from pathlib import Path

import pytest

from perl.cli.commands import run
from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_MISTAKE
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER

ROWS = [{"problem": f"{i}+{j}=", "answer": str(i + j), "id": str(i)} for i in range(5) for j in range(5)]
BASE = str(BASE_FOLDER)
ASKED = ("new", "--model", BASE, "--data", "sums.jsonl", "--gpu", "cpu")


@pytest.fixture(autouse=True)
def _sums():
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


@pytest.fixture
def typed(monkeypatch):
    """What a person types at a terminal."""

    def replies(*lines):
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stdin)

    return replies


def test_from_nothing_to_a_finished_run(capsys):
    assert run([*ASKED, "-o", "mine.yaml"], "perl") == EXIT_DONE
    said = capsys.readouterr().out
    assert said.startswith("written  mine.yaml\nneeds ")
    assert "train    perl train mine.yaml" in said
    assert run(["train", "mine.yaml", "--dry-run"], "perl") == EXIT_DONE
    short = ["train.max_steps=2", "data.prompt_template=null", "rollout.max_completion_length=32", "-q"]
    assert run(["train", "mine.yaml", *short], "perl") == EXIT_DONE
    facts = json.loads(Path("runs/mine/run.json").read_text())
    assert (facts["status"], facts["steps"]) == ("done", 2)


def test_a_file_that_is_there_is_replaced_only_if_that_is_asked_for(capsys):
    Path("mine.yaml").write_text("precious")
    for output in ("mine.yaml", "."):
        assert run([*ASKED, "-o", output], "perl") == EXIT_USER_MISTAKE
    assert "mine.yaml: is there already, and is not overwritten (another name, or --force)" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "precious"
    assert run([*ASKED, "-o", "mine.yaml", "--force"], "perl") == EXIT_DONE
    assert load_recipe("mine.yaml").data.train.name == "sums.jsonl"


def test_a_link_that_leads_nowhere_is_refused_and_one_that_leads_somewhere_stays_a_link(capsys, monkeypatch):
    Path("lost.yaml").symlink_to("absent.yaml")
    for further in ([], ["--force"]):
        assert run([*ASKED, "-o", "lost.yaml", *further], "perl") == EXIT_USER_MISTAKE
        assert "error: lost.yaml: is a link to absent.yaml, which is not there" in capsys.readouterr().err
    Path("mine.yaml").write_text("precious")
    Path("link.yaml").symlink_to("mine.yaml")
    with monkeypatch.context() as broken:
        broken.setattr("os.replace", lambda *_: 1 / 0)  # a process that ends before the file is in its place
        with pytest.raises(ZeroDivisionError):
            run([*ASKED, "-o", "link.yaml", "--force"], "perl")
    assert Path("mine.yaml").read_text() == "precious"
    assert {path.name for path in Path().iterdir()} == {"lost.yaml", "link.yaml", "mine.yaml", "sums.jsonl"}
    assert run([*ASKED, "-o", "link.yaml", "--force"], "perl") == EXIT_DONE
    assert Path("link.yaml").is_symlink()
    assert load_recipe("mine.yaml").data.train.name == "sums.jsonl"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--data", "absent.jsonl"), "--data: no such file: absent.jsonl"),
        (("--data", "broken.jsonl"), "--data: broken.jsonl cannot be read: line 2, column 20: Expecting ',' delimiter"),
        (("--data", "points.csv"), "--data: points.csv cannot be read: the names of its columns stand between ';'"),
        (("--data", "asked.jsonl"), "--prompt: the messages of 'messages' end with the assistant's answer"),
        (("--data", "sandbox:addition", "--prompt", "id"), "--prompt: sandbox:addition has columns of its own"),
        (("--data", "sandbox:addition", "--answer", "id"), "--answer: sandbox:addition has columns of its own"),
        (("--subset", "main"), "--subset: sums.jsonl has no subset, as a Hub data set has"),
        (("--eval", "other.jsonl"), "--eval: which column holds the question? (there are x, y; the training data has "),
        (("--eval", "asked.jsonl"), "--eval: which column holds the gold answer? (there are messages; "),
        (("--eval", "broken.jsonl"), "--eval: broken.jsonl cannot be read: line 2"),
        (("--eval", "empty_answer.jsonl"), "--eval: 1 of 1 rows of empty_answer.jsonl have no answer"),
        (("--model", "sandbox:bse"), "--model: the sandbox has no model 'sandbox:bse' (did you mean sandbox:base?)"),
        (("--answer", "anwser"), "--answer: the data has no column 'anwser' (did you mean answer?)"),
        (("--prompt", "id", "--answer", "nothing"), "--answer: the data has no column 'nothing'"),
        (("--model", "./absent"), "--model: ./absent"),
        (("--gpu", "T5"), "--gpu: no hardware 't5'"),
        (("--gpu", "0"), "--gpu: no GPU has 0 GB"),
        (("--reward", "acuracy"), "--reward: no reward 'acuracy' (did you mean accuracy?"),
        (("--reward", "absent.py:f"), "--reward: no such file: absent.py"),
        (("--output", "new"), "new: a recipe's file ends in .yaml (new.yaml)"),
        (("--output", "absent/new.yaml"), "absent: no such folder"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option_and_nothing_is_written(capsys, changed, said):
    Path("broken.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2=" "answer": "3"}\n')
    Path("points.csv").write_text("problem;answer\n1,5+1=;2,5\n")
    Path("other.jsonl").write_text('{"x": "1+1=", "y": "2"}\n')
    Path("empty_answer.jsonl").write_text('{"problem": "1+1=", "answer": ""}\n')
    asked = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    Path("asked.jsonl").write_text(json.dumps({"messages": asked}))
    assert run([*ASKED, "-o", "new.yaml", *changed], "perl") == EXIT_USER_MISTAKE
    assert f"error: {said}" in capsys.readouterr().err
    assert not list(Path().glob("**/*.yaml"))


def test_where_nobody_can_be_asked_what_is_missing_is_named(capsys):
    assert run(["new", "--gpu", "cpu"], "perl") == EXIT_USER_MISTAKE
    assert "--model and --data must be given" in capsys.readouterr().err


def test_five_questions_at_a_terminal_and_a_wrong_reply_is_asked_again(capsys, typed):
    typed(BASE, "absent.jsonl", "sums.jsonl", "anwser", "answer", "cpu", "mine.yaml")
    assert run(["new"], "perl") == EXIT_DONE
    printed = capsys.readouterr()
    assert f"error: no such file: absent.jsonl (in {Path.cwd()}: a path begins where the command runs)\n" in printed.err
    assert "error: the data has no column 'anwser' (did you mean answer?)\n" in printed.err
    assert "The data has the columns problem, answer, id." in printed.out
    assert load_recipe("mine.yaml").data.train.columns.model_dump() == {"prompt": "problem", "answer": "answer"}
    typed()
    assert run([*ASKED, "--answer", "answer", "-o", "all.yaml"], "perl") == EXIT_DONE  # nothing is left to be asked
    assert load_recipe("all.yaml").as_dict() == load_recipe("mine.yaml").as_dict()


def test_the_usual_replies_are_offered(capsys, typed):
    typed("", "sandbox:chain", "", "")
    assert run(["new"], "perl") == EXIT_DONE
    assert "[recipe.yaml]" in capsys.readouterr().out
    found = load_recipe("recipe.yaml")
    assert (found.model.name, found.data.train.name, found.eval.k) == ("sandbox:base", "sandbox:chain", 1)


@pytest.mark.parametrize(
    ("options", "lines", "said"),
    [
        (("--model", "sandbox:bse"), 0, "--model: the sandbox has no model"),
        (("--gpu", "T5"), 0, "--gpu: no hardware 't5'"),
        (("--reward", "nobodys:f"), 0, "--reward: cannot import nobodys"),
        (("--data", "sums.jsonl", "--prompt", "zz"), 1, "--prompt: the data has no column 'zz'"),
        (("--data", "sums.jsonl", "--answer", "zz"), 1, "--answer: the data has no column 'zz'"),
        (("--data", "sandbox:chain", "--answer", "zz"), 1, "--answer: sandbox:chain has columns of its own"),
        (("--data", "sums.jsonl", "--eval", "absent.jsonl"), 2, "--eval: no such file: absent.jsonl"),
    ],
)
def test_a_wrong_option_is_refused_before_further_questions(capsys, typed, options, lines, said):
    typed(*[""] * lines)
    assert run(["new", *options], "perl") == EXIT_USER_MISTAKE
    assert f"error: {said}" in capsys.readouterr().err
    assert sys.stdin.read() == ""


def test_a_reward_is_imported_when_it_is_named_and_the_end_of_input_is_an_interruption(capsys, typed):
    Path("typed_reward.py").write_text("def score(completions, **_):\n    return [0.0] * len(completions)\n")
    typed("", "sums.jsonl", "nobodys:score", "typed_reward:scor", "typed_reward:score", "", "")
    assert run(["new"], "perl") == EXIT_DONE
    said = capsys.readouterr().err
    assert "error: cannot import nobodys" in said
    assert "has no function 'scor' (did you mean score?)" in said
    assert list(load_recipe("recipe.yaml").rewards) == ["typed_reward:score"]
    typed("", "sums.jsonl")
    assert run(["new"], "perl") == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
