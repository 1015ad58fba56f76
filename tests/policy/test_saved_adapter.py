"""What is wrong with a saved adapter is said in one line before any weights are loaded."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from perl.errors import ModelError
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_base
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


def test_an_adapter_is_known_without_loading_it(monkeypatch):
    """By its folder, the home folder's, or the run that holds it."""
    found = find_adapter(str(saved()), "sandbox:base")
    assert (found.name, found.folder) == ("adapter", Path("adapter"))
    assert type(found.config) is LoraConfig
    assert found.config.base_model_name_or_path == "sandbox:base"
    assert found.weights == Path("adapter/adapter_model.safetensors")
    assert found.shapes == {name: tuple(t.shape) for name, t in load_file(found.weights).items()}
    model = load_base(ModelSection(), torch.device("cpu"))
    adapted = [layer for name, layer in model.named_modules() if name.endswith("q_proj")]
    assert len(found.shapes) == 2 * len(adapted)
    numbers = sum(math.prod(shape) for shape in found.shapes.values())  # of rank 3
    assert numbers == sum(3 * (layer.in_features + layer.out_features) for layer in adapted)
    assert found.base_fingerprint == base_fingerprint(load_base(ModelSection(), torch.device("cpu")))
    assert find_adapter(str(saved(fingerprint=False))).base_fingerprint is None
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert find_adapter("~/adapter").shapes == found.shapes
    Path("whole").mkdir()
    Path("adapter").rename("whole/adapter")
    Path("whole/run.json").write_text("{}")
    assert find_adapter("whole").folder == Path("whole/adapter")


def test_what_holds_no_adapter_is_refused_in_a_line_that_names_what_is_missing():
    for name in ("nowhere", "./nowhere", "/nowhere", "~/nowhere", "a/b/c"):
        assert line(name) == f"peft.adapter: {name}: no such folder, and not a name on the Hub (user/name)"
    for name in ("someone/adapter", "someone/adapter@main"):  # the Hub cannot be reached
        assert line(name).startswith("peft.adapter: someone/adapter")
    Path("adapter").mkdir()
    assert line("adapter") == "peft.adapter: adapter holds no adapter: adapter_config.json is absent"
    config, weights = (saved() / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    there = {file: file.read_bytes() for file in (config, weights)}
    for file, content in there.items():
        file.unlink()
        assert line("adapter") == f"peft.adapter: adapter holds no adapter: {file.name} is absent"
        file.write_bytes(content)
    for left in (0, 5, 100, -1):
        weights.write_bytes(there[weights][:left])
        assert line("adapter").startswith("peft.adapter: adapter cannot be read: "), left
    weights.unlink()
    Path("adapter/adapter_model.bin").write_bytes(b"no pickle at all")
    assert line("adapter") == (
        "peft.adapter: adapter holds no adapter: adapter_model.safetensors is absent (its weights are pickles; save it "
        "again with PEFT)"
    )


def test_bases_are_compared_by_their_public_names():
    config = saved() / "adapter_config.json"
    facts = json.loads(config.read_text())
    for made_for, base, fits in (
        ("someone/else", "sandbox:base", False),
        ("sandbox:base", "someone/else", False),
        *(("someone/else", base, True) for base in (None, "/some/folder")),
        *((made_for, "sandbox:base", True) for made_for in (None, "/a/folder/of/another/machine", "./base")),
    ):
        config.write_text(json.dumps({**facts, "base_model_name_or_path": made_for}))
        if fits:
            found = find_adapter("adapter", base)
            assert found.shapes
            assert found.config.base_model_name_or_path == made_for
        else:
            assert line("adapter", base) == (
                f"peft.adapter: adapter was made for {made_for}, not for {base} (model.name: {made_for})"
            )
