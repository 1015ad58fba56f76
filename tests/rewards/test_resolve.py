"""Names in a recipe become functions that TRL can call, or a problem that says which name was meant."""

import asyncio
import inspect
import math
import sys
from pathlib import Path

import pytest

from perl.errors import RecipeError
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import RewardSetting
from perl.rewards import NAMED_REWARDS, reward_mistakes
from perl.rewards import resolve_rewards as resolve
from perl.rewards.verifier import Judging
from tests.oracles.reward_formulas import cosine_reward, dapo_overlong, kimi_length_penalties, repeated_share

MODULE = """\
constant = 3


def length(completions, limit=10, *, scale=1.0, **_):
    return [scale * min(len(text), limit) for text in completions]


async def slow(completions, limit=10, **_):
    return [float(limit)] * len(completions)


def seen(completions, answer, solution, **_):
    numbers = [11.0 * int(text) if text.isdigit() else -1.0 for text in answer]
    return [number * len(text) for number, text in zip(numbers, solution)]


def strict(completions):
    return [0.0]


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


def mistakes(rewards):
    return [(".".join(path), str(mistake)) for path, mistake in reward_mistakes({"rewards": settings(**rewards)})]


REQUIRED = {"soft_overlong": {"args": {"soft_punish_cache": 20}}}
FIRST_AND_SECOND = {  # rewards of a right completion of 3 tokens and of a wrong one of 100, of one prompt
    "accuracy": [1.0, 0.0],
    "reasoning_accuracy": [0.0, 0.0],
    "format": [1.0, 1.0],
    "tag_count": [0.0, 0.0],
    "length_penalty": kimi_length_penalties([3, 100], [True, False]),
    "cosine_length": [cosine_reward(3, 100, 1.0, 0.5), cosine_reward(100, 100, -1.0, -0.5)],
    "soft_overlong": [dapo_overlong(3, 100, 20), dapo_overlong(100, 100, 20)],
    "repetition_penalty": [-repeated_share([1, 2, 3], 3), -repeated_share([1] * 100, 3)],
    "countdown": [1.0, 0.1],
    "partial_answer": [1.0, 0.0],
}
OF_MODEL = {"model": "a/b"}
BATCH = {
    "prompts": ["2+2="] * 2,
    "completions": [r"\boxed{4}", r"\boxed{5}"],
    "completion_ids": [[1, 2, 3], [1] * 100],
    "solution": ["4", "4"],
    "target": [4, 4],
    "numbers": [[4], [4]],
    "level": ["easy", "hard"],
}


def every_named_reward():
    return resolve_rewards(settings(**dict.fromkeys(NAMED_REWARDS, 1) | REQUIRED))


def test_every_named_reward_is_called_as_trl_calls_it_and_scores_text_and_chat_messages_alike():
    chats = {name: [[{"role": "user", "content": text}] for text in BATCH[name]] for name in ("prompts", "completions")}
    scores = {}
    for reward in every_named_reward():
        for columns in (BATCH, BATCH | chats):
            logged = {"log_metric": lambda *_: None, "log_extra": lambda *_: None}
            found = reward.function(**columns, trainer_state=None, **logged)
            assert scores.setdefault(reward.name, found) == found
            assert reward.function(**columns, trainer_state=None, log_metric=None, log_extra=None) == found
    assert list(scores) == list(FIRST_AND_SECOND) == list(NAMED_REWARDS)
    for name, expected in FIRST_AND_SECOND.items():
        assert scores[name] == pytest.approx([float(value) for value in expected], abs=1e-12), name
    assert [reward.function.__name__ for reward in every_named_reward()] == list(NAMED_REWARDS)


def test_no_completions_are_no_rewards_and_nothing_is_logged():
    (made,) = resolve_rewards(settings(process_reward={"args": {"model": "nobody/has-this"}}))
    for reward in (*every_named_reward(), made):
        empty = reward.function(**{name: [] for name in BATCH}, log_metric=pytest.fail, log_extra=lambda *_: None)
        assert empty == [], reward.name


def test_the_longest_completion_is_the_runs_unless_the_recipe_sets_another():
    asked = {"cosine_length": {"args": {"max_len": 6}}, **REQUIRED}
    cosine, overlong = resolve_rewards(settings(**asked))
    rows = {"prompts": [""], "completions": [r"\boxed{4}"], "completion_ids": [[1, 2, 3]], "solution": ["4"]}
    assert cosine.function(**rows) == [pytest.approx(cosine_reward(3, 6, 1.0, 0.5))]
    assert overlong.function(**rows | {"completion_ids": [[1] * 90]}) == [dapo_overlong(90, 100, 20)]


def test_what_a_reward_needs_and_whether_it_judges_is_known():
    limits = {"args": {"timeout_seconds": 2, "workers": 3}, "columns": {"solution": "gold"}}
    rows = [  # name, setting; columns that it needs, how it judges, whether it takes all columns and counts failures
        ("accuracy", 1, ("completions", "solution"), Judging(), True, False),
        ("accuracy", limits, ("completions", "gold"), Judging("gold", 2, 3), True, False),
        ("countdown", {"columns": {"numbers": "nums"}}, ("completions", "target", "nums"), None, True, False),
        ("format", 1, ("completions",), None, True, False),
        ("process_reward", {"args": OF_MODEL}, (), None, True, False),
        ("own_rewards:strict", 1, ("completions",), None, False, True),
        ("own_rewards:length", {"columns": {"limit": "most"}}, ("completions", "most"), None, True, True),
    ]
    for name, setting, *known in rows:
        (reward,) = resolve_rewards(settings(**{name: setting}))
        counts_failures = reward.failures is not None
        assert [reward.needs, reward.judging, reward.takes_all, counts_failures] == known, (name, setting)


@pytest.mark.parametrize(
    ("name", "setting", "columns", "values"),
    [
        ("own_rewards:length", 1, {"completions": ["abcdef" * 3]}, [10.0]),
        ("own_rewards:length", {"args": {"limit": 3, "scale": 2.0}}, {"level": ["x", "y"]}, [2.0, 6.0]),
        ("own_rewards:length", {"args": {"limit": 3}}, {"limit": [1]}, [1.0, 3.0]),
        ("own_rewards:length", {"columns": {"limit": "most"}}, {"most": 4}, [1.0, 4.0]),
        (
            "countdown",
            {"columns": {"numbers": "nums", "target": "goal"}},
            {"completions": ["<answer>1+2</answer>"], "nums": [[1, 2]], "goal": [3]},
            [1.0],
        ),
    ],
)
def test_an_argument_is_the_recipes_or_else_the_column_that_it_is_mapped_to_or_else_its_default(
    name, setting, columns, values
):
    (reward,) = resolve_rewards(settings(**{name: setting}))
    assert reward.function(**{"completions": ["a", "abcdef"], "prompts": ["", ""], **columns}) == values


@pytest.mark.parametrize("workers", [None, 1])
def test_a_custom_reward_gets_columns_by_their_own_names_and_the_gold_answer_as_answer(workers):
    own = {"solution": "original_solution"}
    stored = {"completions": ["a", "b"], "solution": ["1", "2"], "original_solution": ["one", "two"]}

    def seen(names, given, **setting):
        (reward,) = resolve({"own_rewards:seen": RewardSetting(workers=workers, **setting)}, RolloutSection(), names)
        return reward.function(**given)

    assert seen(own, stored) == [11.0 * 3, 22.0 * 3]  # answer, then the letters of solution
    assert seen(own, {**stored, "answer": ["7", "8"]}) == [77.0 * 3, 88.0 * 3]
    assert seen({}, stored) == [11.0, 22.0]
    assert seen(own, stored, columns={"solution": "solution"}) == [11.0, 22.0]
    assert seen(own, stored, columns={"answer": "original_solution"}) == [-3.0, -3.0]
    (accuracy,) = resolve({"accuracy": RewardSetting()}, RolloutSection(), own)
    assert accuracy.function(**{**stored, "completions": [r"\boxed{1}", r"\boxed{1}"]}) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "asynchronous", "values"),
    [
        ("own_package.deep.scores:length", False, [1.0, 2.0]),
        ("own_rewards:judge", False, [7.0, 7.0]),
        ("own_rewards:later", True, [8.0, 8.0]),
    ],
    ids=["package", "object", "asynchronous object"],
)
def test_whatever_can_be_called_is_found_and_what_is_async_stays_so(name, asynchronous, values):
    Path("own_package/deep").mkdir(parents=True)
    Path("own_package/deep/__init__.py").touch()
    Path("own_package/deep/scores.py").write_text(MODULE, encoding="utf-8")
    (reward,) = resolve_rewards(settings(**{name: 1}))
    assert inspect.iscoroutinefunction(reward.function) is asynchronous
    scored = reward.function(completions=["a", "bc"], prompts=["", ""])
    assert (asyncio.run(scored) if asynchronous else scored) == values
    assert reward.function.__name__ == name.rpartition(":")[2]


def test_rewards_have_the_recipes_order_and_weights_and_names_of_their_own_in_the_log():
    Path("other_rewards.py").write_text(MODULE, encoding="utf-8")
    weights = {
        "format": 0.5,
        "own_rewards:length": -2.0,
        "accuracy": 1.0,
        "other_rewards:length": 1.0,
        "process_reward": 0.25,
    }
    asked = {name: {"weight": weight} for name, weight in weights.items()}
    asked["process_reward"]["args"] = {"model": "no/such-model"}
    rewards = resolve_rewards(settings(**asked))
    assert [(reward.name, reward.weight) for reward in rewards] == list(weights.items())
    names = [reward.function.__name__ for reward in rewards]
    assert len(set(names)) == len(rewards)
    assert names[::2] == ["format", "accuracy", "process_reward"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acuracy", ["no reward 'acuracy'", "did you mean accuracy?", "package.module:function"]),
        ("code", ["no reward 'code'", "sandbox", "package.module:function"]),
        ("own_rewards.length", ["no reward 'own_rewards.length'", "package.module:function"]),
        ("own_rewads:length", ["cannot import own_rewads", "current folder"]),
        ("own_rewards:lenght", ["own_rewards has no function 'lenght'", "did you mean length?"]),
        ("own_rewards:constant", ["own_rewards has no function 'constant'"]),
        ("own_rewards.deeper:length", ["cannot import own_rewards.deeper"]),
        ("math:hypot", ["no signature"]),
        *[(f"broken_{kind}:f", [f"cannot import broken_{kind}: "]) for kind in ("import", "exit")],
    ],
)
def test_a_name_that_is_not_found_is_one_mistake(name, words):
    for kind, text in (("import", "import no_such_package_at_all"), ("exit", "import sys; sys.exit('bye')")):
        Path(f"broken_{kind}.py").write_text(f"{text}\n", encoding="utf-8")
    ((path, mistake),) = mistakes({"accuracy": 1, name: 1})
    assert path == f"rewards.{name}"
    assert all(word in mistake for word in words), mistake
    with pytest.raises(RecipeError) as caught:
        resolve_rewards(settings(**{name: 1}))
    assert str(caught.value) == f"rewards.{name}: {mistake}"


WRONG_SETTINGS = [  # name, setting, key below the name -> what is said about it
    ("soft_overlong", 1, {}),
    ("soft_overlong", {"args": {"soft_punish_cache": 600}}, {".args": ["soft_overlong: "]}),
    ("cosine_length", {"args": {"max_len": 0}}, {".args": ["max_len"]}),
    ("format", {"args": {"style": "boxd"}}, {".args": ["boxed"]}),
    ("format", {"args": {"strict": True}}, {".args.strict": ["format has no argument 'strict'"]}),
    ("format", {"max_failures": 2}, {".max_failures": ["custom rewards", "leave it out"]}),
    ("accuracy", {"args": {"timeout_seconds": math.inf}}, {".args": ["timeout_seconds", "up to a day"]}),
    ("accuracy", {"args": {"workers": "2"}}, {".args": ["workers must be a whole number"]}),
    ("accuracy", {"args": {"solution": "4"}}, {".args.solution": ["is a column", "columns: {solution: NAME}"]}),
    ("accuracy", {"columns": {"solutoin": "gold"}}, {".columns.solutoin": ["did you mean solution?"]}),
    ("accuracy", {"workers": 2}, {".workers": ["custom rewards", "args: {workers: ...}"]}),
    ("process_reward", 1, {".args": ["model is required"]}),
    ("process_reward", {"args": {**OF_MODEL, "aggregation": "max"}}, {".args.aggregation": ["must be one of min"]}),
    ("process_reward", {"args": OF_MODEL, "columns": {"prompts": "q"}}, {".columns": ["takes no columns"]}),
    (
        "own_rewards:length",
        {"args": {"limt": 3, "scale": 1, "colour": 2}},
        {".args.limt": ["did you mean limit?"], ".args.colour": ["length has no argument 'colour'"]},
    ),
    ("own_rewards:curious", {"workers": 2}, {".workers": ["a worker has no trainer_state"]}),
    ("own_rewards:length", {"args": {"limit": 3}}, {}),
    ("own_rewards:slow", 0, {}),
    ("accuracy", 1, {}),
]


@pytest.mark.parametrize(("name", "setting", "expected"), WRONG_SETTINGS)
def test_each_wrong_setting_is_one_mistake_at_its_key_and_right_ones_are_none(name, setting, expected):
    assert reward_mistakes({}) == []
    found = mistakes({name: setting, "tag_count": 1})
    assert [path for path, _ in found] == [f"rewards.{name}{key}" for key in expected]
    missing = [
        (mistake, word)
        for (_, mistake), words in zip(found, expected.values(), strict=True)
        for word in words
        if word not in mistake
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"timeout_seconds": 3}, "needs workers"),
        ({"weight": math.nan}, "weight"),
        ({"workers": 1, "timeout_seconds": math.inf}, "timeout_seconds"),
    ],
)
def test_a_setting_that_suits_no_reward_is_refused_as_it_is_read(setting, words):
    with pytest.raises(ValueError, match=words):
        RewardSetting.model_validate(setting)
