"""lighteval itself asks an adapter that was pushed, on our tasks, by the command that the documentation names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.lighteval.model_name import named_as_model, parse_model_name
from perl.evaluation.lighteval.score import lighteval_installed
from perl.evaluation.results import read_results
from perl.evaluation.subject import find_subject
from perl.policy.model import load_empty_base
from tests.conftest import CHECKOUT
from tests.saved_adapters import save_adapter

needs_lighteval = pytest.mark.skipif(not lighteval_installed(), reason="lighteval is not installed")

TASK, REPO = "sandbox:addition", "user/tiny"
EVAL = CHECKOUT / "eval"
ASKED = {"temperature": "1", "top_p": "0.9", "max_new_tokens": "48", "seed": "7"}
MODEL = ",".join([REPO, *(f"{name}={value}" for name, value in ASKED.items())])


@pytest.fixture
def pushed(hub, tmp_path):
    """A Hub with an adapter of the sandbox's base."""
    folder = tmp_path / "adapter"
    save_adapter(folder)
    hub.create(REPO, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    return hub


def lighteval(environment, cwd: Path, model: str, task: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perl.evaluation.lighteval", "custom", model]
    command += [str(EVAL / "lighteval" / "perl_model.py"), task, "--custom-tasks", str(EVAL / "sandbox.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


@needs_lighteval
def test_lighteval_finds_the_score_that_perl_eval_finds_with_the_same_seeds(pushed, hub_env, perl_command, tmp_path):
    """All 500 problems; each completion has its own seed, so the two draw the same ones."""
    environment = {**hub_env(pushed), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    ran = lighteval(environment, tmp_path, MODEL, f"{TASK}|0", "--output-dir", "out", "--save-details")
    assert ran.returncode == 0, ran.stderr
    [written] = (tmp_path / "out" / "results" / REPO).glob("results_*.json")
    found = json.loads(written.read_text())
    options = [part for name, value in ASKED.items() for part in (f"--{name.replace('_', '-')}", value)]
    ours = ["eval", "--adapter", REPO, "--tasks", TASK, "--k", "1", "--no-base", "--output", "ours", *options]
    assert perl_command(*ours, cwd=tmp_path, env=environment).returncode == 0
    results = read_results(tmp_path / "ours")
    task = results.task(TASK)
    assert 0.1 < task.adapter.accuracy < 0.95
    assert (task.lighteval["adapter"].only_ours, task.lighteval["adapter"].only_lighteval) == (0, 0)
    theirs = found["results"][f"{TASK}|0"]
    assert theirs["avg@n:n=1"] == pytest.approx(task.adapter.accuracy, abs=1e-12)
    assert theirs["avg@n:n=1_stderr"] == pytest.approx(task.adapter.stderr)
    assert theirs == pytest.approx(dict(task.lighteval["adapter"].metrics))
    told = found["config_general"]["model_config"]
    assert (told["model_name"], told["policy"]) == (REPO, results.subject["policy"])
    assert told["adapter_sha256"] == results.subject["adapter_sha256"]
    assert {name: told["protocol"][name] for name in ASKED} == {name: float(value) for name, value in ASKED.items()}
    assert list((tmp_path / "out" / "details").rglob("*.parquet"))
    # What a mistake looks like there: a line.
    refused = lighteval(environment, tmp_path, MODEL, f"{TASK}|2", "--max-samples", "4")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"error: {TASK}|2: puts no examples before a question (")
    assert "Traceback" not in refused.stderr


@needs_lighteval
def test_the_command_that_is_documented_is_the_one_that_was_tried():
    named = r"python -m perl\.evaluation\.lighteval custom (\S+) eval/lighteval/perl_model\.py"
    for page in (EVAL / "README.md", CHECKOUT / "docs" / "evaluation.md"):
        assert re.search(named, page.read_text()), page
    assert (EVAL / "lighteval" / "perl_model.py").is_file()


def test_a_models_name_has_settings_behind_commas():
    adapter, base, settings = parse_model_name("user/tiny,base=a/b,temperature=0.5,seed=3,dtype=float32,preset=greedy")
    assert (adapter, base) == ("user/tiny", "a/b")
    assert (settings.temperature, settings.seed, settings.dtype, settings.preset) == (0.5, 3, "float32", "greedy")
    assert parse_model_name("base=a/b")[:2] == (None, "a/b")
    assert parse_model_name("runs/mine")[:2] == ("runs/mine", None)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("x,temprature=1", "MODEL: unknown setting 'temprature' (did you mean temperature?)"),
        ("x,seed=one", "MODEL: seed: 'one' is not a number"),
        ("x,dtype=half", "MODEL: dtype: 'half' is none of auto, float32, bfloat16, float16"),
        ("x,device=tpu", "MODEL: device: 'tpu' is none of auto, cpu"),
    ],
)
def test_a_setting_that_cannot_be_read_is_one_line(name, line):
    with pytest.raises(PerlError) as caught:
        parse_model_name(name)
    assert str(caught.value) == line


def test_what_cannot_be_found_is_named_as_the_model(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PerlError) as caught, named_as_model():
        find_subject(str(tmp_path / "empty"))
    assert str(caught.value).startswith("MODEL: ")
    with pytest.raises(PerlError) as caught, named_as_model():
        load_empty_base(find_subject(None, str(tmp_path / "nowhere")).base)
    assert str(caught.value).startswith("MODEL: base: ")


def test_without_lighteval_its_command_says_how_to_install_it(tmp_path):
    (tmp_path / "lighteval.py").write_text("")  # found before the package, and no package
    code = "import sys; sys.modules['lighteval'] = None; from perl.evaluation.lighteval.__main__ import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=dict(os.environ)
    )
    assert ran.returncode == 2
    [line] = [line for line in ran.stderr.splitlines() if line]
    assert "pip install 'perl-rl[eval]'" in line
