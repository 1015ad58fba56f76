"""Whatever a user names is found: a run, a checkpoint, an adapter's folder, a base; and its base with it."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from perl.evaluation.drawing.subject import find_subject
from perl.sandbox import BASE_FOLDER
from tests.saved_adapters import BASE

RECIPE = "model: {name: sandbox:base, dtype: float32}\n"


def a_run(saved: Path, name="runs/mine", method="lora", status="done", recipe=RECIPE) -> Path:
    run = Path(name)
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"status": status, "method": method}))
    (run / "recipe.yaml").write_text(recipe)
    if status == "done" and method == "full":
        shutil.copytree(BASE_FOLDER, run / "model")
    elif status == "done":
        shutil.copytree(saved, run / "adapter")
    return run


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("method", "named", "name", "folder", "weights"),
    [
        ("lora", "runs/mine", "mine", "runs/mine/evals", "adapter/adapter_model.safetensors"),
        ("lora", "runs/mine/adapter", "mine", "evals/mine", "adapter/adapter_model.safetensors"),
        ("full", "runs/mine", "mine", "runs/mine/evals", "model/model.safetensors"),
        ("lora", "elsewhere/lora", "lora", "evals/lora", "../../elsewhere/lora/adapter_model.safetensors"),
    ],
    ids=["run", "its adapter", "a run of method full", "an adapter's folder"],
)
def test_what_lies_in_a_run_has_the_base_as_the_run_loaded_it_and_another_adapter_names_its_own(
    saved, method, named, name, folder, weights
):
    run = a_run(saved, method=method)
    shutil.copytree(saved, "elsewhere/lora")
    subject = find_subject(named)
    dtype = "float32" if named.startswith("runs") else "auto"
    assert (subject.name, subject.base.name, subject.base.dtype) == (name, BASE, dtype)
    assert subject.folder == Path(folder)
    assert subject.adapter_sha256 == sha256(run / weights)
    assert subject.trained
    where = Path(subject.model.name) if method == "full" else subject.adapter.folder
    assert where.resolve() == (run / weights).parent.resolve()
    assert (subject.adapter is None) == (method == "full") == (subject.model is not None)


@pytest.mark.parametrize(
    ("base", "repository", "revision", "name", "folder"),
    [
        (BASE, BASE, None, BASE, "evals/sandbox-base"),
        ("user/base", "user/base", None, "user/base", "evals/user/base"),
        ("user/base@rev", "user/base", "rev", "user/base", "evals/user/base"),
        ("models/mine@home", "models/mine@home", None, "mine@home", "evals/mine@home"),  # a folder
    ],
)
def test_a_base_alone(base, repository, revision, name, folder):
    shutil.copytree(BASE_FOLDER, "models/mine@home")
    subject = find_subject(None, base)
    assert not subject.trained
    assert (subject.adapter, subject.model, subject.adapter_sha256) == (None, None, None)
    assert (subject.base.name, subject.base.revision) == (repository, revision)
    assert (subject.name, subject.folder) == (name, Path(folder))
