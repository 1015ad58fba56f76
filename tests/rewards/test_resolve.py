"""Names in a recipe become functions that TRL can call, or a problem that says which name was meant."""

import asyncio
import inspect
import sys
from pathlib import Path

import pytest

from perl.errors import RecipeError
from perl.recipe.sections import RewardSetting
from perl.rewards import NAMED_REWARDS, accuracy_reward, resolve_rewards, reward_problems

MODULE = """\
import json

constant = 3
PAIR = (1, 2)


def length(completions, limit=10, *, scale=1.0, **_):
    return [scale * min(len(text), limit) for text in completions]


async def slow(completions, limit=10, **_):
    return [float(limit)] * len(completions)


def strict(completions):
    return [0.0]


class Judge:
    def __call__(self, completions, **_):
        return [7.0] * len(completions)


judge = Judge()
"""


@pytest.fixture(autouse=True)
def _own_rewards(tmp_path, monkeypatch):
    """A module beside the recipe; what was imported from this folder is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_rewards.py").write_text(MODULE, encoding="utf-8")
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def settings(**rewards):
    return {name: RewardSetting.model_validate(value) for name, value in rewards.items()}


def problems(rewards):
    return [(".".join(path), str(problem)) for path, problem in reward_problems({"rewards": settings(**rewards)})]


def test_every_named_reward_is_found_and_scores():
    assert "accuracy" in NAMED_REWARDS
    rewards = resolve_rewards(settings(**dict.fromkeys(NAMED_REWARDS, 1)))
    assert [reward.name for reward in rewards] == list(NAMED_REWARDS)
    for reward in rewards:
        assert reward.function(completions=[r"\boxed{4}"], prompts=["2+2="], solution=["4"]) == [1.0]
        assert reward.function.__name__ == reward.name


def test_weights_and_order_are_those_of_the_recipe():
    rewards = resolve_rewards(settings(**{"format": 0.5, "own_rewards:length": {"weight": -2}, "accuracy": 1}))
    assert [(reward.name, reward.weight) for reward in rewards] == [
        ("format", 0.5),
        ("own_rewards:length", -2.0),
        ("accuracy", 1.0),
    ]


def test_a_function_of_the_current_folder_gets_the_recipes_arguments():
    setting = {"own_rewards:length": {"args": {"limit": 3, "scale": 2.0}}}
    (reward,) = resolve_rewards(settings(**setting))
    assert reward.function(completions=["a", "abcdef"], prompts=["", ""], level=["x", "y"]) == [2.0, 6.0]
    (plain,) = resolve_rewards(settings(**{"own_rewards:length": 1}))
    assert plain.function(completions=["abcdef" * 3], prompts=[""]) == [10.0]


def test_the_recipes_argument_wins_over_a_column_of_the_same_name():
    (reward,) = resolve_rewards(settings(**{"own_rewards:length": {"args": {"limit": 3}}}))
    assert reward.function(completions=["abcdef"], limit=[1]) == [3.0]


def test_a_function_of_a_package_is_found():
    Path("own_package/deep").mkdir(parents=True)
    Path("own_package/deep/__init__.py").touch()
    Path("own_package/deep/scores.py").write_text(MODULE, encoding="utf-8")
    (reward,) = resolve_rewards(settings(**{"own_package.deep.scores:length": 1}))
    assert reward.function(completions=["ab"]) == [2.0]


def test_an_object_that_can_be_called_is_a_reward():
    (reward,) = resolve_rewards(settings(**{"own_rewards:judge": 1}))
    assert reward.function(completions=["a", "b"]) == [7.0, 7.0]


def test_a_coroutine_stays_one():
    (reward,) = resolve_rewards(settings(**{"own_rewards:slow": {"args": {"limit": 4}}}))
    assert inspect.iscoroutinefunction(reward.function)
    assert asyncio.run(reward.function(completions=["a", "b"])) == [4.0, 4.0]
    assert reward.function.__name__ == "slow"


def test_a_resolved_function_still_shows_its_arguments_and_what_it_is():
    (reward,) = resolve_rewards(settings(**{"own_rewards:length": 1}))
    assert list(inspect.signature(reward.function).parameters) == ["completions", "limit", "scale", "_"]
    (named,) = resolve_rewards(settings(accuracy=1))
    assert inspect.unwrap(named.function) is accuracy_reward
    assert accuracy_reward.__name__ == "accuracy_reward"


def test_rewards_are_logged_under_names_of_their_own():
    Path("other_rewards.py").write_text(MODULE, encoding="utf-8")
    rewards = resolve_rewards(settings(**{"own_rewards:length": 1, "other_rewards:length": 1, "own_rewards:slow": 1}))
    assert len({reward.function.__name__ for reward in rewards}) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acuracy", ["no reward 'acuracy'", "did you mean accuracy?", "package.module:function"]),
        ("zzz", ["no reward 'zzz'", "accuracy", "format", "package.module:function"]),
        ("own_rewards.length", ["no reward 'own_rewards.length'", "package.module:function"]),
        ("own_rewads:length", ["cannot import own_rewads", "current folder"]),
        ("own_rewards:lenght", ["own_rewards has no function 'lenght'", "did you mean length?"]),
        ("own_rewards:constant", ["own_rewards has no function 'constant'"]),
        ("own_rewards:", ["own_rewards has no function ''"]),
        (":length", ["cannot import"]),
        (".own_rewards:length", ["cannot import .own_rewards"]),
        ("own_rewards.deeper:length", ["cannot import own_rewards.deeper"]),
    ],
)
def test_a_name_that_is_not_found_is_one_problem(name, words):
    ((path, problem),) = problems({"accuracy": 1, name: 1})
    assert path == f"rewards.{name}"
    assert all(word in problem for word in words), problem
    with pytest.raises(RecipeError) as caught:
        resolve_rewards(settings(**{name: 1}))
    assert str(caught.value) == f"rewards.{name}: {problem}"


@pytest.mark.parametrize(
    "text", ["import no_such_package_at_all\n", "def f(:\n", "1 / 0\n", "raise ValueError('not today')\n"]
)
def test_a_module_that_cannot_be_imported_is_one_problem(text):
    Path("broken_rewards.py").write_text(text, encoding="utf-8")
    ((path, problem),) = problems({"broken_rewards:f": 1})
    assert path == "rewards.broken_rewards:f"
    assert problem.startswith("cannot import broken_rewards: ")


def test_every_wrong_argument_is_a_problem_with_the_nearest_name():
    found = problems(
        {"own_rewards:length": {"args": {"limt": 3, "scale": 1, "colour": 2}}, "format": {"args": {"strict": True}}}
    )
    assert [path for path, _ in found] == [
        "rewards.own_rewards:length.args.limt",
        "rewards.own_rewards:length.args.colour",
        "rewards.format.args.strict",
    ]
    assert "did you mean limit?" in found[0][1]


def test_rewards_that_are_all_well_are_no_problem():
    assert problems({"accuracy": 1, "own_rewards:length": {"args": {"limit": 3}}, "own_rewards:slow": 0}) == []
    assert reward_problems({}) == []
