"""Whatever a user names is found: a run, a checkpoint, an adapter's folder, a base; and its base with it."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.subject import find_subject
from perl.sandbox import BASE_FOLDER
from tests.saved_adapters import BASE, save_adapter

RECIPE = "model: {name: sandbox:base, dtype: float32}\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


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


def mistake(*arguments) -> str:
    with pytest.raises(PerlError) as caught:
        find_subject(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_an_adapter_folder_names_its_base(saved):
    subject = find_subject(str(saved))
    assert (subject.name, subject.base.name, subject.model) == ("lora", BASE, None)
    assert subject.adapter_sha256 == sha256(saved / "adapter_model.safetensors")
    assert subject.trained
    assert subject.folder == Path("evals/lora")


def test_a_run_has_its_results_beside_its_adapter(saved):
    run = a_run(saved)
    subject = find_subject(str(run))
    assert (subject.name, subject.base.dtype) == ("mine", "float32")
    assert subject.folder == run / "evals"
    assert subject.adapter.folder == run / "adapter"
    assert subject.adapter_sha256 == sha256(run / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(("folder", "name"), [("adapter", "mine"), ("checkpoints/checkpoint-9", "mine-checkpoint-9")])
def test_what_lies_in_a_run_has_the_base_as_the_run_loaded_it(saved, folder, name):
    run = a_run(saved)
    shutil.copytree(saved, run / folder, dirs_exist_ok=True)
    subject = find_subject(str(run / folder))
    assert (subject.name, subject.base.dtype) == (name, "float32")
    assert subject.folder == Path("evals") / name


def test_of_a_run_of_method_full_the_model_was_trained(saved):
    run = a_run(saved, method="full")
    subject = find_subject(str(run))
    assert subject.adapter is None
    assert subject.model.name == str(run / "model")
    assert subject.adapter_sha256 == sha256(run / "model" / "model.safetensors")
    assert subject.trained


@pytest.mark.parametrize("base", [BASE, "user/base", "user/base@rev"])
def test_a_base_alone(base):
    subject = find_subject(None, base)
    assert not subject.trained
    assert (subject.adapter, subject.model, subject.adapter_sha256) == (None, None, None)
    repository, _, revision = base.partition("@")
    assert (subject.base.name, subject.base.revision) == (repository, revision or None)
    assert subject.name == repository
    assert subject.folder == Path("evals") / repository.replace(":", "-")


def test_a_base_in_a_folder_is_called_by_its_last_part():
    shutil.copytree(BASE_FOLDER, "models/mine@home")
    subject = find_subject(None, "models/mine@home")
    assert (subject.base.name, subject.base.revision) == ("models/mine@home", None)
    assert subject.folder == Path("evals/mine@home")


def test_another_base_and_type_may_be_asked_for(saved):
    shutil.copytree(BASE_FOLDER, "copy")
    subject = find_subject(str(saved), "copy", "bfloat16")
    assert (subject.base.name, subject.base.dtype) == ("copy", "bfloat16")
    assert find_subject(str(a_run(saved)), None, "bfloat16").base.dtype == "bfloat16"


def test_the_folder_it_is_called_in_says_nothing_of_a_hub_id(saved, monkeypatch):
    hub = Path("hub/models--user--name/snapshots/abc")
    shutil.copytree(saved, hub)
    Path("hub/models--user--name/refs").mkdir()
    Path("hub/models--user--name/refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub").resolve()))
    run = a_run(saved, recipe="model: {name: sandbox:base, dtype: bfloat16}\n")
    monkeypatch.chdir(run)
    subject = find_subject("user/name")
    assert (subject.name, subject.base.name, subject.base.dtype) == ("user/name", BASE, "auto")
    assert subject.folder == Path("evals/user/name")


def test_nothing_is_named():
    assert mistake(None) == "--adapter: nothing to evaluate is named (or --base for a base alone)"


def test_a_run_that_is_not_done_and_has_no_checkpoint_is_to_be_finished(saved):
    run = a_run(saved, status="interrupted")
    assert mistake(str(run)) == f"{run}: has no trained adapter yet, it is interrupted (perl train finishes it)"


def test_a_whole_model_is_told_from_an_adapter(saved):
    assert mistake(str(BASE_FOLDER)) == (
        f"--adapter: {BASE_FOLDER} is a whole model, not an adapter (--base {BASE_FOLDER})"
    )
    assert mistake(None, str(saved)) == f"--base: {saved} is an adapter, no whole model (--adapter {saved})"


def test_a_folder_without_either():
    Path("empty").mkdir()
    assert mistake("empty") == "--adapter: empty holds no adapter: adapter_config.json is absent"
    assert mistake(None, "empty") == (
        "--base: empty has no config.json (the folder of a whole model, or a name on the Hub)"
    )


def test_an_adapter_that_names_no_base(saved):
    shutil.copytree(saved, "nameless")
    config = json.loads(Path("nameless/adapter_config.json").read_text())
    Path("nameless/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert mistake("nameless") == (
        "--base: nameless does not say in its adapter_config.json which base it belongs to (name it)"
    )
    assert find_subject("nameless", BASE).base.name == BASE
