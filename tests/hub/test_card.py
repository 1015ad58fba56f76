"""The card of an adapter says what is known of it, in numbers as given, and nothing else."""

import itertools
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from perl.adapter import attach_adapter
from perl.adapter_files import write_adapter
from perl.hub.card import CardFacts, TaskFacts, render_card
from perl.methods.settings import adaptation
from perl.model import load_base
from perl.recipe.sections import ModelSection, PeftSection
from perl.sandbox import BASE_NAME

TASK = TaskFacts(
    task="sandbox:addition",
    base=0.25,
    base_stderr=0.0123,
    adapter=0.75,
    stderr=0.0376,
    k=4,
    n=256,
    base_length=21.31,
    adapter_length=42.77,
)
FULL = CardFacts(
    base="owner/base-7b",
    revision="0123abcd",
    name="my-adapter",
    repo_id="me/my-adapter",
    method="dora",
    dataset="someone/problems",
    trainable_parameters=77_824,
    total_parameters=1_000_000,
    steps=123,
    seed=4711,
    settings={"rank": 16, "learning rate": "1e-05"},
    rewards={"accuracy": 1.0, "format": 0.2},
    reward_first=0.125,
    reward_last=0.875,
    seconds=3661.4,
    tasks=(TASK,),
    versions={"torch": "2.13.0", "peft": "0.21.2"},
)
# What each fact that may be unknown looks like on the card.
SHOWN = {
    "revision": ["0123abcd"],
    "name": ["# my-adapter"],
    "repo_id": ['"me/my-adapter"'],
    "method": ["A dora adapter", "| method | dora |", "- dora"],
    "dataset": ["on `someone/problems`", "- someone/problems"],
    "trainable_parameters": ["| trainable parameters | 77,824"],
    "total_parameters": ["(7.78 % of all)"],
    "steps": ["| optimizer steps | 123 |"],
    "seed": ["| seed | 4711 |"],
    "settings": ["| rank | 16 |", "| learning rate | 1e-05 |"],
    "rewards": ["| rewards (weight) | accuracy (1.0), format (0.2) |"],
    "reward_first": ["| mean reward, first and last step | 0.125, 0.875 |"],
    "reward_last": ["| mean reward, first and last step | 0.125, 0.875 |"],
    "seconds": ["| wall time | 3661 s |"],
    "tasks": ["## Results", "| held-out task |", "sandbox:addition", "standard error"],
    "versions": ["Versions: torch 2.13.0, peft 0.21.2."],
}
OPTIONAL = [f for f in fields(CardFacts) if f.name != "base"]
UNFINISHED = [
    "None",
    "nan",
    "TODO",
    "{{",
    "{%",
    "}}",
    "[More Information Needed]",
    "<!--",
    "Undefined",
    "MISSING",
    "``",
]


def without(facts: CardFacts, *names: str) -> CardFacts:
    unknown = {f.name: f.default if f.default is not MISSING else f.default_factory() for f in OPTIONAL}
    return replace(facts, **{name: unknown[name] for name in names})


def front_matter_of(card: str) -> dict:
    start, front_matter, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front_matter)


def assert_finished(card: str) -> None:
    """Nothing is left to fill in, and every table has rows of equal width under its head."""
    body = card.replace("```", "'''")
    assert [mark for mark in UNFINISHED if mark in body] == []
    assert front_matter_of(card)["library_name"] == "peft"
    assert len(re.findall(r"^# ", card.split("'''")[0], re.MULTILINE)) >= 1
    for table in re.findall(r"(?:^\|.*\|\n)+", card, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
        assert len(table.splitlines()) > 2, f"an empty table:\n{table}"


def python_block(card: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return block


def test_a_full_card_shows_every_fact():
    card = render_card(FULL)
    assert set(SHOWN) == {f.name for f in OPTIONAL}
    missing = [text for texts in SHOWN.values() for text in texts if text not in card]
    assert missing == []
    assert_finished(card)


@pytest.mark.parametrize("name", SHOWN)
def test_an_unknown_fact_is_left_out(name):
    card = render_card(without(FULL, name))
    assert [text for text in SHOWN[name] if text in card] == []
    assert_finished(card)


def test_any_two_facts_may_be_unknown():
    pairs = list(itertools.combinations(SHOWN, 2))
    assert len(pairs) == 120
    for pair in pairs:
        assert_finished(render_card(without(FULL, *pair)))


def test_a_card_of_which_nothing_but_the_base_is_known_has_no_empty_parts():
    assert_finished(render_card(CardFacts(base="owner/base-7b")))


def test_a_dropped_fact_takes_no_other_with_it():
    belongs_with = {"trainable_parameters": {"total_parameters"}, "reward_first": {"reward_last"}}
    belongs_with["reward_last"] = {"reward_first"}
    for name in SHOWN:
        card = render_card(without(FULL, name))
        others = {other for other in SHOWN if other != name} - belongs_with.get(name, set())
        assert [other for other in others if not all(text in card for text in SHOWN[other])] == []


def test_scores_stand_side_by_side_as_given():
    row = next(line for line in render_card(FULL).splitlines() if "sandbox:addition" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["sandbox:addition, avg@4 over 256 problems", "0.250 ± 0.012", "0.750 ± 0.038", "21.3 → 42.8"]


def test_an_unknown_standard_error_is_left_out():
    one = replace(TASK, task="other", base_stderr=None, stderr=None)
    row = next(line for line in render_card(replace(FULL, tasks=(TASK, one))).splitlines() if "| other" in line)
    assert row.split("|")[2:4] == [" 0.250 ", " 0.750 "]


def test_standard_errors_are_explained_only_where_there_are_some():
    none = replace(TASK, base_stderr=None, stderr=None)
    assert "±" in render_card(FULL)
    assert "±" not in render_card(replace(FULL, tasks=(none,)))


def test_the_front_matter_names_a_base_and_data_of_the_hub():
    assert front_matter_of(render_card(FULL)) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["perl-rl", "reinforcement-learning", "grpo", "dora"],
        "base_model": "owner/base-7b",
        "base_model_relation": "adapter",
        "datasets": ["someone/problems"],
    }


@pytest.mark.parametrize(
    "base", [BASE_NAME, "./models/tiny", "./tiny", "../tiny", "/data/owner/tiny", "~/tiny", "/tiny", "a/b/c", "tiny/"]
)
def test_a_base_that_is_not_on_the_hub_is_no_base_model(base):
    card = render_card(replace(FULL, base=base))
    assert "base_model" not in front_matter_of(card)
    if base != BASE_NAME:
        assert f"`{Path(base).name}`" in card
        assert base not in card


def test_a_folder_that_looks_like_a_hub_name_is_no_base_model(tmp_path):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    card = render_card(replace(FULL, base="models/tiny", revision=None))
    assert "base_model" not in front_matter_of(card)


@pytest.mark.parametrize("dataset", ["data/train.jsonl", "data/train.parquet", "./train.csv", "/data/me/train.json"])
def test_a_file_is_no_data_set_of_the_hub_and_its_folder_stays_private(dataset):
    card = render_card(replace(FULL, dataset=dataset))
    assert "datasets" not in front_matter_of(card)
    assert f"`{Path(dataset).name}`" in card
    assert dataset not in card


def test_the_sandboxs_data_is_named_but_is_no_data_set_of_the_hub():
    card = render_card(replace(FULL, dataset="sandbox:chain"))
    assert "on `sandbox:chain`" in card
    assert "datasets" not in front_matter_of(card)


def test_a_setting_with_a_bar_keeps_the_table_whole():
    card = render_card(replace(FULL, settings={"target_modules": r".*\.(q_proj|v_proj)", "rank": 8}))
    assert_finished(card)
    assert "q_proj" in card
    assert "v_proj" in card


def test_characters_of_html_and_yaml_come_through():
    card = render_card(replace(FULL, name='a: "b" & <c>', method="x: y"))
    assert '# a: "b" & <c>' in card
    assert front_matter_of(card)["tags"][-1] == "x: y"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, 'from_pretrained("owner/base-7b", revision="0123abcd")'),
        ({"revision": None}, 'from_pretrained("owner/base-7b")'),
        ({"base": "/data/me/tiny", "revision": None}, 'from_pretrained("tiny")'),
    ],
)
def test_the_snippet_loads_the_base_at_its_revision(changed, line):
    block = python_block(render_card(replace(FULL, **changed)))
    assert f"base = AutoModelForCausalLM.{line}\n" in block
    compile(block, "card", "exec")


def test_the_snippet_loads_an_adapter_of_the_sandbox(tmp_path):
    policy = attach_adapter(load_base(ModelSection(), torch.device("cpu")), adaptation(PeftSection(rank=4)))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    write_adapter(policy, tmp_path / "adapter", BASE_NAME, None)
    block = python_block(render_card(CardFacts(base=BASE_NAME)))
    assert '"path/to/this/folder"' in block
    names = {}
    exec(block.replace("path/to/this/folder", str(tmp_path / "adapter")), names)  # noqa: S102 (what a reader would do)
    ids = torch.tensor([[7, 78, 8, 86]])
    with torch.no_grad():
        loaded = names["model"].float()(ids).logits
        expected = policy(ids).logits
        with policy.disable_adapter():
            untrained = policy(ids).logits
    torch.testing.assert_close(loaded, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(untrained, expected, atol=1e-2)
