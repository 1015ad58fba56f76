"""A sound recipe whose base has no weights, and what the command line says of one with a mistake."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from perl.cli.commands import run
from perl.errors import EXIT_USER_MISTAKE
from perl.sandbox import BASE_FOLDER

SOUND = """\
model: {name: weightless}
data: {train: problems.jsonl}
train: {prompts_per_step: 2, num_generations: 2, max_steps: 1}
rollout: {max_completion_length: 8}
engine: {device: cpu, threads: 2}
"""


@pytest.fixture(autouse=True)
def _a_sound_recipe_without_weights():
    shutil.copytree(BASE_FOLDER, "weightless")
    Path("weightless/model.safetensors").unlink()
    Path("sound.yaml").write_text(SOUND, encoding="utf-8")
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)]
    Path("problems.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def _nothing_left_in_the_process(tmp_path, monkeypatch):
    """Rewards are imported from the current folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


CODE = re.compile(r" \[PRL2\d\d\]$")
# What is warned of before, where a recipe holds nothing out.
UNSCORED = "(data.eval: 10% holds some out) [PRL311]"


@pytest.fixture
def refused(capsys):
    """What the command line prints for a command that is a mistake, a line a problem."""

    def run_command(*arguments):
        code = run(list(arguments), "perl")
        printed = capsys.readouterr()
        assert code == EXIT_USER_MISTAKE == 2, printed
        lines = [line for line in printed.err.splitlines() if not line.endswith(UNSCORED)]
        assert printed.out == ""
        assert lines
        assert all(line.startswith("error: ") for line in lines), lines
        assert "Traceback" not in printed.err
        assert all(CODE.search(line) for line in lines), lines
        return [CODE.sub("", line.removeprefix("error: ")) for line in lines]

    return run_command


@pytest.fixture
def mistakes(refused):
    """The same of ``perl train``; the recipe's lines start at 2."""

    def run_train(*arguments, recipe=None):
        if recipe is not None:
            Path("recipe.yaml").write_text(f"extends: sound.yaml\n{recipe}", encoding="utf-8")
            arguments = ("recipe.yaml", *arguments)
        return refused("train", *arguments)

    return run_train


@pytest.fixture
def mistake(mistakes):
    """The same where there is one problem."""

    def run_train(*arguments, recipe=None):
        (line,) = mistakes(*arguments, recipe=recipe)
        return line

    return run_train


@pytest.fixture
def refuses(mistake, capsys):
    """Checks a table of mistakes, each a row: what is wrong, how its one line begins, further words in the line.

    What is wrong is the text of a recipe, or the arguments of ``perl train``. A beginning that ends with a line break
    is the whole line. Every row is tried; the failing ones are reported together.
    """

    def check(rows):
        offenders = []
        for wrong, start, *words in rows:
            recipe, arguments = (wrong, ()) if isinstance(wrong, str) else (None, wrong)
            try:
                line = mistake(*arguments, recipe=recipe) + "\n"
            except (AssertionError, ValueError) as error:  # another exit code, or not one line
                line = f"{error}{capsys.readouterr()}"
            if not line.startswith(start) or not all(word in line for word in words):
                offenders.append((wrong, line))
        assert offenders == []

    return check
