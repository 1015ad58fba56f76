"""Rewards that can be negative are refused where the advantages divide by their mean, if that is known beforehand."""

import pytest

from perl.algorithms.estimators import ADVANTAGES
from perl.recipe.sections import RewardSetting
from perl.rewards import reward_mistakes
from perl.rewards.named import NAMED_REWARDS, SCORES, lowest_score
from tests.rewards.test_resolve import FIRST_AND_SECOND


def setting(value) -> RewardSetting:
    return RewardSetting.model_validate(value)


def found(rewards, estimator="maxrl"):
    sections = {"train": {"advantage_estimator": estimator}}
    mistakes = reward_mistakes({**sections, "rewards": {name: setting(value) for name, value in rewards.items()}})
    return {".".join(path): str(mistake) for path, mistake in mistakes}


def test_every_named_reward_says_what_it_may_score():
    assert list(SCORES) == list(NAMED_REWARDS)
    for name, values in FIRST_AND_SECOND.items():
        lowest, highest = lowest_score(name, setting(1)), -lowest_score(name, setting(-1))
        assert lowest < highest
        assert all(lowest <= float(value) <= highest for value in values), name


@pytest.mark.parametrize(
    ("rewards", "blamed"),
    [
        ({"accuracy": 1}, []),
        ({"accuracy": 1, "format": 0.2, "tag_count": 0.1, "countdown": 1}, []),
        ({"accuracy": -1}, ["accuracy"]),
        ({"accuracy": 1, "soft_overlong": 0.1}, ["soft_overlong"]),
        ({"accuracy": 1, "length_penalty": 0.5, "repetition_penalty": 0.5}, ["length_penalty", "repetition_penalty"]),
        ({"repetition_penalty": {"weight": 1, "args": {"max_penalty": 0}}}, []),
        ({"repetition_penalty": -1}, []),
        ({"cosine_length": 1}, ["cosine_length"]),
        ({"cosine_length": {"args": {"min_value_wrong": 0, "max_value_wrong": 0.2}}}, []),
        ({"accuracy": 1, "soft_overlong": 0}, []),
    ],
)
def test_a_sum_that_can_be_negative_is_refused_with_the_rewards_to_blame(rewards, blamed):
    mistakes = found(rewards)
    assert list(mistakes) == [f"rewards.{name}" for name in blamed]
    for text in mistakes.values():
        assert "maxrl" in text
        assert "negative" in text
        assert "rloo" in text
    assert found(rewards, "rloo") == {}


def test_what_is_not_known_is_left_to_the_trainer():
    assert found({"soft_overlong": 1, "json:loads": 1}) == {}  # which may make up for it
    assert found({"soft_overlong": {"weight": 1}, "process_reward": {"args": {"model": "a/b"}}}) == {}
    assert lowest_score("cosine_length", setting({"args": {"min_value_wrong": "low"}})) is None
    assert [name for name, row in ADVANTAGES.items() if row.not_negative] == ["maxrl"]
