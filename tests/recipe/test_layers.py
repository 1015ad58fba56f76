"""Recipe files and overrides become one mapping that knows where each value was written."""

import math
from pathlib import Path

import pytest

from perl.errors import RecipeError
from perl.recipe.layers import read_layers


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def values_of(text, overrides=()):
    return read_layers(write("recipe.yaml", text), overrides)[1].values


def message_of(text, overrides=()):
    with pytest.raises(RecipeError) as caught:
        read_layers(write("recipe.yaml", text), overrides)
    return str(caught.value)


# What the core schema of YAML 1.2.2 (section 10.3.2) makes of a plain scalar.
SCALARS = (
    ("1e-5", 1e-5),
    ("1E5", 1e5),
    ("-2.5e+3", -2500.0),
    ("1.5", 1.5),
    (".5", 0.5),
    ("5.", 5.0),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("12", 12),
    ("-3", -3),
    ("+7", 7),
    ("0x1F", 31),
    ("010", 10),
    ("0o17", 15),
    ("true", True),
    ("False", False),
    ("TRUE", True),
    ("null", None),
    ("~", None),
    ("", None),
    ("no", "no"),
    ("on", "on"),
    ("off", "off"),
    ("yes", "yes"),
    ("Y", "Y"),
    ("n", "n"),
    ("1:30", "1:30"),
    ("0b11", "0b11"),
    ("2001-01-01", "2001-01-01"),
    ("1e", "1e"),
    ("e5", "e5"),
    ("=", "="),
    ("'1e-5'", "1e-5"),
    ('"12"', "12"),
    ("org/model-7B", "org/model-7B"),
)


def test_a_scalar_means_what_it_does_in_yaml_1_2():
    for scalar, value in SCALARS:
        read = values_of(f"section:\n  key: {scalar}\n")["section"]["key"]
        overridden = values_of("section: {}\n", [f"section.key={scalar}"])["section"]["key"]
        assert read == overridden == value, scalar
        assert type(read) is type(overridden) is type(value), scalar


def test_not_a_number_is_a_float():
    assert math.isnan(values_of("section: {key: .nan}\n")["section"]["key"])


def test_a_key_that_stands_twice_is_refused_at_its_second_line():
    assert message_of("peft:\n  rank: 8\n  alpha: 1\n  rank: 9\n") == "recipe.yaml:4: peft.rank: this key stands twice"


def test_a_section_that_stands_twice_is_refused():
    assert message_of("peft: {rank: 8}\ntrain: {}\npeft: {alpha: 1}\n").startswith("recipe.yaml:3: peft: this key")


@pytest.mark.parametrize(
    "text",
    [
        "model:\n  name: !!python/object/apply:os.system ['touch pwned']\n",
        "model:\n  name: !!python/name:os.system\n",
        "model:\n  name: !env HOME\n",
        "peft:\n  target_modules: !!python/tuple [a, b]\n",
        "\nmodel: !!python/object:builtins.dict {name: x}\n",
        "\nmodel: !mine {name: x}\n",
    ],
)
def test_a_tag_is_refused_in_one_line_and_nothing_is_run(text):
    message = message_of(text)
    assert message.startswith("recipe.yaml:2")
    assert len(message.splitlines()) == 1
    assert not Path("pwned").exists()


def test_a_tag_in_an_override_is_refused():
    message = message_of("model: {}\n", ["model.name=!!python/object/apply:os.system ['touch pwned']"])
    assert message.startswith("command line: model.name: ")
    assert not Path("pwned").exists()


def test_a_merge_key_is_refused_and_extends_is_named():
    message = message_of("shared: &s {rank: 8}\npeft:\n  <<: *s\n")
    assert message.startswith("recipe.yaml:3: ")
    assert "extends" in message


def test_a_key_that_is_not_text_is_refused():
    assert message_of("a: 1\n? [b, c]\n: 2\n").startswith("recipe.yaml:2: ")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "- a\n- b\n", "just text\n", "5\n"])
def test_a_file_that_is_no_mapping_is_refused(text):
    assert message_of(text).startswith("recipe.yaml: a recipe is a mapping of sections")


@pytest.mark.parametrize(
    ("text", "line"), [("model: {}\npeft: [\n", 3), ("a: 1\n  b: 2\n", 2), ("a: 1\n---\nb: 2\n", 2), ("a: *b\n", 1)]
)
def test_broken_yaml_is_refused_in_one_line_with_the_place(text, line):
    message = message_of(text)
    assert message.startswith(f"recipe.yaml:{line}: not plain YAML: ")
    assert len(message.splitlines()) == 1


def test_an_alias_of_the_mapping_around_it_is_refused():
    assert message_of("model: {}\npeft: &p {kwargs: *p}\n").startswith("recipe.yaml:2")


def test_a_character_that_yaml_forbids_is_refused():
    assert message_of("model: {name: 'a\x07b'}\n").startswith("recipe.yaml")


def test_a_file_that_is_not_utf8_is_refused():
    Path("latin.yaml").write_bytes("model: {name: modèle}\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"^latin\.yaml: cannot be read: "):
        read_layers("latin.yaml", ())


def test_a_folder_in_place_of_a_file_is_refused():
    Path("folder.yaml").mkdir()
    with pytest.raises(RecipeError, match=r"^folder\.yaml: no such file"):
        read_layers("folder.yaml", ())


def test_an_absent_file_is_refused_with_its_path_as_given():
    with pytest.raises(RecipeError, match=r"^some/where\.yaml: no such file"):
        read_layers("some/where.yaml", ())


def test_the_name_is_the_files_without_suffix():
    assert read_layers(write("folder/my.recipe.yaml", "model: {}\n"), ())[0] == "my.recipe"
    assert read_layers("quickstart", ())[0] == "quickstart"
    assert read_layers({"model": {}}, ())[0] == "recipe"


def test_a_recipe_extends_another_key_by_key():
    write("parent.yaml", "peft: {rank: 8, alpha: 16, kwargs: {a: 1, b: 2}}\nmodel: {name: x}\n")
    values = values_of("extends: parent.yaml\npeft: {rank: 4, kwargs: {b: 3, c: 4}}\ntrain: {seed: 1}\n")
    assert values == {
        "peft": {"rank": 4, "alpha": 16, "kwargs": {"a": 1, "b": 3, "c": 4}},
        "model": {"name": "x"},
        "train": {"seed": 1},
    }


def test_a_list_replaces_a_list():
    write("parent.yaml", "peft: {target_modules: [a, b]}\n")
    assert values_of("extends: parent.yaml\npeft: {target_modules: [c]}\n") == {"peft": {"target_modules": ["c"]}}


def test_null_in_a_child_hides_the_parents_value():
    write("parent.yaml", "peft: {rank: 8, alpha: 16}\nrollout: {top_k: 5}\n")
    values = values_of("extends: parent.yaml\npeft: {rank: null}\nrollout: null\n")
    assert values == {"peft": {"rank": None, "alpha": 16}, "rollout": None}


def test_a_recipe_extends_a_packaged_one():
    alone = read_layers("quickstart", ())[1].values
    values = values_of("extends: quickstart\npeft: {rank: 99}\n")
    assert values == {**alone, "peft": {**alone["peft"], "rank": 99}}


def test_a_chain_of_recipes_is_read_relative_to_each_file():
    write("a/grandparent.yaml", "train: {seed: 1, beta: 0.1, epsilon: 0.3}\n")
    write("a/b/parent.yaml", "extends: ../grandparent.yaml\ntrain: {seed: 2, beta: 0.2}\n")
    child = write("c/child.yaml", "extends: ../a/b/parent.yaml\ntrain: {seed: 3}\n")
    assert read_layers(child, ())[1].values == {"train": {"seed": 3, "beta": 0.2, "epsilon": 0.3}}


def test_a_mapping_extends_a_file_and_is_left_as_it_was():
    write("parent.yaml", "peft: {rank: 8, alpha: 16}\n")
    source = {"extends": "parent.yaml", "peft": {"rank": 4}, "data": {"train": "x.jsonl"}}
    before = {"extends": "parent.yaml", "peft": {"rank": 4}, "data": {"train": "x.jsonl"}}
    values = read_layers(source, ["peft.alpha=1"])[1].values
    assert values == {"peft": {"rank": 4, "alpha": 1}, "data": {"train": {"name": "x.jsonl"}}}
    assert source == before


def test_a_parent_that_is_absent_is_said_at_the_line_that_names_it():
    message = message_of("model: {}\nextends: nowhere.yaml\n")
    assert message.startswith("recipe.yaml:2: extends: ")
    assert "nowhere.yaml: no such file" in message


def test_a_packaged_parent_that_is_misspelt_gets_the_nearest_name():
    message = message_of("extends: quickstrat\n")
    assert message.startswith("recipe.yaml:1: extends: no recipe named 'quickstrat'")
    assert "did you mean quickstart?" in message


@pytest.mark.parametrize("parent", ["[a.yaml, b.yaml]", "5", "{a: b}"])
def test_extends_takes_one_name(parent):
    assert message_of(f"extends: {parent}\n").startswith(
        "recipe.yaml:1: extends: must be the name or path of one recipe"
    )


def test_a_recipe_that_extends_itself_is_refused():
    assert message_of("extends: recipe.yaml\n") == (
        "recipe.yaml:1: extends: the recipe extends itself: recipe.yaml -> recipe.yaml"
    )


def test_a_circle_of_recipes_is_refused_with_its_links():
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "model: {}\nextends: ./c.yaml\n")
    write("c.yaml", "extends: a.yaml\n")
    with pytest.raises(RecipeError, match=r"^c\.yaml:1: extends: .*a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml$"):
        read_layers("a.yaml", ())


def test_two_children_of_one_parent_are_no_circle():
    write("root.yaml", "train: {seed: 7}\n")
    write("left.yaml", "extends: root.yaml\n")
    assert values_of("extends: left.yaml\n") == {"train": {"seed": 7}}


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("b.jsonl", {"name": "b.jsonl"}),
        ("{name: b.jsonl, limit: 3}", {"name": "b.jsonl", "limit": 3}),
        ("{limit: 3}", {"name": "a.jsonl", "columns": {"prompt": "question"}, "limit": 3}),
        ("{name: a.jsonl}", {"name": "a.jsonl", "columns": {"prompt": "question"}}),
        ("a.jsonl", {"name": "a.jsonl", "columns": {"prompt": "question"}}),
    ],
)
@pytest.mark.parametrize("role", ["train", "eval"])
def test_another_data_source_replaces_and_the_same_one_is_merged(role, child, expected):
    write("parent.yaml", f"data: {{{role}: {{name: a.jsonl, columns: {{prompt: question}}}}}}\n")
    assert values_of(f"extends: parent.yaml\ndata: {{{role}: {child}}}\n") == {"data": {role: expected}}


def test_bare_values_of_sources_and_rewards_are_short_for_mappings():
    text = "data: {train: a.jsonl, eval: b.jsonl}\nrewards: {accuracy: 1, 'm:f': {weight: 2}, format: null}\n"
    assert values_of(text) == {
        "data": {"train": {"name": "a.jsonl"}, "eval": {"name": "b.jsonl"}},
        "rewards": {"accuracy": {"weight": 1}, "m:f": {"weight": 2}, "format": None},
    }


def test_overrides_win_over_the_file_and_the_last_one_over_those_before():
    text = "train: {seed: 1, beta: 0.5}\n"
    assert values_of(text, ["train.seed=2", "peft.target_modules=[a, b]", "train.seed=3"]) == {
        "train": {"seed": 3, "beta": 0.5},
        "peft": {"target_modules": ["a", "b"]},
    }


def test_an_override_reaches_into_a_bare_source_and_replaces_one():
    text = "data: {train: a.jsonl, eval: {name: b.jsonl, limit: 3}}\n"
    assert values_of(text, ["data.train.limit=5", "data.eval=c.jsonl"]) == {
        "data": {"train": {"name": "a.jsonl", "limit": 5}, "eval": {"name": "c.jsonl"}}
    }


def test_an_override_names_a_reward_of_a_module():
    overrides = [
        "rewards.pkg.mod:f=2",
        "rewards.pkg.mod:g.weight=3",
        "rewards.pkg.mod:g.args.x=[1]",
        "rewards.format=4",
    ]
    assert values_of("rewards: {'pkg.mod:f': 1}\n", overrides) == {
        "rewards": {
            "pkg.mod:f": {"weight": 2},
            "pkg.mod:g": {"weight": 3, "args": {"x": [1]}},
            "format": {"weight": 4},
        }
    }


def test_an_override_keeps_equal_signs_and_dots_of_its_value():
    assert values_of("model: {}\n", ["data.prompt_template='a=b.c {prompt}'"])["data"] == {
        "prompt_template": "a=b.c {prompt}"
    }


def test_every_bad_override_is_said_at_once():
    message = message_of("model: {}\n", ["train.seed=1", "seed", "seed=3", "peft.rank=[1"])
    assert message.splitlines() == [
        "command line: 'seed' is not an override (they look like train.max_steps=20)",
        "command line: 'seed=3' is not an override (they look like train.max_steps=20)",
        "command line: peft.rank: '[1' is not a YAML value",
    ]


def test_each_value_knows_the_file_and_line_it_was_written_at():
    write("parent.yaml", "peft:\n  rank: 8\n  alpha: 16\ntrain:\n  seed: 1\n")
    path = write("recipe.yaml", "extends: parent.yaml\n\npeft:\n  rank: 4\n")
    layer = read_layers(path, ["train.beta=0.1"])[1]
    assert layer.where(("peft", "rank")) == "recipe.yaml:4: peft.rank"
    assert layer.where(("peft", "alpha")) == "parent.yaml:3: peft.alpha"
    assert layer.where(("train", "seed")) == "parent.yaml:5: train.seed"
    assert layer.where(("train", "beta")) == "command line: train.beta"
    assert layer.where(("rollout", "top_k")) == "rollout.top_k"


def test_a_key_that_was_not_written_is_placed_at_its_section():
    layer = read_layers(write("recipe.yaml", "model: {}\ndata:\n  train: a.jsonl\n"), ())[1]
    assert layer.where(("data", "train", "columns", "answer")) == "recipe.yaml:3: data.train.columns.answer"


def test_a_replaced_source_takes_the_places_of_its_keys_along():
    write("parent.yaml", "data:\n  train:\n    name: a.jsonl\n    limit: 3\n")
    layer = read_layers(write("recipe.yaml", "extends: parent.yaml\ndata:\n  train: b.jsonl\n"), ())[1]
    assert layer.where(("data", "train", "limit")) == "recipe.yaml:3: data.train.limit"


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 5000, "a: " + "{b: " * 5000, "".join(f"{' ' * i}a:\n" for i in range(80))]
)
def test_what_is_nested_without_end_is_refused_before_it_takes_long(text):
    assert "not plain YAML: nested too deeply, 30 levels at most" in message_of(text)
