"""The recipe that is published trains the same elsewhere, and names nothing of this machine."""

import pytest
import yaml

from perl.hub.card.published import public_recipe, without_paths
from perl.hub.gate import MachineFacts, find_leaks
from perl.recipe import load_recipe

PRIVATE = {
    "model": {"name": "/home/alice/models/base"},
    "peft": {"adapter": "/home/alice/runs/old/adapter"},
    "data": {"train": "/home/alice/data/problems.jsonl", "system_prompt": "/no_think"},
    "train": {"output_dir": "/home/alice/runs/new", "learning_rate": 2e-5, "seed": 7, "run_name": "alice-7"},
    "rollout": {
        "backend": "vllm-server",
        "servers": ["http://gpu-17.alice.org:8000"],
        "sync_folder": "/mnt/share/sync",
        "temperature": 0.7,
        "prefetch": 1,
    },
    "eval": {"data": "/home/alice/tasks", "k": 8},
    "rewards": {"/home/alice/own.py:reward": 1.0},
    "hub": {"repo_id": "alice/adapter", "push": "end", "private": True},
}


@pytest.mark.parametrize("source", ["quickstart", {"data": {"train": "sandbox:counting"}, "rollout": {"top_p": 0.9}}])
def test_nothing_of_this_machine_is_in_it_and_it_is_the_same_recipe_otherwise(source, tmp_path):
    before = load_recipe(PRIVATE)
    text = public_recipe(before)
    machine = MachineFacts(users=("alice",), hosts=("gpu-17.alice.org",))
    assert find_leaks("perl_recipe.yaml", text, machine) == []
    assert "alice" not in text
    assert "gpu-17" not in text
    (tmp_path / "perl_recipe.yaml").write_text(text)
    after = load_recipe(tmp_path / "perl_recipe.yaml")
    assert after.model.name == "base"
    assert after.peft.adapter == "adapter"
    assert after.data.train.name == "problems.jsonl"
    assert after.data.system_prompt == "/no_think"
    assert list(after.rewards) == ["own.py:reward"]
    assert (after.rollout.temperature, after.eval.k) == (0.7, 8)
    assert dict(after.train) == {"learning_rate": 2e-5, "seed": 7}
    assert (after.hub.repo_id, after.hub.push) == (None, None)
    before = load_recipe(source)
    (tmp_path / "again.yaml").write_text(public_recipe(before))
    after = load_recipe(tmp_path / "again.yaml").as_dict()
    wanted = before.as_dict()
    for recipe in (after, wanted):
        for key in ("output_dir", "report_to"):
            recipe["train"].pop(key, None)
    assert after == wanted


NAMES = [("data/train.jsonl", "train.jsonl"), ("./my data (2).csv", "my-data-2-.csv")]


@pytest.mark.parametrize(("name", "public"), NAMES)
def test_a_data_file_has_a_name_that_a_card_can_show(name, public):
    text = public_recipe(load_recipe({"data": {"train": {"name": name}, "eval": "10%"}}))
    after = load_recipe(yaml.safe_load(text)).data
    assert (after.train.name, after.eval.name) == (public, public)


def test_of_a_path_the_last_part_is_left():
    for text, public in (
        ("/home/alice/b", "b"),
        ("~/x/y", "y"),
        ("../x/y.jsonl", "y.jsonl"),
        ("C:\\Users\\a\\b", "b"),
        ("user/name", "user/name"),
        ("/no_think", "/no_think"),
        (".*\\.(q_proj|v_proj)", ".*\\.(q_proj|v_proj)"),
        ("Think. /a/b is a path", "Think. /a/b is a path"),
        ("a\n/b/c", "a\n/b/c"),
    ):
        assert without_paths({"k": [text], "n": 1, "none": None}) == {"k": [public], "n": 1, "none": None}
