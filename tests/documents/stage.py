"""The folder in which a page's commands run: the runs and files that the page takes for granted.

page -> folder with runs, recipes, problems, rewards; environment
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Few steps: of these runs only that they are there matters.
_SHORT = "train.max_steps=2 eval.limit=8 eval.k=1 engine.threads=1"
# Name of a run -> the command that makes it; made once for all pages.
RUNS: Mapping[str, str] = {
    "quickstart": "perl train quickstart --output runs/quickstart",
    "mine": f"perl train quickstart --output runs/mine {_SHORT}",
    "a": f"perl train quickstart --output runs/a {_SHORT}",
    "b": f"perl train quickstart --output runs/b peft.method=dora {_SHORT}",
    "lora": f"perl train quickstart --output runs/lora {_SHORT}",
    "dora": f"perl train quickstart --output runs/dora peft.method=dora {_SHORT}",
    "pissa": f"perl train quickstart --output runs/pissa peft.method=pissa {_SHORT}",
}
# A page whose reader comes from another one has that one's run.
_OF_AN_EARLIER_PAGE: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("recipes.md", "troubleshooting.md"), ("quickstart",)
)
_MADE = re.compile(r"--output runs/(\w+)|^perl train (\w+)(?: |$)(?!.*--(?:output|dry-run))", re.MULTILINE)
_SUMS = [(12, 30), (45, 51), (7, 28), (60, 61)]
_REWARDS = '''"""A reward of one's own."""


def score(completions, solution, **kwargs):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(gold in text) for gold, text in zip(solution, texts, strict=True)]
'''
_TASKS = '''"""A task of one's own."""

from perl.evaluation.tasks.own_tasks import file_task

TASKS = [file_task("sums.jsonl", scorer="exact")]
'''
FILES: Mapping[str, Callable[[], str]] = {
    "my.jsonl": lambda: _lines([{"question": f"{a}+{b}=", "gold": str(a + b)} for a, b in _SUMS]),
    "sums.jsonl": lambda: _lines([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in _SUMS]),
    "quiz.jsonl": lambda: _lines(
        [{"prompt": f"{a}+{b}=", "options": [str(a + b), str(a - b), "0"], "answer": "A"} for a, b in _SUMS]
    ),
    "my_rewards.py": lambda: _REWARDS,
    "my_tasks.py": lambda: _TASKS,
    "my.yaml": lambda: "extends: quickstart\n",
    "quick.yaml": lambda: (Path(__file__).resolve().parents[2] / "studies" / "quick.yaml").read_text(encoding="utf-8"),
}


def set_up(folder: Path, block: Sequence[str], page: str, trained: Path, environment: Mapping[str, str]) -> None:
    """Puts there what commands name and do not make, as if their reader had it.

    Args:
        folder: Where the commands will run.
        block: The commands.
        page: Which they stand on.
        trained: Where runs are kept for all pages; what is missing is trained.
        environment: Of the commands.
    """
    needed = "\n".join(block)
    for name, content in FILES.items():
        if name in needed or (name == "sums.jsonl" and "my_tasks.py" in needed):
            (folder / name).write_text(content(), encoding="utf-8")
    for name in ("recipe.yaml", "my_recipe.yaml"):
        if name in needed:
            ran(f"perl recipes quickstart > {name}", folder, environment)
    made = {name for names in _MADE.findall(needed) for name in names}
    named = set(re.findall(r"(?<!--output )runs/(\w+)", needed)) - made
    for name in [*_OF_AN_EARLIER_PAGE.get(page, ()), *(named & set(RUNS))]:
        run = trained / "runs" / name
        if not run.is_dir():
            ran(RUNS[name], trained, environment)
        shutil.copytree(run, folder / "runs" / name, dirs_exist_ok=True)


def ran(command: str, folder: Path, environment: Mapping[str, str], *, may_fail: bool = False) -> str:
    """What a command printed, errors among it, as a terminal shows it.

    Raises:
        AssertionError: It failed, and may not, or otherwise than with a message.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["/bin/bash", "-c", command], cwd=folder, env=environment, check=False, **pipes)
    assert done.returncode in ((0, 1, 2) if may_fail else (0,)), f"{command}\n{done.stdout}"
    assert "Traceback" not in done.stdout, done.stdout
    return done.stdout


def shell_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """With ``perl`` on the path, a wide terminal, and output that comes as it is written."""
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{environment['PATH']}"
    return {**environment, "PATH": path, "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


def _lines(rows: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
