"""What verl itself says of our jobs, and what comes back of checkpoints that its own code has written.

Runs where verl 0.9.1 is installed beside this package: PERL_VERL_ENV, or .venv-verl of the checkout (make verl-env).
"""

import itertools
import json
import os
import subprocess
import tomllib
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from perl.algorithms.losses import LossSettings
from perl.policy.saved.adapter import WEIGHTS
from perl.sandbox import BASE_FOLDER
from perl.training.on_verl import export_verl, planned_here
from perl.training.prepare import training_arguments
from perl.verl.import_job import import_job
from perl.verl.job_folder import FOLDER
from perl.verl.table import CANNOT, TABLE, cells
from tests.conftest import CHECKOUT
from tests.verl.jobs import ALPHA, PEFT, RANK, TARGETS, a_job, log_steps
from tests.verl.recipes import ALGORITHMS, ENGINES, of_algorithm, recipe, told

ENVIRONMENT = Path(os.environ.get("PERL_VERL_ENV", CHECKOUT / ".venv-verl"))
PYTHON = ENVIRONMENT / "bin" / "python"
SIDE, PROGRAM = (Path(__file__).with_name(name) for name in ("side.py", "training_program.py"))
FURTHER = {  # losses beside those of the eight names
    **{name: {"algorithm": name} for name in ("luspo", "sapo", "opo", "reinforce_pp_baseline")},
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
    rewards = {"accuracy": 1.0, "format": 0.25}
    engine = ["engine.gpus=4", "engine.use_shm=true", "engine.overrides={data.use_shm: true}"]
    return export_verl(recipe(rewards=rewards, train={"chat_template_kwargs": {"thinking": False}}), folder, engine)


def lines_of(made, folder):
    return [line.replace(FOLDER, str(folder)) for line in made.lines]


def test_every_job_composes_and_is_valid_in_verls_own_code(exported, tmp_path):
    folder, export = exported
    asked = {"soft overlong": recipe(rewards={"accuracy": 1.0, "soft_overlong": {"args": {"soft_punish_cache": 8}}})}
    for names in itertools.product(ALGORITHMS, ENGINES, ("vllm", "sglang")):
        asked[" ".join(names)] = of_algorithm(*names)
    lines = {name: lines_of(told(export, of), folder) for name, of in asked.items()}
    ignored = [key for row in CANNOT["overrides"] for key in row["keys"] if ".model.lora." in key]
    lines["what is refused"] = [*lines["soft overlong"], *(f"{key}=8" for key in ignored)]  # verl itself would not
    (tmp_path / "jobs.json").write_text(json.dumps(lines))
    found = answer_of("compose", tmp_path / "jobs.json")
    assert len(found) == len(ALGORITHMS) * len(ENGINES) * 2 + 2
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_every_key_of_verl_beside_one_that_the_table_names_is_known_and_none_is_gone(tmp_path):
    """``left_alone.toml``: the names that a job says nothing of, by class, or by key where verl has none."""
    left = tomllib.loads(Path(__file__).with_name("left_alone.toml").read_text(encoding="utf-8"))
    named = {key for rows in TABLE["told"].values() for key, _ in cells(rows)}
    named |= {key for row in CANNOT["overrides"] for key in row["keys"] if "." in key}
    above = defaultdict(dict)  # key -> name below it -> whether verl's YAML has it, as the table says
    for key in named:
        *parts, name = key.lstrip("+").split(".")
        above[".".join(parts)][name] = not key.startswith("+")
        for end in range(1, len(parts)):
            above[".".join(parts[:end])].setdefault(parts[end], False)
    (tmp_path / "keys.json").write_text(json.dumps([*above]))
    told, theirs, wrong = defaultdict(set), defaultdict(set), []
    for key, answer in answer_of("keys", tmp_path / "keys.json").items():
        told[answer["class"]] |= above[key].keys()
        theirs[answer["class"]] |= {*answer["yaml"], *answer["besides"]}
        wrong += [f"gone: {key}.{name}" for name, there in above[key].items() if there and name not in answer["yaml"]]
    for kind in theirs.keys() | left.keys():
        known = told[kind] | set(left.get(kind, "").split())
        wrong += [f"new: {kind}.{name}" for name in sorted(theirs[kind] - known)]
        wrong += [f"gone: {kind}.{name}" for name in left.get(kind, "").split() if name not in theirs[kind]]
    assert "\n".join(wrong) == ""


def test_verls_losses_and_gradients_are_ours(exported, tmp_path):
    folder, export = exported
    cases = {}
    for name in (*ALGORITHMS, *FURTHER):
        given = of_algorithm(name) if name in ALGORITHMS else recipe(**FURTHER[name])
        arguments = training_arguments(planned_here(given), "none")
        lines = lines_of(told(export, given), folder)
        cases[name] = {"lines": lines, "settings": asdict(LossSettings.of(arguments))}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    found = answer_of("losses", tmp_path / "cases.json")
    assert set(found) == {*ALGORITHMS, *FURTHER}
    for answer in found.values():
        assert answer["theirs"] == pytest.approx(answer["ours"], rel=1e-6)
        assert answer["gradient"] == pytest.approx(0.0, abs=1e-6)
        assert answer["size"] > 1e-3


@pytest.mark.parametrize("chat", [True, False])
def test_verl_reads_the_prompts_letter_for_letter_and_scores_as_we_do(tmp_path, chat):
    rewards = {"accuracy": 1.0, "format": 0.25}
    given = recipe(rewards=rewards, data={"train": "sandbox:addition", "chat": None if chat else False})
    folder, export = export_verl(given, tmp_path / "job")
    found = answer_of("row", folder)
    first, tokenizer = export.job.train[0]["prompt"], export.job.tokenizer
    asked = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    expected = tokenizer.apply_chat_template(first, **asked) if chat else tokenizer(text=first)
    assert found["prompt"] == list(expected["input_ids"])
    assert (found["rows"], found["score"]) == pytest.approx((len(export.job.train), 1.25))


def test_a_job_is_checked_before_a_gpu_is_taken_and_leaves_nothing_in_shared_memory(exported, tmp_path):
    if beside_verl("-c", "import math_verify").returncode:
        pytest.skip("there is no math-verify beside verl: make verl-env")
    folder, _ = exported
    shared = Path("/dev") / "shm"
    before = {path.name for path in shared.iterdir()}
    done = beside_verl("-m", "perl.verl.check_job", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verl 0.9.1" in done.stdout
    assert "the rewards answer (1.25)" in done.stdout  # by algebra
    assert "not checked: the base's weights" in done.stdout
    assert {path.name for path in shared.iterdir()} - before == set()
    for number, (key, value, words) in enumerate(
        (("ray_kwargs.ray_init.num_cpus", 2, "for ever"), ("actor_rollout_ref.actor.clip_ratoi", 0.1, "clip_ratoi"))
    ):
        engine = {"name": "verl", "overrides": {key: value}}
        folder, _ = export_verl(recipe(engine=engine), tmp_path / f"job-{number}")
        done = beside_verl("-m", "perl.verl.check_job", folder)
        assert done.returncode == 2, done.stderr[-2000:]
        assert words in next(line for line in done.stderr.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize(("method", "strategy"), [("rslora", "fsdp2"), ("lora", "fsdp")])
def test_every_number_is_the_one_that_verls_own_code_trained_and_saved(tmp_path, method, strategy):
    job = a_job(tmp_path / "job", strategy, **PEFT | {"method": method})
    alpha = ALPHA * (RANK**0.5 if method == "rslora" else 1.0)
    command = [ENVIRONMENT / "bin" / "torchrun", "--standalone", "--nproc_per_node", "2", PROGRAM]
    command += [BASE_FOLDER, job / "checkpoints", str(RANK), repr(alpha), strategy, *TARGETS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    log_steps(job, 3)
    run = import_job(job, tmp_path / "run").run
    expected = load_file(job / "checkpoints" / "global_step_3" / "whole.safetensors")
    written = load_file(run.adapter / WEIGHTS)
    assert written.keys() == expected.keys()
    difference = max((written[name] - tensor).abs().max().item() for name, tensor in expected.items())
    assert difference == 0.0
    assert run.facts["trained_by"]["processes"] == 2
