"""A recipe with an environment: it is planned, learns, is scored in it, and its verdicts can be made again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import perl
from perl.cli.commands import run
from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE, RecipeError
from perl.rollouts.agents.template import environment_text
from perl.sandbox import load_problems
from perl.sandbox.tools import Book
from tests import servers

SHORT = ["train.max_steps=6", "train.learning_rate=4e-3", "eval.limit=20", "eval.k=2", "-q"]


def test_a_tool_is_learnt_and_base_and_adapter_are_scored_in_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "books", "--dry-run"], "perl") == EXIT_DONE
    shown = capsys.readouterr().out
    assert "Functions, called as <call>answer(number=...)</call>:\\nanswer(number): Answers the question." in shown
    assert "# tools    Book (answer, find); up to 4 turns, a call up to 20 s" in shown
    assert "# rewards  Book x 1" in shown
    done = perl.train("books", SHORT[:-1], "run")
    [score] = done.facts["eval"].values()
    assert score["base"] < 0.3 < score["adapter"]
    assert done.facts["rewards"] == {"Book": 1.0}
    assert [*done.facts["reward_code"]] == ["perl.sandbox.tools:Book"]
    golds = [problem.answer for problem in load_problems("sandbox:books", "heldout")]
    rows = [json.loads(line) for line in Path("run/eval/samples.jsonl").read_text().splitlines()]
    for row in rows:
        said = [call["function"] for turn in json.loads(row["text"]) for call in turn.get("tool_calls") or []]
        given = [call["arguments"]["number"] for call in said if call["name"] == "answer"][-1:]
        assert (given == [golds[int(row["problem"])]]) == (row["status"] == "right")
    assert {message["role"] for row in rows for message in json.loads(row["text"])} == {"assistant", "tool"}
    assert run(["card", "run", "--check"], "perl") == EXIT_DONE
    assert "judged by `tools: perl.sandbox.tools:Book@" in Path("run/adapter/README.md").read_text()


@pytest.mark.nightly
def test_vllm_in_this_process_writes_the_turns_that_are_trained(tmp_path):
    if why := servers.absent():
        pytest.skip(why)
    python = servers.ENVIRONMENT / "bin" / "python"
    settings = ["rollout.backend=vllm", "train.max_steps=3", "train.output_dir=run", "eval.data=null", "-q"]
    subprocess.run([python, "-m", "perl", "train", "books", *settings], cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "tools/turns" in row]
    assert all(row["tools/turns"] > 1.5 for row in steps)
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 1e-4


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["agent.environment=perl.sandbox.tools:Bok"], "agent.environment: perl.sandbox.tools has no 'Bok'"),
        (["data.chat=false"], "data.chat: conversations need chat messages"),
        (["agent.environment=null"], "no reward"),
        (["agent.max_turns=0"], "agent.max_turns"),
        (
            ["agent.environment=null", "agent.tools=[perl.sandbox.tools:multiply]", "agent.isolate=true"],
            "agent.isolate: is a setting of environments, and there are tools alone",
        ),
        (["train.max_tool_calling_iterations=2"], "write agent.max_turns, which is one more"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_a_model_loads(overrides, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "books", *overrides], "perl") == EXIT_USER_MISTAKE
    said = capsys.readouterr().err
    assert line in said
    assert "Traceback" not in said


def test_a_new_recipe_has_an_environment_that_is_begun_and_one_that_is_there_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["new", "--model", "sandbox:caller", "--data", "sums.jsonl", "--gpu", "cpu", "--environment", "my_env.py"]
    assert run(command, "perl") == EXIT_DONE
    assert "environment: my_env.py:Environment" in Path("recipe.yaml").read_text()
    assert "begun    my_env.py\n" in capsys.readouterr().out
    assert run(["train", "recipe.yaml", "--dry-run"], "perl") == EXIT_DONE
    assert "# tools    Environment (answer, calculate)" in capsys.readouterr().out
    Path("my_env.py").write_text(Path("my_env.py").read_text().replace("class Environment", "class Mine"))
    monkeypatch.delitem(sys.modules, "my_env")
    assert run([*command, "--force"], "perl") == EXIT_DONE
    assert "environment: my_env.py:Mine" in Path("recipe.yaml").read_text()


def test_a_reward_is_needed(monkeypatch):
    monkeypatch.delattr(Book, "get_reward")
    with pytest.raises(RecipeError, match="nothing rewards: there is no reward, and no environment has one"):
        perl.train("books", ["train.max_steps=1"], "run")


def test_an_environment_in_a_package_beside_the_recipe_that_can_never_be_reset_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "beside" / "mine_alone"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    failing = environment_text("Mine").replace('row.get("answer", "")', 'row["no such column"]')
    (package / "envs.py").write_text(failing)
    recipe = tmp_path / "beside" / "mine.yaml"
    recipe.write_text("extends: books\nagent: {max_turns: 3}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"in the first 16 rows: Mine.reset failed: envs.py:\d+: KeyError"):
        perl.train(recipe, ["agent.environment=mine_alone.envs:Mine"], "run")


def test_each_of_several_environments_needs_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("given.py").write_text(environment_text("Given") + environment_text("Free").replace("get_reward", "_reward"))
    rows = [{"prompt": "1+1=", "answer": "2", "environment": name} for name in ("given", "free") * 8]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    several = {"environment": {"given": "given.py:Given", "free": "given.py:Free"}}
    recipe = {"extends": "books", "data": {"train": "rows.jsonl", "eval": None}, "agent": several}
    with pytest.raises(RecipeError, match="nothing rewards conversations in Free"):
        perl.train(recipe, ["train.max_steps=1"], "run")
