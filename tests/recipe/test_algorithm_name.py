"""A name sets fields of ``train``; what is written beside it or later overrides, what was there before is replaced."""

import itertools
from pathlib import Path

import pytest

from perl.algorithms.named import ALGORITHMS
from perl.algorithms.reading import unused_fields
from perl.errors import RecipeError
from perl.recipe import Recipe, load_recipe

GSPO, DAPO = ALGORITHMS["gspo"].sets, ALGORITHMS["dapo"].sets


def written(name, text):
    Path(name).write_text(text, encoding="utf-8")
    return name


def train_of(recipe):
    return {name: value for name, value in recipe.train.items() if name in {**GSPO, **DAPO}}


def test_a_name_at_the_top_under_train_in_a_mapping_and_on_the_command_line_is_the_same():
    file = written("a.yaml", "algorithm: gspo\n")
    below = written("b.yaml", "train:\n  algorithm: gspo\n  seed: 3\n")
    both = written("c.yaml", "algorithm: gspo\ntrain: {algorithm: gspo}\n")
    empty = written("d.yaml", "model: {}\n")
    for recipe in (
        load_recipe(file),
        load_recipe(below),
        load_recipe(both),
        load_recipe({"algorithm": "gspo"}),
        load_recipe({"train": {"algorithm": "gspo"}}),
        load_recipe(empty, ["algorithm=gspo"]),
        load_recipe(empty, ["train.algorithm=gspo"]),
        load_recipe(load_recipe(empty), ["algorithm=gspo"]),
    ):
        assert recipe.algorithm == "gspo"
        assert train_of(recipe) == GSPO
        assert "algorithm" not in recipe.train
    assert load_recipe(below).train["seed"] == 3
    assert load_recipe(empty).algorithm is None
    assert load_recipe(empty, ["algorithm=null"]).train == load_recipe(empty).train == {}


# Where the name and a setting of its row stand: the layers from the earliest to the latest.
LAYERS = ("grandparent", "parent", "file", "command line")


@pytest.mark.parametrize(("named", "set_at"), list(itertools.product(LAYERS, repeat=2)))
def test_a_setting_beside_the_name_or_later_overrides_and_an_earlier_one_is_replaced(named, set_at):
    def lines(layer):
        extends = {"parent": "grandparent", "file": "parent"}.get(layer)
        found = [f"extends: {extends}.yaml"] if extends else ["model: {}"]
        found += ["algorithm: gspo"] if layer == named else []
        found += ["train: {epsilon: 0.2, beta: 0.5}"] if layer == set_at else []
        return "\n".join(found) + "\n"

    for layer in LAYERS[:3]:
        written(f"{layer}.yaml", lines(layer))
    overrides = ["train.epsilon=0.2", "train.beta=0.5"] if set_at == "command line" else []
    overrides += ["algorithm=gspo"] if named == "command line" else []
    recipe = load_recipe("file.yaml", overrides)
    later = LAYERS.index(set_at) >= LAYERS.index(named)
    assert train_of(recipe) == {**GSPO, **({"epsilon": 0.2, "beta": 0.5} if later else {})}
    assert load_recipe("file.yaml", overrides[::-1]).as_dict() == recipe.as_dict()  # in whatever order they are typed


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(LAYERS, 2)))
def test_of_two_names_the_later_one_counts_and_nothing_of_the_earlier_one_is_left(first, second):
    earlier, later = sorted((first, second), key=LAYERS.index)
    names = {earlier: "icepop", later: "dapo"}
    for layer in LAYERS[:3]:
        extends = {"parent": "extends: grandparent.yaml\n", "file": "extends: parent.yaml\n"}.get(layer, "")
        named = f"algorithm: {names[layer]}\n" if layer in names else ""
        written(f"{layer}.yaml", f"{extends}{named}rewards: {{accuracy: 1}}\n")
    overrides = [f"algorithm={names['command line']}"] if "command line" in names else []
    recipe = load_recipe("file.yaml", overrides)
    assert (recipe.algorithm, recipe.train) == ("dapo", DAPO)


def test_what_no_name_sets_stays_and_null_takes_the_name_back():
    written("parent.yaml", "algorithm: gspo\ntrain: {seed: 3, beta: 0.1, learning_rate: 1e-4}\n")
    child = written("child.yaml", "extends: parent.yaml\nalgorithm: dapo\n")
    assert load_recipe(child).train == {**DAPO, "seed": 3, "learning_rate": 1e-4}
    back = written("back.yaml", "extends: parent.yaml\nalgorithm: null\n")
    assert (load_recipe(back).algorithm, load_recipe(back).train) == (
        None,
        {"seed": 3, "beta": 0.1, "learning_rate": 1e-4},
    )
    empty = written("empty.yaml", "extends: parent.yaml\ntrain: null\n")
    assert load_recipe(empty).train == GSPO
    packaged = load_recipe("quickstart", ["algorithm=sapo"])
    alone = load_recipe("quickstart").train
    assert packaged.train == {**alone, **ALGORITHMS["sapo"].sets}


def test_a_saved_recipe_loads_to_the_same_one_and_another_name_replaces_what_the_first_has_written_out():
    for name, row in ALGORITHMS.items():
        free = "beta" if "delta" in unused_fields({**row.sets, "delta": 2.5}) else "delta"
        recipe = load_recipe("quickstart", [f"algorithm={name}", f"train.{free}=2.5"])
        text = recipe.to_yaml()
        assert text.startswith(f"algorithm: {name}\n")
        saved = written("saved.yaml", text)
        assert load_recipe(saved).as_dict() == recipe.as_dict() == load_recipe(recipe.as_dict()).as_dict()
        assert load_recipe(recipe).as_dict() == recipe.as_dict()
        assert Recipe.of_run(saved).algorithm == name
        assert row.overridden(load_recipe(saved).train) == {free: 2.5}
        other = "gspo" if name != "gspo" else "dapo"
        again = load_recipe(saved, [f"algorithm={other}"])
        assert again.train == load_recipe("quickstart", [f"algorithm={other}"]).train, name


MISTAKES = (
    ("model: {}\nalgorithm: gsop\n", [], "recipe.yaml:2: algorithm: no algorithm 'gsop' (did you mean gspo?)"),
    ("algorithm: gspo\ntrain:\n  algorithm: dapo\n", [], "recipe.yaml:3: train.algorithm: 'dapo' contradicts"),
    ("model: {}\n", ["algorithm=gsop"], "command line: algorithm: no algorithm 'gsop' (did you mean gspo?)"),
    ("model: {}\n", ["train.algorithm=dapo", "algorithm=gspo"], "command line: train.algorithm: 'dapo' contradicts"),
    ("algorithm: {name: gspo}\n", [], "recipe.yaml:1: algorithm: must be a name, not "),
    ("train: {algoritm: gspo}\n", [], "recipe.yaml:1: train.algoritm: unknown key (did you mean algorithm?)"),
    (
        "algorithm: gspo\ntrain:\n  importance_sampling_level: token\n",
        [],
        "recipe.yaml:3: train.importance_sampling_level: 'token' leaves nothing of gspo",
    ),
    ("algorithm: gspo\ntrain: {num_generations: 1}\n", [], "recipe.yaml:2: train.num_generations: must be "),
)


@pytest.mark.parametrize(("text", "overrides", "line"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place(text, overrides, line):
    with pytest.raises(RecipeError) as caught:
        load_recipe(written("recipe.yaml", text), overrides)
    found = str(caught.value)
    assert found.startswith(line)
    assert "\n" not in found


def test_all_mistakes_of_a_recipe_with_an_unknown_name_are_found_at_once():
    with pytest.raises(RecipeError) as caught:
        load_recipe(written("recipe.yaml", "algorithm: gsop\npeft: {rnak: 4}\ntrain: {beta: -1}\n"))
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "2", "3"]


def test_what_a_name_sets_is_placed_where_the_name_stands():
    recipe = load_recipe(written("recipe.yaml", "model: {}\nalgorithm: vespo\ntrain: {beta: 0.1}\n"))
    assert recipe.written_at.where(("train", "loss_type")) == "recipe.yaml:2: train.loss_type"
    assert recipe.written_at.where(("train", "beta")) == "recipe.yaml:3: train.beta"
