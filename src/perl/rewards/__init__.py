"""Rewards: what is right, how much it counts, and the user's custom rewards.

completions, prompts, columns of the data by name -> one number or None a completion

Where prompts are chat messages, so are completions, ``[[{"role": "assistant", "content": "..."}], ...]``; else texts.
"""

from perl.rewards.accuracy import accuracy_reward as accuracy_reward
from perl.rewards.accuracy import partial_answer_reward as partial_answer_reward
from perl.rewards.accuracy import reasoning_accuracy_reward as reasoning_accuracy_reward
from perl.rewards.countdown import countdown_reward as countdown_reward
from perl.rewards.lengths import cosine_length_reward as cosine_length_reward
from perl.rewards.lengths import length_penalty_reward as length_penalty_reward
from perl.rewards.lengths import soft_overlong_reward as soft_overlong_reward
from perl.rewards.named import NAMED_REWARDS as NAMED_REWARDS
from perl.rewards.process.reward import process_reward as process_reward
from perl.rewards.resolve import Reward as Reward
from perl.rewards.resolve import resolve_rewards as resolve_rewards
from perl.rewards.resolve import reward_mistakes as reward_mistakes
from perl.rewards.shaping import format_reward as format_reward
from perl.rewards.shaping import repetition_penalty_reward as repetition_penalty_reward
from perl.rewards.shaping import tag_count_reward as tag_count_reward
from perl.rewards.verifier import check as check
from perl.rewards.verifier import check_all as check_all
