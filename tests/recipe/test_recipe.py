"""A recipe is checked as a whole: what it takes, what it refuses, and that what it saves is what it is."""

import dataclasses
import types
import typing
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from perl.algorithms.registry import loss_mistakes
from perl.errors import Mistake, RecipeError
from perl.recipe import Recipe, load_recipe
from perl.recipe.assets import packaged_recipes
from perl.recipe.places import REFUSED
from perl.recipe.sections import FIELD_OF_SETTING, SECTIONS
from tests.oracles.batch_plans import search

EVERYTHING = """\
model: {name: org/base, revision: v1, dtype: bfloat16, attn_implementation: sdpa}
peft: {method: dora, rank: 4, alpha: 8, dropout: 0.1, target_modules: [q_proj, v_proj], kwargs: {bias: none}}
data:
  train: {name: org/data, subset: main, split: "train[:80%]", revision: abc, columns: {prompt: q, answer: a}, limit: 9}
  eval: heldout.jsonl
  prompt_template: "Solve:\\n{prompt}\\nauf Größe {unit}"
  system_prompt: "Bitte kurz. No: 'quotes' \\"too\\""
  chat: true
  drop_overlap: true
rewards: {accuracy: 1, "my.mod:f": {weight: -0.5, args: {limit: 3}}}
train: {prompts_per_step: 4, num_generations: 4, learning_rate: 1e-5, max_steps: 3, report_to: [], eval_strategy: "no"}
rollout: {temperature: 0.7, top_p: 0.9, top_k: 20, min_p: 0.1, repetition_penalty: 1.1, max_completion_length: 99}
eval: {enabled: false, k: 8, limit: null, temperature: 0, top_p: 0.95, max_completion_length: 7, batch_size: 3, seed: 5}
hub: {repo_id: me/mine}
engine: {device: cpu, threads: 2}
"""


def loaded(text, overrides=(), checks=()):
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    return load_recipe("recipe.yaml", overrides, checks)


def lines_of(text, overrides=(), checks=()):
    with pytest.raises(RecipeError) as caught:
        loaded(text, overrides, checks)
    return str(caught.value).splitlines()


def written_and_read(recipe):
    path = Path("saved") / f"{recipe.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    return load_recipe(path)


def test_nothing_at_all_is_a_recipe_whose_folder_is_the_one_that_train_names():
    recipe = load_recipe({})
    assert recipe == Recipe("recipe")
    assert list(recipe.rewards) == ["accuracy"]
    assert recipe.output_dir == Path("runs/recipe")
    assert load_recipe({"train": {"output_dir": "here/there"}}).output_dir == Path("here/there")
    assert load_recipe("quickstart").output_dir == Path("runs/quickstart")
    Path("my.recipe.yaml").write_text("model: {}\n", encoding="utf-8")
    assert load_recipe("my.recipe.yaml").output_dir == Path("runs/my.recipe")  # the file's name without suffix


def test_a_saved_recipe_is_the_same_recipe():
    """Also every packaged one, and text that looks like another value; it names every setting of every section."""
    for text in ("model: {}\n", EVERYTHING, "extends: quickstart\npeft: {rank: 3}\n"):
        recipe = loaded(text)
        again = written_and_read(recipe)
        assert again == recipe, text
        assert again.to_yaml() == recipe.to_yaml(), text
    packaged = list(packaged_recipes())
    assert "quickstart" in packaged
    assert [name for name in packaged if written_and_read(load_recipe(name)) != load_recipe(name)] == []
    numbers = ("no", "on", "12", "010", "0o17", "1e5", "7e12345", "1.5", "1:30", "null", "~", "", "=")
    for text in (*numbers, "2001-01-01", "a: b", "- a"):
        assert written_and_read(load_recipe({"model": {"revision": text}})).model.revision == text
    saved = yaml.safe_load(load_recipe({}).to_yaml())
    where_there_is_one = {"teacher", "alarms", "prompts", "agent"}
    assert set(saved) == {*SECTIONS, "rewards", "train"} - where_there_is_one
    further = {"teacher": {"hint": "h"}, "alarms": {"stop": ["rewards_flat"]}, "prompts": {"memory": True}}
    further |= {"agent": {"tools": ["perl.sandbox.tools:multiply"]}}
    further |= {"engine": {"name": "verl"}}  # whose own keys are saved with it alone
    saved |= yaml.safe_load(load_recipe(further).to_yaml())
    settings = {name: set(model.model_fields) for name, model in SECTIONS.items()}
    assert {name: set(saved[name]) for name in SECTIONS} == settings


def sample(name, hint):
    """A value that this training argument may have, other than null where there is one."""
    special = {
        **{"loss_type": "dapo", "scale_rewards": "batch", "importance_sampling_level": "sequence"},
        **{"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "rloo", "kl_estimator": "k1"},
        **{"dppo_divergence": "kl", "prompts_per_step": 2, "num_generations": 4, "per_device_train_batch_size": 8},
        **{"gradient_accumulation_steps": 2, "peft_target_modules": ["q_proj"], "top_p": 0.5, "min_p": 0.5},
        **{"peft_dropout": 0.5, "quantization": "nf4", "reference": "rolling:8"},
        **{"strategy": "fsdp2", "shards": "all"},
        **{"rollout_backend": "vllm-server", "rollout_sync": "merged", "rollout_in_flight": "continue"},
        **{"rollout_servers": ["http://localhost:8000"], "vllm_importance_sampling_mode": "token_mask"},
    }
    if name in special:
        return special[name]
    values = {bool: True, int: 8, float: 0.25, str: "text", dict: {"a": 1}, list: ["a"]}
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for part in parts:
        origin = typing.get_origin(part) or part
        if origin is typing.Literal:
            return typing.get_args(part)[0]
        if origin is list and typing.get_args(part) and typing.get_args(part)[0] in values:
            return [values[typing.get_args(part)[0]]]
        if origin is dict and typing.get_args(part):
            return {"a": values.get(typing.get_args(part)[1], 1)}
        if origin in values:
            return values[origin]
    return "text"


def test_train_takes_every_field_of_the_trainers_arguments():
    from perl.trainer.arguments.config import PeftRLConfig

    hints = typing.get_type_hints(PeftRLConfig)
    homes = {f"peft_{key}": ("peft", key) for key in SECTIONS["peft"].model_fields if key != "adapter"}
    homes |= {name: (section, name) for section, name in (("peft", "adapter"), ("model", "quantization"))}
    homes |= {name: ("engine", name) for name in ("strategy", "shards")}
    mirrored = ("rollout", "teacher", "prompts", "agent")
    homes |= {field: home for home, field in FIELD_OF_SETTING.items() if home[0] in mirrored}
    served = {"rollout_backend": "vllm-server", "rollout_servers": ["http://localhost:8000"]}
    fields = [f.name for f in dataclasses.fields(PeftRLConfig) if f.init and not f.name.startswith("_")]
    names = [name for name in fields if name not in {*REFUSED, "algorithm"}]  # tests/recipe/test_algorithm_name.py
    assert {"adam_beta2", "mask_truncated_completions", "lr_scheduler_type", "peft_rank", "temperature"} <= set(names)
    for name in names:
        value = sample(name, hints[name])
        together = served if name in ("rollout_backend", "rollout_servers", "rollout_prefetch") else {}
        together = {**served, "rollout_prefetch": 1} if name == "rollout_in_flight" else together
        together = {"teacher_system_prompt": "s"} if name in ("teacher_weight", "teacher_top_k") else together
        of_memory, of_curriculum = name in ("prompt_explore", "prompt_floor"), name.startswith("prompt_curriculum_")
        together = {"prompt_memory": True} if of_memory else {"prompt_curriculum": "x"} if of_curriculum else together
        recipe = load_recipe({"train": {**together, name: value}})
        if name in homes:
            section, key = homes[name]
            assert getattr(getattr(recipe, section), key) == value, name
            assert name not in recipe.train
        else:
            assert dict(recipe.train) == {name: value}, name
    assert len(names) > 150


def test_a_field_that_would_spoil_a_run_is_refused_once_with_what_to_do_instead():
    assert REFUSED
    for name, instead in REFUSED.items():
        lines = lines_of(f"model: {{}}\ntrain:\n  seed: 1\n  {name}: true\n")
        assert lines[0] == f"recipe.yaml:4: train.{name}: has no place in a recipe ({instead})"
    for value in ("5", "[1]", "{a: 1}", "null", "text", "true"):
        assert len(lines_of(f"train: {{hub_token: {value}}}\n")) == 1, value


ELSEWHERE = (
    ("peft_rank", "4", "peft", "rank"),
    ("peft_target_modules", "[q_proj]", "peft", "target_modules"),
    ("peft_type", "C3A", "peft", "type"),
    ("adapter", "folder/adapter", "peft", "adapter"),
    ("temperature", "0.5", "rollout", "temperature"),
    ("max_completion_length", "9", "rollout", "max_completion_length"),
)


def test_a_field_of_another_section_may_stand_in_train_also_where_that_is_empty_and_is_written_once(tmp_path):
    for field, value, section, key in ELSEWHERE:
        through_train = loaded(f"train: {{{field}: {value}}}\n")
        direct = loaded(f"{section}: {{{key}: {value}}}\n")
        twice_the_same = loaded(f"{section}: {{{key}: {value}}}\ntrain: {{{field}: {value}}}\n")
        assert through_train == direct == twice_the_same, field
        assert getattr(getattr(direct, section), key) == yaml.safe_load(value)
        assert not through_train.train, field
    path = tmp_path / "hot.yaml"
    for rollout in ("", "rollout:\n", "rollout: {}\n", "rollout: {top_p: 0.9}\n"):
        path.write_text(f"{rollout}train: {{temperature: 1.3}}\n", encoding="utf-8")
        for found in (load_recipe(path), load_recipe(load_recipe(path)), load_recipe(path, ["train.max_steps=3"])):
            assert found.rollout.temperature == 1.3
            assert "temperature" not in found.train
            assert found.to_yaml().count("temperature: 1.3") == 1
    for section, name, value in (("peft", "peft_rank", 3), ("rollout", "max_completion_length", 77)):
        path.write_text(f"{section}:\ntrain: {{{name}: {value}}}\n", encoding="utf-8")
        found = load_recipe(path)
        assert getattr(getattr(found, section), name.removeprefix("peft_")) == value
        assert name not in found.train


def test_all_mistakes_of_a_file_are_said_together_with_those_that_a_later_stage_finds():
    text = """\
pfet: {rank: 8}
peft:
  rnak: 8
  dropout: 1.5
data:
  train: {nmae: x}
rewards: {accuracy: {wieght: 1}, format: lots, "m:f": 1}
train: {learning_rate: fast, sead: 1, push_to_hub: true, loss_type: dapoo}
eval: {enabled: maybe}
"""
    lines = lines_of(text, checks=(loss_mistakes,))
    assert {line.split(": ")[1] for line in lines} == {
        *("pfet", "peft.rnak", "peft.dropout", "data.train.nmae", "data.train.name", "rewards.accuracy.wieght"),
        *("rewards.format.weight", "train.learning_rate", "train.sead", "train.push_to_hub", "train.loss_type"),
        "eval.enabled",
    }
    assert "recipe.yaml:8: train.learning_rate: must be a number, not 'fast'" in lines
    lines = lines_of("rollout: {temperature: 0.5}\npeft: {rank: 4}\ntrain:\n  peft_rank: 8\n  temperature: 0.7\n")
    assert lines == [
        "recipe.yaml:4: train.peft_rank: 8 contradicts peft.rank: 4 (write it once, as peft.rank)",
        "recipe.yaml:5: train.temperature: 0.7 contradicts rollout.temperature: 0.5 "
        "(write it once, as rollout.temperature)",
    ]
    (line,) = lines_of("peft: {rank: 4}\ntrain:\n  peft_alpha: much\n")
    assert line == "recipe.yaml:3: peft.alpha: must be a number, not 'much'"

    def check(sections):
        assert "peft" not in sections  # it is not valid
        found = [(("model", "name"), Mistake("is unlucky", hint="take another"))]
        return found if sections["model"].name == "x13" else []

    lines = lines_of("model:\n  name: x13\npeft: {rnak: 1}\n", checks=[check])
    assert lines == [
        "recipe.yaml:3: peft.rnak: unknown key (did you mean rank?)",
        "recipe.yaml:2: model.name: is unlucky (take another)",
    ]
    assert loaded("model:\n  name: x12\n", checks=[lambda _: []]).model.name == "x12"


NOT_CONVERTED = (
    ("peft: {rank: 8.0}\n", "peft.rank: must be a whole number, not 8.0"),
    ("peft: {rank: true}\n", "peft.rank: must be a whole number, not true"),
    ("eval: {enabled: 1}\n", "eval.enabled: must be true or false, not 1"),
    ("model: {name: null}\n", "model.name: must be text, not null"),
    ("data: {train: {columns: question}}\n", None),
    ("train: {max_steps: -1}\n", "train.max_steps: must be greater than or equal to 1, not -1"),
    (
        "train: {num_generations: 1}\n",
        "train.num_generations: must be greater than or equal to 2, not 1: advantage_estimator group compares a "
        "prompt's completions (advantage_estimator: batch or remax or gae takes one)",
    ),
    ("rollout: {temperature: 0}\n", "rollout.temperature: must be greater than 0, not 0"),
    ("rewards: 5\n", "rewards: must map names to weights (rewards: {accuracy: 1.0})"),
    ("rewards: {accuracy: true, format: 1}\n", "rewards.accuracy.weight: must be a number, not true"),
    ("data: {prompt_template: '{question}'}\n", "data.prompt_template: must contain {prompt}"),
    (
        "data: {prompt_template: '{prompt} {prompt.text}'}\n",
        "data.prompt_template: {prompt.text...}: a column's name stands alone between braces",
    ),
    (
        "data: {prompt_template: '{prompt}{prompt:>99}'}\n",
        "data.prompt_template: {prompt...}: a column's name stands alone between braces",
    ),
    (
        "data: {train: {name: a.jsonl, columns: {prompt: null}}}\n",
        "data.prompt_template: no column holds the question (columns.prompt: null): ask it here",
    ),
    (
        "data: {prompt_template: 'Q {prompt}', train: {name: a.jsonl, columns: {prompt: null}}}\n",
        "data.prompt_template: no column holds a {prompt} (columns.prompt: null)",
    ),
    (
        "data: {prompt_template: Q, train: {name: a.jsonl, columns: {prompt: null}}, eval: b.jsonl}\n",
        "data.eval: columns.prompt is null for one of data.train and data.eval, not for the other",
    ),
)


def test_a_value_of_another_type_or_out_of_range_is_refused_and_only_a_whole_number_becomes_a_number():
    for text, line in NOT_CONVERTED:
        lines = lines_of(text)
        assert all(found.startswith("recipe.yaml:1: ") for found in lines), text
        assert line is None or lines == [f"recipe.yaml:1: {line}"], text
    for value in ("rolling", "rolling:0", "rolling:-1", "rolling:2.5", "Base", "''", "'base '", "5"):
        (line,) = lines_of(f"model: {{}}\ntrain:\n  reference: {value}\n")
        assert line.startswith("recipe.yaml:3: train.reference: must "), value
    for value in ("base", "initial", "rolling:1", "rolling:250", "null"):
        assert loaded(f"train: {{reference: {value}}}\n").train["reference"] == yaml.safe_load(value)
    found = loaded("train: {learning_rate: 1}\nrollout: {temperature: 2}\nrewards: {accuracy: 3}\n")
    assert (found.train["learning_rate"], found.rollout.temperature, found.rewards["accuracy"].weight) == (1, 2, 3)


def test_short_forms_and_empty_sections_mean_the_same_as_what_they_stand_for():
    short = loaded("peft: {type: C3A, block_size: 32, target_modules: [q_proj]}\n")
    long = loaded("peft: {type: C3A, target_modules: [q_proj], kwargs: {block_size: 32}}\n")
    assert short == long == written_and_read(short)
    assert short.peft.kwargs == {"block_size": 32}
    assert loaded("peft: {type: C3A, block_size: 32, kwargs: {mask: 1}}\n").peft.kwargs == {"mask": 1, "block_size": 32}
    assert loaded("extends: quickstart\n", ["peft.type=C3A", "peft.block_size=32"]).peft.kwargs == {"block_size": 32}
    (line,) = lines_of("peft: {block_size: 32}\n")
    assert line.startswith("recipe.yaml:1: peft.block_size: unknown key")
    short = loaded("data: {train: a.jsonl, eval: b.jsonl}\nrewards: {format: 0.5}\n")
    long = loaded("data: {train: {name: a.jsonl}, eval: {name: b.jsonl}}\nrewards: {format: {weight: 0.5}}\n")
    assert short == long
    assert short.data.train.columns.prompt == "prompt"
    empty = loaded("".join(f"{name}:\n" for name in (*SECTIONS, "rewards", "train")))
    assert empty == loaded("model: {}\n") == load_recipe({"model": {}})


def test_null_drops_a_reward_of_the_extended_recipe_and_one_must_be_left():
    Path("parent.yaml").write_text("rewards: {accuracy: 1, format: 0.5}\n", encoding="utf-8")
    recipe = loaded("extends: parent.yaml\nrewards: {accuracy: null, 'm:f': 2}\n")
    assert {name: setting.weight for name, setting in recipe.rewards.items()} == {"format": 0.5, "m:f": 2}
    overridden = loaded("extends: parent.yaml\n", ["rewards.format=null"])
    assert list(overridden.rewards) == ["accuracy"]
    # One line, though the only reward is wrong.
    assert lines_of("rewards: {accuracy: {wieght: 1}}\n") == [
        "recipe.yaml:1: rewards.accuracy.wieght: unknown key (did you mean weight?)"
    ]
    assert lines_of("model: {}\nrewards: {accuracy: null}\n") == [
        "recipe.yaml:2: rewards: no reward is left (rewards: {accuracy: 1.0})"
    ]


def test_a_batch_is_planned_from_the_numbers_that_are_given_for_all_processes(monkeypatch):
    """As a search over all plans finds it, whichever number is left out."""
    numbers = {"prompts_per_step": 4, "num_generations": 8}
    numbers |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    for left_out, processes in (("prompts_per_step", 1), ("per_device_train_batch_size", 2)):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        given = {**numbers, left_out: None}
        if processes > 1:
            given["gradient_accumulation_steps"] = None
        Path("parent.yaml").write_text(yaml.safe_dump({"train": given}), encoding="utf-8")
        batch = loaded("extends: parent.yaml\n").batch
        expected = search(*(given[name] for name in numbers), processes)
        assert (*(getattr(batch, name) for name in numbers), batch.world_size) == expected, given
    monkeypatch.setenv("WORLD_SIZE", "8")
    text = "train: {prompts_per_step: 4, num_generations: 8, per_device_train_batch_size: 3}\n"
    assert "over 8 processes cannot be cut into passes of 3 rows" in lines_of(text)[0]
    text = text.replace(" 3}", " 8}")
    assert loaded(text).batch.per_device_train_batch_size == 4
    monkeypatch.delenv("WORLD_SIZE")
    assert loaded(text).batch.gradient_accumulation_steps == 4


def test_overrides_of_a_recipe_give_another_one_and_it_cannot_be_changed_itself():
    recipe = loaded(EVERYTHING)
    before = recipe.to_yaml()
    other = load_recipe(recipe, ["peft.rank=5", "train.seed=9", "data.train=x.csv", "rewards.format=0.5"])
    assert recipe.to_yaml() == before
    assert other.name == recipe.name
    assert other.peft == recipe.peft.model_copy(update={"rank": 5})
    assert dict(other.train) == {**recipe.train, "seed": 9}
    assert other.data.train.model_dump(exclude_defaults=True) == {"name": "x.csv"}
    assert list(other.rewards) == [*recipe.rewards, "format"]
    assert load_recipe(recipe) == recipe
    with pytest.raises(RecipeError, match=r"^command line: peft\.rank: must be a whole number, not 'x'$"):
        load_recipe(load_recipe({}), ["peft.rank=x"])
    assert Recipe.load("quickstart", ["train.seed=3"]) == load_recipe("quickstart", ["train.seed=3"])
    for source in ({}, {"rewards": {"accuracy": 2}, "train": {"seed": 1}}):
        recipe = load_recipe(source)
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.name = "other"
        with pytest.raises(ValidationError, match="frozen"):
            recipe.peft.rank = 4
        with pytest.raises(TypeError):
            recipe.train["seed"] = 4
        with pytest.raises(TypeError):
            recipe.rewards["accuracy"] = recipe.rewards["accuracy"]
