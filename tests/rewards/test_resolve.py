"""Names in a recipe become functions that TRL can call, or a problem that says which name was meant."""

import asyncio
import inspect
import math
import sys
from pathlib import Path

import pytest

from perl.errors import RecipeError
from perl.recipe.sections import RewardSetting, RolloutSection
from perl.rewards import NAMED_REWARDS, accuracy_reward, reward_mistakes
from perl.rewards import resolve_rewards as resolve
from perl.rewards.verifier import Judging

MODULE = """\
import json
import time

constant = 3
PAIR = (1, 2)


def length(completions, limit=10, *, scale=1.0, **_):
    return [scale * min(len(text), limit) for text in completions]


async def slow(completions, limit=10, **_):
    return [float(limit)] * len(completions)


def strict(completions):
    return [0.0]


def picky(completions, **_):
    if "bad" in completions:
        raise ValueError("no good")
    return [1.0] * len(completions)


def sleepy(completions, naps, scale=1.0, **_):
    time.sleep(naps[0])
    return [scale]


class Judge:
    def __call__(self, completions, **_):
        return [7.0] * len(completions)


judge = Judge()


class Later:
    async def __call__(self, completions, **_):
        return [8.0] * len(completions)


later = Later()


def curious(completions, trainer_state, **_):
    return [0.0] * len(completions)
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


def resolve_rewards(rewards):
    return resolve(rewards, RolloutSection(max_completion_length=100))


def settings(**rewards):
    return {name: RewardSetting.model_validate(value) for name, value in rewards.items()}


def problems(rewards):
    return [(".".join(path), str(problem)) for path, problem in reward_mistakes({"rewards": settings(**rewards)})]


REQUIRED = {"soft_overlong": {"args": {"soft_punish_cache": 20}}}
FIRST_AND_SECOND = {  # rewards of a right completion of 3 tokens and of a wrong one of 100, of one prompt
    "accuracy": [1.0, 0.0],
    "reasoning_accuracy": [0.0, 0.0],
    "format": [1.0, 1.0],
    "tag_count": [0.0, 0.0],
    "length_penalty": [0.5, -0.5],
    "cosine_length": [0.5 + 0.25 * (1 + math.cos(math.pi * 3 / 100)), -0.5],
    "soft_overlong": [0.0, -1.0],
    "repetition_penalty": [0.0, -97 / 98],
    "countdown": [1.0, 0.1],
}


def test_every_named_reward_is_found_and_scores():
    rewards = resolve_rewards(settings(**dict.fromkeys(NAMED_REWARDS, 1), **{}) | settings(**REQUIRED))
    columns = {"solution": ["4", "4"], "target": [4, 4], "numbers": [[4], [4]], "level": ["easy", "hard"]}
    scores = {
        reward.name: reward.function(
            prompts=["2+2="] * 2,
            completions=[r"\boxed{4}", r"\boxed{5}"],
            completion_ids=[[1, 2, 3], [1] * 100],
            trainer_state=None,
            log_metric=None,
            log_extra=None,
            **columns,
        )
        for reward in rewards
    }
    assert list(scores) == list(FIRST_AND_SECOND) == list(NAMED_REWARDS)
    for name, expected in FIRST_AND_SECOND.items():
        assert scores[name] == pytest.approx(expected), name
    assert [reward.function.__name__ for reward in rewards] == list(NAMED_REWARDS)


def test_the_longest_completion_is_the_runs_unless_the_recipe_says_otherwise():
    asked = {"cosine_length": {"args": {"max_len": 6}}, **REQUIRED}
    cosine, overlong = resolve_rewards(settings(**asked))
    rows = {"prompts": [""], "completions": [r"\boxed{4}"], "completion_ids": [[1, 2, 3]], "solution": ["4"]}
    assert cosine.function(**rows) == [pytest.approx(0.75)]
    assert overlong.function(**rows | {"completion_ids": [[1] * 90]}) == [pytest.approx(-0.5)]


def test_what_a_reward_needs_and_whether_it_judges_is_known():
    asked = {"accuracy": 1, "countdown": {"columns": {"numbers": "nums"}}, "format": 1, "own_rewards:strict": 1}
    accuracy, countdown, form, own = resolve_rewards(settings(**asked))
    assert accuracy.needs == ("completions", "solution")
    assert countdown.needs == ("completions", "target", "nums")
    assert [reward.judging for reward in (accuracy, countdown, form, own)] == [Judging(), None, None, None]
    assert [reward.takes_all for reward in (accuracy, countdown, form, own)] == [True, True, True, False]
    assert [reward.failures is None for reward in (accuracy, countdown, form, own)] == [True, True, True, False]


def test_a_column_goes_to_the_argument_it_is_mapped_to():
    asked = {
        "countdown": {"columns": {"numbers": "nums", "target": "goal"}},
        "own_rewards:length": {"columns": {"limit": "most"}},
    }
    countdown, own = resolve_rewards(settings(**asked))
    assert countdown.function(completions=["<answer>1+2</answer>"], nums=[[1, 2]], goal=[3]) == [1.0]
    assert own.function(completions=["abcdef"], most=4) == [4.0]


def test_a_function_that_raises_is_none_for_the_sample_and_counted():
    (reward,) = resolve_rewards(settings(**{"own_rewards:picky": {"max_failures": 1}}))
    assert reward.function(completions=["a", "bad", "c"], prompts=["1", "2", "3"]) == [1.0, None, 1.0]
    assert (reward.failures.count, reward.failures.too_many) == (1, False)
    reward.function(completions=["bad"], prompts=["2"])
    assert reward.failures.too_many
    assert "picky" in reward.failures.newest
    assert "no good" in reward.failures.newest


def test_a_function_in_workers_scores_each_sample_within_its_time():
    asked = {
        "own_rewards:sleepy": {"workers": 2, "timeout_seconds": 5, "args": {"scale": 3.0}, "columns": {"naps": "rest"}}
    }
    (reward,) = resolve_rewards(settings(**asked))
    scores = reward.function(completions=["a", "b", "c"], prompts=["", "", ""], rest=[0, 3600, 0])
    assert scores == [3.0, None, 3.0]
    assert reward.failures.count == 1
    assert reward.function.__name__ == "sleepy"


def test_a_process_reward_is_made_and_loads_nothing_yet():
    (reward,) = resolve_rewards(settings(process_reward={"weight": 0.5, "args": {"model": "no/such-model"}}))
    assert reward.function.__name__ == "process_reward"
    assert (reward.weight, reward.failures) == (0.5, None)
    assert reward.function(prompts=[], completions=[]) == []


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
        ("zzz", ["no reward 'zzz'", "accuracy", "format", "process_reward", "package.module:function"]),
        ("code", ["no reward 'code'", "sandbox", "package.module:function"]),
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


@pytest.mark.parametrize(
    ("name", "setting", "path", "words"),
    [
        ("soft_overlong", 1, "", ["needs the argument soft_punish_cache"]),
        ("soft_overlong", {"args": {"soft_punish_cache": 600}}, ".args", ["soft_overlong: "]),
        ("cosine_length", {"args": {"max_len": 0}}, ".args", ["max_len"]),
        ("repetition_penalty", {"args": {"ngram_size": 0}}, ".args", ["ngram_size"]),
        ("format", {"args": {"style": "boxd"}}, ".args", ["boxed"]),
        ("accuracy", {"args": {"timeout_seconds": 0}}, ".args", ["timeout_seconds"]),
        ("accuracy", {"args": {"workers": 0}}, ".args", ["workers"]),
        ("accuracy", {"args": {"solution": "4"}}, ".args.solution", ["is a column", "columns: {solution: NAME}"]),
        ("accuracy", {"columns": {"solutoin": "gold"}}, ".columns.solutoin", ["did you mean solution?"]),
        ("accuracy", {"workers": 2}, ".workers", ["custom rewards", "args: {workers: ...}"]),
        ("format", {"max_failures": 2}, ".max_failures", ["custom rewards", "leave it out"]),
        ("process_reward", 1, ".args", ["model is required"]),
        (
            "process_reward",
            {"args": {"model": "a/b", "agregation": "min"}},
            ".args.agregation",
            ["did you mean aggregation?"],
        ),
        (
            "process_reward",
            {"args": {"model": "a/b", "aggregation": "max"}},
            ".args.aggregation",
            ["must be one of min"],
        ),
        ("own_rewards:length", {"columns": {"limt": "most"}}, ".columns.limt", ["did you mean limit?"]),
    ],
)
def test_a_setting_that_cannot_be_is_one_problem(name, setting, path, words):
    ((where, problem),) = problems({name: setting})
    assert where == f"rewards.{name}{path}"
    assert all(word in problem for word in words), problem


def test_a_time_limit_without_workers_is_refused():
    with pytest.raises(ValueError, match="needs workers"):
        RewardSetting.model_validate({"timeout_seconds": 3})


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
    assert reward_mistakes({}) == []


@pytest.mark.parametrize(
    ("name", "setting", "path", "words"),
    [
        ("accuracy", {"args": {"timeout_seconds": float("inf")}}, ".args", ["timeout_seconds", "up to a day"]),
        ("accuracy", {"args": {"timeout_seconds": True}}, ".args", ["timeout_seconds", "up to a day"]),
        ("accuracy", {"args": {"workers": "2"}}, ".args", ["workers must be a whole number"]),
        ("cosine_length", {"args": {"workers": 1.5}}, ".args", ["workers must be a whole number"]),
        ("process_reward", {"args": {"model": "a/b"}, "columns": {"prompts": "q"}}, ".columns", ["takes no columns"]),
        ("process_reward", {"args": {"model": "a/b", "device": "meta"}}, ".args.device", ["no device"]),
        ("own_rewards:curious", {"workers": 2}, ".workers", ["a worker has no trainer_state"]),
        ("math:hypot", 1, "", ["no signature"]),
        ("leaving:score", 1, "", ["cannot import leaving"]),
    ],
)
def test_what_would_fail_later_is_said_at_once(name, setting, path, words):
    Path("leaving.py").write_text("import sys\nsys.exit('bye')\n", encoding="utf-8")
    ((where, problem),) = problems({name: setting})
    assert where == f"rewards.{name}{path}"
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("changes", [{"weight": float("nan")}, {"workers": 1, "timeout_seconds": float("inf")}])
def test_a_number_that_is_none_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(set(changes) - {"workers"}))):
        RewardSetting.model_validate(changes)


def test_a_mapped_column_is_needed_also_for_an_optional_argument():
    (reward,) = resolve_rewards(settings(**{"own_rewards:length": {"columns": {"limit": "most"}}}))
    assert reward.needs == ("completions", "most")


def test_an_object_that_is_called_asynchronously_is_awaited():
    (reward,) = resolve_rewards(settings(**{"own_rewards:later": 1}))
    assert inspect.iscoroutinefunction(reward.function)
    assert asyncio.run(reward.function(completions=["a"], prompts=[""])) == [8.0]


def test_the_limits_of_the_verifier_are_the_recipes():
    asked = {"accuracy": {"args": {"timeout_seconds": 2, "workers": 3}, "columns": {"solution": "gold"}}}
    (reward,) = resolve_rewards(settings(**asked))
    assert reward.judging == Judging("gold", 2, 3)
