"""Tasks: what ``eval/`` defines, how names are found, and that a list of them imports next to nothing."""

import json
import subprocess
import sys

import pytest

from perl.errors import PerlError
from perl.evaluation.scoring.task import all_tasks, find_tasks
from perl.recipe.assets import evaluation_tasks

AS_LIGHTEVAL = {"aime24", "aime25", "math_500", "gsm8k"}
BOXED = {f"{name}_boxed" for name in AS_LIGHTEVAL} | {"amc23", "minerva", "hmmt_feb_2025", "olympiadbench"}
SANDBOX = {
    f"sandbox:{name}" for name in ("addition", "multiplication", "chain", "cipher", "cipher_levels", "sums", "stories")
} | {"sandbox:products", "sandbox:books"}

LIST_THEM = """
import json, sys
from perl.evaluation.scoring.task import all_tasks
tasks = all_tasks()
heavy = sorted({"torch", "lighteval", "datasets", "transformers", "numpy", "huggingface_hub"} & set(sys.modules))
print(json.dumps([len(tasks), heavy]))
"""


def test_every_module_has_tasks_and_every_task_its_own_name():
    assert len(evaluation_tasks()) == 10
    tasks = all_tasks()
    assert set(tasks) == AS_LIGHTEVAL | BOXED | SANDBOX | {"gpqa_diamond"}
    assert all(name == task.name for name, task in tasks.items())
    assert len({task.title for task in tasks.values()}) == len(tasks)


def test_a_list_of_tasks_imports_nothing_heavy():
    printed = subprocess.run([sys.executable, "-c", LIST_THEM], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == [22, []]


def test_only_lightevals_own_ways_of_asking_bear_its_names():
    tasks = all_tasks()
    assert {name for name, task in tasks.items() if task.lighteval == name} == AS_LIGHTEVAL
    assert {name for name, task in tasks.items() if task.lighteval is not None} == AS_LIGHTEVAL


def test_every_name_that_is_wrong_is_named_with_the_nearest():
    with pytest.raises(PerlError) as failure:
        find_tasks(["aime2024", "math500"])
    one, other = str(failure.value).splitlines()
    assert ("'aime2024'" in one, "aime24?" in one) == (True, True)
    assert ("'math500'" in other, "math_500?" in other) == (True, True)
    with pytest.raises(PerlError, match="--tasks: none is named"):
        find_tasks([])
