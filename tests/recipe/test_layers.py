"""Recipe files and overrides become one mapping that knows where each value was written."""

import itertools
import math
import re
from pathlib import Path

import pytest

from perl.errors import RecipeError
from perl.recipe import load_recipe
from perl.recipe.layers import read_layers


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def values_of(text, overrides=()):
    return read_layers(write("recipe.yaml", text), overrides)[1].values


def offenders(rows):
    """Rows of a text, how its one-line message begins (all of it, where that ends with a line break), further words."""
    lines = [(f"{message_of(text)}\n", start, words) for text, start, *words in rows]
    return [
        (line, start, words)
        for line, start, words in lines
        if not line.startswith(start) or line.count("\n") > 1 or not all(word in line for word in words)
    ]


def message_of(text, overrides=()):
    with pytest.raises(RecipeError) as caught:
        read_layers(write("recipe.yaml", text), overrides)
    return str(caught.value)


# What the core schema of YAML 1.2.2 (section 10.3.2) makes of a plain scalar.
SCALARS = (
    ("1e-5", 1e-5),
    (".5", 0.5),
    ("-.INF", -math.inf),
    ("12", 12),
    ("-3", -3),
    ("0x1F", 31),
    ("010", 10),
    ("0o17", 15),
    ("true", True),
    ("null", None),
    ("~", None),
    ("", None),
    ("no", "no"),
    ("1:30", "1:30"),
    ("0b11", "0b11"),
    ("2001-01-01", "2001-01-01"),
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
    assert math.isnan(values_of("section: {key: .nan}\n")["section"]["key"])


def test_what_stands_twice_is_no_plain_yaml_or_names_no_parent_is_refused_at_its_line():
    """Each is one line; no tag is followed."""
    tags = (
        "model:\n  name: !!python/object/apply:os.system ['touch pwned']\n",
        "model:\n  name: !env HOME\n",
        "peft:\n  target_modules: !!python/tuple [a, b]\n",
        "\nmodel: !mine {name: x}\n",
    )
    no_mappings = ("", "# only a comment\n", "- a\n- b\n", "just text\n", "5\n")
    broken = (("model: {}\npeft: [\n", 3), ("a: 1\n  b: 2\n", 2), ("a: 1\n---\nb: 2\n", 2), ("a: *b\n", 1))
    deep = ("a: " + "[" * 5000, "a: " + "{b: " * 5000, "".join(f"{' ' * i}a:\n" for i in range(80)))
    rows = (
        ("peft:\n  rank: 8\n  alpha: 1\n  rank: 9\n", "recipe.yaml:4: peft.rank: this key stands twice\n"),
        ("peft: {rank: 8}\ntrain: {}\npeft: {alpha: 1}\n", "recipe.yaml:3: peft: this key"),
        *((text, "recipe.yaml:2") for text in tags),
        ("shared: &s {rank: 8}\npeft:\n  <<: *s\n", "recipe.yaml:3: ", "extends"),
        ("a: 1\n? [b, c]\n: 2\n", "recipe.yaml:2: "),
        *((text, "recipe.yaml: a recipe is a mapping of sections") for text in no_mappings),
        *((text, f"recipe.yaml:{line}: not plain YAML: ") for text, line in broken),
        ("model: {}\npeft: &p {kwargs: *p}\n", "recipe.yaml:2"),
        ("model: {name: 'a\x07b'}\n", "recipe.yaml"),
        *((text, "", "not plain YAML: nested too deeply, 30 levels at most") for text in deep),
        ("model: {}\nextends: nowhere.yaml\n", "recipe.yaml:2: extends: ", "nowhere.yaml: no such file"),
        ("extends: quickstrat\n", "recipe.yaml:1: extends: no recipe named 'quickstrat'", "did you mean quickstart?"),
        *(
            (f"extends: {parent}\n", "recipe.yaml:1: extends: must be the name or path of one recipe")
            for parent in ("[a.yaml, b.yaml]", "5", "{a: b}")
        ),
        ("extends: recipe.yaml\n", "recipe.yaml:1: extends: the recipe extends itself: recipe.yaml -> recipe.yaml\n"),
    )
    assert offenders(rows) == []
    message = message_of("model: {}\n", ["model.name=!!python/object/apply:os.system ['touch pwned']"])
    assert message.startswith("command line: model.name: ")
    assert not Path("pwned").exists()
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "model: {}\nextends: ./c.yaml\n")
    write("c.yaml", "extends: a.yaml\n")
    with pytest.raises(RecipeError, match=r"^c\.yaml:1: extends: .*a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml$"):
        read_layers("a.yaml", ())


def test_a_path_that_is_absent_a_folder_or_not_utf8_is_refused_as_it_was_given():
    Path("latin.yaml").write_bytes("model: {name: modèle}\n".encode("latin-1"))
    Path("folder.yaml").mkdir()
    for path, reason in (
        ("latin.yaml", "cannot be read: "),
        ("folder.yaml", "no such file"),
        ("some/where.yaml", "no such file"),
    ):
        with pytest.raises(RecipeError, match=rf"^{re.escape(path)}: {reason}"):
            read_layers(path, ())


# Parent, child (which extends it), what comes out.
EXTENDED = {
    "key by key": (
        "peft: {rank: 8, alpha: 16, kwargs: {a: 1, b: 2}}\nmodel: {name: x}\n",
        "peft: {rank: 4, kwargs: {b: 3, c: 4}}\ntrain: {seed: 1}\n",
        {
            "peft": {"rank": 4, "alpha": 16, "kwargs": {"a": 1, "b": 3, "c": 4}},
            "model": {"name": "x"},
            "train": {"seed": 1},
        },
    ),
    "a list replaces a list": (
        "peft: {target_modules: [a, b]}\n",
        "peft: {target_modules: [c]}\n",
        {"peft": {"target_modules": ["c"]}},
    ),
    "null hides the parent's value": (
        "peft: {rank: 8, alpha: 16}\nrollout: {top_k: 5}\n",
        "peft: {rank: null}\nrollout: null\n",
        {"peft": {"rank": None, "alpha": 16}, "rollout": None},
    ),
    "the same parent twice, through another": ("extends: root.yaml\n", "", {"train": {"seed": 7}}),
}


def test_a_recipe_extends_another():
    write("root.yaml", "train: {seed: 7}\n")
    for name, (parent, child, expected) in EXTENDED.items():
        write("parent.yaml", parent)
        assert values_of(f"extends: parent.yaml\n{child}") == expected, name
    alone = read_layers("quickstart", ())[1].values
    packaged = values_of("extends: quickstart\npeft: {rank: 99}\n")
    assert packaged == {**alone, "peft": {**alone["peft"], "rank": 99}}
    write("a/grandparent.yaml", "train: {seed: 1, beta: 0.1, epsilon: 0.3}\n")
    write("a/b/parent.yaml", "extends: ../grandparent.yaml\ntrain: {seed: 2, beta: 0.2}\n")  # relative to its file
    child = write("c/child.yaml", "extends: ../a/b/parent.yaml\ntrain: {seed: 3}\n")
    assert read_layers(child, ())[1].values == {"train": {"seed": 3, "beta": 0.2, "epsilon": 0.3}}
    # A mapping extends a file too, and is left as it was.
    write("parent.yaml", "peft: {rank: 8, alpha: 16}\n")
    source = {"extends": "parent.yaml", "peft": {"rank": 4}, "data": {"train": "x.jsonl"}}
    before = {"extends": "parent.yaml", "peft": {"rank": 4}, "data": {"train": "x.jsonl"}}
    values = read_layers(source, ["peft.alpha=1"])[1].values
    assert values == {"peft": {"rank": 4, "alpha": 1}, "data": {"train": {"name": "x.jsonl"}}}
    assert source == before


SOURCES = (
    ("b.jsonl", {"name": "b.jsonl"}),
    ("{name: b.jsonl, limit: 3}", {"name": "b.jsonl", "limit": 3}),
    ("{limit: 3}", {"name": "a.jsonl", "columns": {"prompt": "question"}, "limit": 3}),
    ("{name: a.jsonl}", {"name": "a.jsonl", "columns": {"prompt": "question"}}),
    ("a.jsonl", {"name": "a.jsonl", "columns": {"prompt": "question"}}),
)


def test_bare_values_are_short_for_mappings_and_another_data_source_replaces_where_the_same_one_is_merged():
    for role, (child, expected) in itertools.product(("train", "eval"), SOURCES):
        write("parent.yaml", f"data: {{{role}: {{name: a.jsonl, columns: {{prompt: question}}}}}}\n")
        found = values_of(f"extends: parent.yaml\ndata: {{{role}: {child}}}\n")
        assert found == {"data": {role: expected}}, (role, child)
    text = "data: {train: a.jsonl, eval: b.jsonl}\nrewards: {accuracy: 1, 'm:f': {weight: 2}, format: null}\n"
    assert values_of(text) == {
        "data": {"train": {"name": "a.jsonl"}, "eval": {"name": "b.jsonl"}},
        "rewards": {"accuracy": {"weight": 1}, "m:f": {"weight": 2}, "format": None},
    }


# The file, the overrides, what comes out.
OVERRIDDEN = (
    (
        "train: {seed: 1, beta: 0.5}\n",
        ["train.seed=2", "peft.target_modules=[a, b]", "train.seed=3"],  # the last one wins
        {"train": {"seed": 3, "beta": 0.5}, "peft": {"target_modules": ["a", "b"]}},
    ),
    (
        "data: {train: a.jsonl, eval: {name: b.jsonl, limit: 3}}\n",  # into a bare source; in place of another
        ["data.train.limit=5", "data.eval=c.jsonl"],
        {"data": {"train": {"name": "a.jsonl", "limit": 5}, "eval": {"name": "c.jsonl"}}},
    ),
    (
        "rewards: {'pkg.mod:f': 1}\n",
        ["rewards.pkg.mod:f=2", "rewards.pkg.mod:g.weight=3", "rewards.pkg.mod:g.args.x=[1]", "rewards.format=4"],
        {
            "rewards": {
                "pkg.mod:f": {"weight": 2},
                "pkg.mod:g": {"weight": 3, "args": {"x": [1]}},
                "format": {"weight": 4},
            }
        },
    ),
    (
        "rewards: {}\n",  # equal signs and dots of a value are kept
        ["data.prompt_template='a=b.c {prompt}'"],
        {"rewards": {}, "data": {"prompt_template": "a=b.c {prompt}"}},
    ),
)


def test_overrides_win_over_the_file_and_reach_into_sources_and_rewards():
    for text, overrides, expected in OVERRIDDEN:
        assert values_of(text, overrides) == expected, overrides


def test_every_bad_override_is_said_at_once():
    with pytest.raises(RecipeError, match=r"^overrides: 'train\.seed=1' is no list of overrides"):
        load_recipe("quickstart", "train.seed=1")
    message = message_of("model: {}\n", ["train.seed=1", "seed", "seed=3", "peft.rank=[1"])
    assert message.splitlines() == [
        "command line: 'seed' is not an override (they look like train.max_steps=20)",
        "command line: 'seed=3' is not an override (did you mean train.seed or eval.seed?)",
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
    # What was not written is placed at its section; a replaced source takes the places of its keys along.
    section = read_layers(write("recipe.yaml", "model: {}\ndata:\n  train: a.jsonl\n"), ())[1]
    assert section.where(("data", "train", "columns", "answer")) == "recipe.yaml:3: data.train.columns.answer"
    write("parent.yaml", "data:\n  train:\n    name: a.jsonl\n    limit: 3\n")
    replaced = read_layers(write("recipe.yaml", "extends: parent.yaml\ndata:\n  train: b.jsonl\n"), ())[1]
    assert replaced.where(("data", "train", "limit")) == "recipe.yaml:3: data.train.limit"


def test_an_adapter_that_is_continued_later_replaces_the_shape_of_a_new_one_and_keeps_the_rest(tmp_path):
    adapter = "peft.adapter=runs/quickstart"
    found = load_recipe("quickstart", [adapter, "train.max_steps=9"])
    assert (found.peft.adapter, found.peft.rank, found.peft.alpha) == ("runs/quickstart", None, None)
    assert found.train["learning_rate"] == load_recipe("quickstart").train["learning_rate"]
    path = tmp_path / "further.yaml"
    path.write_text("extends: quickstart\npeft: {adapter: runs/quickstart}\n")
    assert load_recipe(path).peft == found.peft
    path.write_text("extends: quickstart\npeft: {method: lora_plus, dropout: 0.1, kwargs: {loraplus_lr_ratio: 4}}\n")
    kept = load_recipe(path, [adapter]).peft
    assert (kept.method, kept.dropout, kept.kwargs) == ("lora_plus", 0.0, {"loraplus_lr_ratio": 4})
    path.write_text("extends: quickstart\npeft: {type: LORA, r: 4, rank: null, alpha: null}\n")
    assert load_recipe(path, [adapter]).peft == found.peft
    beside = load_recipe("quickstart", [adapter, "peft.rank=4"]).peft  # refused by the methods' check
    assert (beside.adapter, beside.rank) == ("runs/quickstart", 4)


def test_a_section_on_the_command_line_is_laid_over_the_files_and_blamed_for_what_it_says(tmp_path):
    (tmp_path / "r.yaml").write_text("rewards: {accuracy: 2.0}\ndata: {train: {name: a.jsonl, columns: {prompt: q}}}\n")
    _, layer = read_layers(tmp_path / "r.yaml", ["rewards={rw:score: 1.5}", "data.train.name=b.jsonl"])
    assert layer.values["rewards"] == {"accuracy": {"weight": 2.0}, "rw:score": {"weight": 1.5}}
    assert layer.values["data"]["train"] == {"name": "b.jsonl"}  # whose columns are others
    assert layer.where(("data", "train", "columns", "prompt")) == "command line: data.train.columns.prompt"
    with pytest.raises(RecipeError, match="'rewards=3' is not an override"):
        read_layers(tmp_path / "r.yaml", ["rewards=3"])


def test_the_length_that_is_written_last_counts_and_two_in_one_place_are_a_mistake(tmp_path):
    (tmp_path / "r.yaml").write_text("train: {max_steps: 5}\n")
    assert dict(load_recipe(tmp_path / "r.yaml", ["train.num_train_epochs=2"]).train) == {"num_train_epochs": 2}
    (tmp_path / "c.yaml").write_text("extends: r.yaml\ntrain: {num_train_epochs: 2}\n")
    assert dict(load_recipe(tmp_path / "c.yaml").train) == {"num_train_epochs": 2}
    assert dict(load_recipe(tmp_path / "c.yaml", ["train.max_steps=7"]).train) == {"max_steps": 7}
    with pytest.raises(RecipeError, match=r"num_train_epochs: has no effect beside train\.max_steps: 5"):
        load_recipe({"train": {"max_steps": 5, "num_train_epochs": 2}})
    with pytest.raises(RecipeError, match=r"max_prompt_length: unknown key .leave it out: prompts are never cut"):
        load_recipe({"train": {"max_prompt_length": 512}})


def test_what_a_recipe_names_by_a_relative_path_is_looked_for_beside_it_first(tmp_path, monkeypatch):
    there = tmp_path / "there"
    for name in ("base", "adapter", "data", "aime24"):
        (there / name).mkdir(parents=True)
    for name in ("q.jsonl", "t.py", "h.csv"):
        (there / name).write_text("")
    (there / "r.yaml").write_text(
        "model: {name: base}\npeft: {adapter: adapter}\ndata: {train: q.jsonl, eval: {name: h.csv}}\n"
        "eval: {data: data, tasks: [t.py:mine, aime24, {name: q.jsonl}, absent.jsonl]}\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("there/r.yaml", ["teacher.adapter=adapter"])
    assert (recipe.model.name, recipe.peft.adapter, recipe.eval.data) == ("there/base", "there/adapter", "there/data")
    assert (recipe.data.train.name, recipe.data.eval.name) == ("there/q.jsonl", "there/h.csv")
    names = [task.name for task in recipe.eval.tasks]
    assert names == ["there/t.py:mine", "aime24", "there/q.jsonl", "absent.jsonl"]
    assert recipe.teacher.adapter == "adapter"  # of the command line, as the command sees it
