"""Rewards: what is right, how much it counts, and the user's own functions."""

from perl.rewards.builtin import accuracy_reward as accuracy_reward
from perl.rewards.builtin import format_reward as format_reward
from perl.rewards.resolve import NAMED_REWARDS as NAMED_REWARDS
from perl.rewards.resolve import Reward as Reward
from perl.rewards.resolve import resolve_rewards as resolve_rewards
from perl.rewards.resolve import reward_problems as reward_problems
from perl.rewards.verifier import check as check
