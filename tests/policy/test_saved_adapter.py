"""What is wrong with a saved adapter is said in one line before any weights are loaded."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from safetensors.torch import load_file, save_file

from perl.errors import ModelError, PerlError
from perl.methods.settings import method_of
from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.model import base_fingerprint, load_base
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe.sections import ModelSection


def saved(name="sandbox:base", fingerprint=True) -> Path:
    model = load_base(ModelSection(), torch.device("cpu"))
    policy = attach_adapter(model, LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    write_adapter(policy, Path("adapter"), name, None, base_fingerprint(policy) if fingerprint else None)
    return Path("adapter")


def line(name, base=None) -> str:
    """The one line with which an adapter is refused."""
    with pytest.raises(ModelError) as caught:
        find_adapter(str(name), base)
    (said,) = str(caught.value).splitlines()
    return said


def test_an_adapter_is_known_without_loading_it():
    found = find_adapter(str(saved()), "sandbox:base")
    assert (found.name, found.folder) == ("adapter", Path("adapter"))
    assert type(found.config) is LoraConfig
    assert found.config.base_model_name_or_path == "sandbox:base"
    assert found.weights == Path("adapter/adapter_model.safetensors")
    assert found.shapes == {name: tuple(t.shape) for name, t in load_file(found.weights).items()}
    assert len(found.shapes) == 2 * 4
    assert found.base_fingerprint == base_fingerprint(load_base(ModelSection(), torch.device("cpu")))


def test_an_adapter_of_another_program_has_no_fingerprint():
    assert find_adapter(str(saved(fingerprint=False))).base_fingerprint is None


def test_a_run_is_named_where_its_adapter_is_meant():
    saved().rename("run")
    Path("whole").mkdir()
    Path("run").rename("whole/adapter")
    Path("whole/run.json").write_text("{}")
    assert find_adapter("whole").folder == Path("whole/adapter")


def test_a_home_folder_is_understood(monkeypatch):
    saved()
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert find_adapter("~/adapter").shapes


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere", "~/nowhere", "a/b/c"])
def test_a_folder_that_does_not_exist_is_refused(name):
    assert line(name) == f"peft.adapter: {name}: no such folder, and not a name on the Hub (user/name)"


@pytest.mark.parametrize("name", ["someone/adapter", "someone/adapter@main"])
def test_a_name_on_the_hub_is_refused_when_the_hub_cannot_be_reached(name):
    assert line(name).startswith("peft.adapter: someone/adapter")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_the_files_is_refused(file):
    (saved() / file).unlink()
    assert line("adapter") == f"peft.adapter: adapter holds no adapter: {file} is absent"


def test_an_empty_folder_is_refused():
    Path("adapter").mkdir()
    assert line("adapter") == "peft.adapter: adapter holds no adapter: adapter_config.json is absent"


def test_an_adapter_that_is_only_a_pickle_is_refused_and_not_opened():
    weights = saved() / "adapter_model.safetensors"
    weights.unlink()
    Path("adapter/adapter_model.bin").write_bytes(b"no pickle at all")
    assert line("adapter") == (
        "peft.adapter: adapter holds no adapter: adapter_model.safetensors is absent (its weights are pickles; save it "
        "again with PEFT)"
    )


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_weights_that_were_cut_short_are_refused(left):
    weights = saved() / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    assert line("adapter").startswith("peft.adapter: adapter cannot be read: ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"lora"', '{"peft_type": "NONSENSE"}', '{"peft_type": "LORA", "r": "many"}', "{}"]
)
def test_a_config_that_is_none_is_refused(text):
    (saved() / "adapter_config.json").write_text(text)
    with pytest.raises(PerlError) as caught:
        continue_adapter(load_base(ModelSection(), torch.device("cpu")), find_adapter("adapter"))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("made_for", "base"), [("someone/else", "sandbox:base"), ("sandbox:base", "someone/else")])
def test_an_adapter_for_another_base_is_refused_with_the_right_name(made_for, base):
    saved(made_for)
    assert line("adapter", base) == (
        f"peft.adapter: adapter was made for {made_for}, not for {base} (model.name: {made_for})"
    )


@pytest.mark.parametrize("base", [None, "/some/folder"])
def test_a_base_without_a_public_name_is_not_compared_by_name(base):
    saved("someone/else")
    assert find_adapter("adapter", base).config.base_model_name_or_path == "someone/else"


@pytest.mark.parametrize("made_for", [None, "/a/folder/of/another/machine", "./base"])
def test_an_adapter_that_names_no_public_base_is_not_compared_by_name(made_for):
    config = saved() / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": made_for}))
    assert find_adapter("adapter", "sandbox:base").shapes


def test_an_adapter_of_a_type_that_cannot_be_trained_is_found_and_its_type_refused():
    Path("adapter").mkdir()
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4).save_pretrained("adapter")
    save_file({"prompt_embeddings": torch.zeros(4, 8)}, "adapter/adapter_model.safetensors")
    with pytest.raises(PerlError, match=r"^peft_config: PROMPT_TUNING cannot be trained: ") as caught:
        method_of(find_adapter("adapter").config)
    assert len(str(caught.value).splitlines()) == 1
