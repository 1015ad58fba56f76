"""A package of the user's adds a loss, a method, an engine and a tracker; rewards and benchmark tasks are files.

No file of this package is edited: what is installed names itself by an entry point, and a recipe names it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perl.evaluation.scoring.results import read_results

PACKAGE = """
from perl.algorithms.registry import LOSSES, Loss
from perl.methods.registry import METHODS, Method
from perl.recipe.optional_packages import ADDED_TRACKERS
from perl.recipe.rollout_section import ENGINES, Capabilities

LOSSES["plain"] = Loss(
    "plain", "Plain", None, "mine.parts:plain", "perl.algorithms.losses:step_mean", equation="-r A",
    weighting="tokens of the generation batch", clip="none", logs={"plain/ratio": ("max",)}, in_trl=False,
)
METHODS["constant"] = Method(
    "constant", "LoRA whose A starts as one number", "mine", "LoraConfig",
    {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}, {"rank": "r", "alpha": "lora_alpha"},
    starts="mine.parts:constant",
)
ENGINES["copy"] = Capabilities("copy", log_probs=True, opens="mine.parts:open_copy")
ADDED_TRACKERS["lines"] = "mine.parts:Lines"
"""
PARTS = '''
import copy
import json

from peft import set_peft_model_state_dict
from transformers import AutoTokenizer, TrainerCallback

from perl.recipe.rollout_section import ENGINES
from perl.rollouts.hf_engine import TransformersEngine
from perl.sandbox import BASE_FOLDER

def plain(ratio, inputs, settings):
    return -ratio * inputs.advantages, {"plain/ratio": ratio}

def constant(policy, options):
    for name, parameter in policy.named_parameters():
        if ".lora_A." in name:
            parameter.data.fill_(0.01)

class Copy(TransformersEngine):
    """Samples from a copy of the policy, which each update brings up to date."""

    capabilities = ENGINES["copy"]

    def load(self, update):
        set_peft_model_state_dict(self._model, dict(update.tensors))

def open_copy(how, plan, policy, settings):
    return Copy(copy.deepcopy(policy), AutoTokenizer.from_pretrained(BASE_FOLDER))

class Lines(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        with open("lines.jsonl", "a") as file:
            file.write(json.dumps(logs) + "\\n")

def short(completions, **_):
    return [-float(len(completion[0]["content"])) for completion in completions]
'''
TASK = """
from perl.evaluation.tasks.own_tasks import file_task

TASKS = (file_task("sums.jsonl", prompt="{problem}"),)
"""
RECIPE = {
    "extends": "quickstart",
    "peft": {"method": "constant", "rank": 4, "alpha": 8},
    "rewards": {"mine.parts:short": 1.0},
    "train": {
        "loss_type": "plain",
        "report_to": "lines",
        "max_steps": 2,
        "prompts_per_step": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "output_dir": "run",
    },
    "rollout": {"backend": "copy", "max_completion_length": 16},
    "eval": {"tasks": ["sums.py"], "k": 1, "limit": 2},
}


@pytest.fixture
def perl(tmp_path):
    """The command, in a folder with the package, as pip would install it, and its files."""
    for name, text in {
        "mine/__init__.py": PACKAGE,
        "mine/parts.py": PARTS,
        "mine-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1\n",
        "mine-1.dist-info/entry_points.txt": "[perl]\nmine = mine\n",
        "sums.py": TASK,
        "sums.jsonl": '{"problem": "12+34=", "answer": "46"}\n{"problem": "5+6=", "answer": "11"}\n',
        "recipe.yaml": json.dumps(RECIPE),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", "perl", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_run_is_made_of_the_users_parts_alone(perl, tmp_path):
    perl("train", "recipe.yaml")
    run = json.loads(Path(tmp_path, "run/run.json").read_text())
    assert (run["steps"], run["method"], run["loss"], run["rewards"]["mine.parts:short"]) == (2, "constant", "plain", 1)
    steps = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    assert [row["plain/ratio_max"] >= 1 for row in steps if "plain/ratio_max" in row] == [True, True]
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps if "reward" in row) < 1e-3
    lines = [json.loads(line) for line in Path(tmp_path, "lines.jsonl").read_text().splitlines()]
    logged = [row["reward"] for row in steps if "reward" in row]
    assert [line["reward"] for line in lines if "reward" in line][: len(logged)] == logged
    assert any("eval_final/sums/avg@1/adapter" in line for line in lines)
    counts = {task.name: len(task.problems) for task in read_results(tmp_path / "run/eval").tasks}
    assert counts["sums"] == 2


def test_the_commands_list_what_was_added(perl):
    assert "constant" in perl("methods")
    assert "copy" in perl("eval", "--help")
