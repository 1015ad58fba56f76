"""Whatever a user names is found, and what an evaluation will do known, before weights are loaded."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import perl
from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
from perl.evaluation.drawing.subject import find_subject
from perl.evaluation.scoring.protocol import generation_settings
from perl.policy.model import end_tokens, load_tokenizer
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER
from tests.saved_adapters import BASE


@pytest.fixture(autouse=True)
def weightless() -> Path:
    """The base without its weights."""
    shutil.copytree(BASE_FOLDER, "weightless")
    Path("weightless/model.safetensors").unlink()
    return Path("weightless")


def plan(adapter=None, tasks=("sandbox:addition",), k=None, output=None, **settings):
    name = None if adapter is None else str(adapter)
    return plan_evaluation(name, "weightless", tasks, k, None, output, EvalSettings(**settings))


def test_it_is_planned_without_weights(saved):
    found = plan(saved, tasks=("sandbox:chain", "sandbox:addition"), k=2, limit=3, max_new_tokens=20)
    assert [task.request.task for task in found.tasks] == ["sandbox:chain", "sandbox:addition"]
    assert [len(task.request.asked) for task in found.tasks] == [3, 3]
    assert found.policies == ("base", "adapter")
    assert found.folder == Path("evals/lora/perl")
    assert found.engine.backend == "transformers"
    assert found.longest == max(len(a.prompt_ids) for task in found.tasks for a in task.request.asked) + 20
    assert not found.folder.exists()
    lines = "\n".join(found.lines())
    for part in (
        "lora on weightless",
        "k 2",
        "sandbox:chain: 3 problems",
        "transformers, 24 completions",
        "evals/lora",
    ):
        assert part in lines


def test_what_a_preset_leaves_open_is_the_bases(weightless):
    generation = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "do_sample": True}
    (weightless / "generation_config.json").write_text(json.dumps(generation))
    own = plan(preset="base").protocol
    assert (own.temperature, own.top_k, own.top_p, own.repetition_penalty) == (0.7, 20, 0.8, 1.05)
    ours = plan(top_p=0.9).protocol
    assert (ours.temperature, ours.top_p, ours.top_k) == (0.6, 0.9, 20)
    (weightless / "generation_config.json").unlink()
    assert plan(preset="base").protocol.temperature == 1.0


def test_a_completion_ends_at_the_tokenizers_end_and_at_those_the_base_declares(weightless):
    (weightless / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 9]}))
    [task] = plan().tasks
    assert task.request.end_token_ids == (1, 7, 9)
    section = ModelSection(name="weightless")
    tokenizer = load_tokenizer(section)
    (weightless / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_tokens(tokenizer, generation_settings(section)) == (1, 5)
    assert end_tokens(tokenizer, {}) == (1,)
    (weightless / "generation_config.json").unlink()  # a model that is loaded takes its config's, and so do scores
    config = weightless / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [1, 6]}))
    assert plan().tasks[0].request.end_token_ids == (1, 6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": None}, "perl.evaluate(tasks): must be text or a list, not "),
        ({"tasks": [3]}, "perl.evaluate(tasks): must be text, not "),
        ({"adapter": []}, "adapter: an empty list names no adapter"),
        ({"k": "2"}, "perl.evaluate(k): must be a whole number, not '2'"),
        ({"settings": {"limit": 2}}, "perl.evaluate(settings): must be EvalSettings(...), not {'limit': 2}"),
        ({"settings": EvalSettings(batch_size=0)}, "--batch-size: 0 is too few (at least 1)"),
        ({"tasks": Path("gone.jsonl")}, "--tasks: no such file: gone.jsonl"),
    ],
)
def test_an_argument_of_a_wrong_type_is_a_line_with_its_name(given, said):
    with pytest.raises(PerlError) as caught:
        perl.evaluate(**{"base": "weightless", "tasks": ["sandbox:addition"], **given})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


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
