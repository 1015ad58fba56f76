"""What verl itself says of our jobs: it composes and validates them, reads their rows, calls their rewards.

Runs where verl 0.9.1 is installed beside this package: PERL_VERL_ENV, or .venv-verl of the checkout (make verl-env).
"""

import itertools
import json
import os
import random
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from perl.algorithms.losses import LossSettings
from perl.algorithms.registry import ARGUMENTS
from perl.launch.verl.hydra import FOLDER
from perl.rewards import check
from perl.sandbox.tasks import careful_completion, problems, sloppy_completion
from perl.trainer.recipe_arguments import training_arguments
from perl.training.to_verl import export_verl, planned_here, prepare_export
from tests.launch.verl_recipes import ALGORITHMS, ENGINES, of_algorithm, recipe, told

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("PERL_VERL_ENV", CHECKOUT / ".venv-verl"))
PYTHON = ENVIRONMENT / "bin" / "python"
SIDE = Path(__file__).parent / "verl_side.py"
ROWS = 200
FURTHER = {  # losses beside those of the eight names
    "luspo": {"algorithm": "luspo"},
    "sapo": {"algorithm": "sapo"},
    "opo": {"algorithm": "opo"},
    "reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline"},
    "dual clip": {"train": {"delta": 3.0}},
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not PYTHON.is_file(),
        reason=f"there is no verl in {ENVIRONMENT}: make verl-env, or name its folder with PERL_VERL_ENV",
    ),
]


def beside_verl(*arguments):
    """Runs a program with verl's Python and this package."""
    path = os.pathsep.join(filter(None, (str(CHECKOUT / "src"), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def answer_of(*arguments):
    done = beside_verl(SIDE, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A job, and its folder."""
    folder = tmp_path_factory.mktemp("jobs") / "job"
    given = recipe(rewards={"accuracy": 1.0, "format": 0.25})
    return export_verl(given, folder, ["engine.gpus=4"])


def lines_of(made, folder):
    return [line.replace(FOLDER, str(folder)) for line in made.lines]


def test_every_job_composes_and_is_valid_in_verls_own_code(exported, tmp_path):
    folder, export = exported
    asked = {}
    for name, strategy, rollout in itertools.product(ALGORITHMS, ENGINES, ("vllm", "sglang")):
        made = told(export, of_algorithm(name, strategy, rollout))
        asked[f"{name} {strategy} {rollout}"] = (made.values, lines_of(made, folder))
    (tmp_path / "jobs.json").write_text(json.dumps({name: lines for name, (_, lines) in asked.items()}))
    found = answer_of("compose", tmp_path / "jobs.json")
    assert len(found) == len(ALGORITHMS) * len(ENGINES) * 2 == 48
    assert {name: answer["wrong"] for name, answer in found.items() if answer["wrong"]} == {}
    keys = ("optim.lr", "", "clip_ratio_high", "")
    for name, (values, _) in asked.items():
        expected = [values[f"actor_rollout_ref.actor.{key}"] for key in keys if key]
        expected = [expected[0], values["data.train_batch_size"], expected[1], 1]
        assert found[name]["values"] == pytest.approx(expected)


def test_verls_losses_and_gradients_are_ours(exported, tmp_path):
    folder, export = exported
    cases = {}
    names = [ARGUMENTS.get(one.name, one.name) for one in fields(LossSettings)] + ["kl_in_reward", "epsilon"]
    for name in (*ALGORITHMS, *FURTHER):
        given = of_algorithm(name) if name in ALGORITHMS else recipe(**FURTHER[name])
        arguments = training_arguments(planned_here(given), "none")
        lines = lines_of(told(export, given), folder)
        cases[name] = {"lines": lines, "fields": {field: getattr(arguments, field) for field in names}}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    found = answer_of("losses", tmp_path / "cases.json")
    assert set(found) == {*ALGORITHMS, *FURTHER}
    for answer in found.values():
        assert answer["theirs"] == pytest.approx(answer["ours"], rel=1e-6)
        assert answer["gradient"] == pytest.approx(0.0, abs=1e-6)
        assert answer["size"] > 1e-3


def test_verl_reads_the_rows_and_scores_them_as_we_do(exported):
    folder, export = exported
    rng = random.Random(0)
    by_question = {one.question: one for one in problems("addition", "train", 4000)}
    pairs = []
    for index in rng.sample(range(len(export.job.train)), ROWS):
        prompt = export.job.train[index]["prompt"]
        problem = by_question[prompt if isinstance(prompt, str) else prompt[-1]["content"]]
        careful = rng.random() < 0.3
        pairs.append((index, careful_completion(problem) if careful else sloppy_completion(problem, rng, 0.5)))
    (folder.parent / "completions.json").write_text(json.dumps(pairs))
    found = answer_of("scores", folder)
    assert found["rows"] == len(export.job.train)
    assert {"raw_prompt", "data_source", "reward_model", "extra_info", "index"} <= set(found["columns"])
    first = export.job.tokenizer.apply_chat_template(
        export.job.train[0]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert found["prompt"] == list(first["input_ids"])
    ours = []
    for (index, _), answer in zip(pairs, found["answers"], strict=True):
        right = check(export.job.train[index]["solution"], answer["decoded"]).right
        box = answer["decoded"].rstrip().endswith("}") and answer["decoded"].count("\\boxed") == 1
        ours.append(float(right) + 0.25 * box)
    assert [answer["score"] for answer in found["answers"]] == pytest.approx(ours)
    assert 0.2 < sum(score >= 1 for score in ours) / ROWS < 0.9


@pytest.fixture(scope="module")
def _algebra():
    if beside_verl("-c", "import math_verify").returncode:
        pytest.skip("there is no math-verify beside verl: make verl-env")


@pytest.mark.usefixtures("_algebra")
def test_a_job_is_checked_before_a_gpu_is_taken(exported):
    folder, _ = exported
    done = beside_verl("-m", "perl.launch.verl.check_job", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verl 0.9.1" in done.stdout
    assert "the rewards answer (1.25)" in done.stdout  # by algebra
    for change, words in (
        ("actor_rollout_ref.model.lora_rank=0", "whole model"),
        ("actor_rollout_ref.rollout.load_format=dummy", "safetensors"),
        ("custom_reward_function.path=rewards.py", "reward.custom_reward_function"),
        ("trainer.v1.trainer_mode=separate_async", "verl#7495"),
        ("ray_kwargs.ray_init.num_cpus=2", "for ever"),
        ("actor_rollout_ref.actor.clip_ratoi=0.1", "clip_ratoi"),
    ):
        done = beside_verl("-m", "perl.launch.verl.check_job", folder, change)
        assert done.returncode == 2, change
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) >= 1, done.stderr[-2000:]
        assert words in errors[0]


def test_a_job_that_was_changed_is_refused(tmp_path):
    folder, _ = export_verl(recipe(), tmp_path / "job")
    with (folder / "overrides.txt").open("a") as file:
        file.write("trainer.nnodes=2\n")
    done = beside_verl("-m", "perl.launch.verl.check_job", folder)
    assert done.returncode == 2
    assert "overrides.txt: is not what was exported" in done.stderr


def test_plain_text_prompts_reach_verl_letter_for_letter(tmp_path):
    given = recipe(data={"train": "sandbox:addition", "chat": False})
    folder, export = export_verl(given, tmp_path / "job")
    (tmp_path / "completions.json").write_text("[]")
    found = answer_of("scores", folder)
    first = export.job.train[0]["prompt"]
    assert isinstance(first, str)
    assert found["prompt"] == list(export.job.tokenizer(text=first)["input_ids"])


def test_the_export_needs_no_plan_of_its_own_to_be_told(exported):
    """What the other tests rely on: a recipe that is told has the lines of one that is planned."""
    _, export = exported
    again = prepare_export(recipe(rewards={"accuracy": 1.0, "format": 0.25}))
    assert again.made.values["data.max_prompt_length"] == pytest.approx(export.made.values["data.max_prompt_length"])
