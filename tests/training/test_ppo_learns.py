"""PPO on the quickstart by its own defaults: the critic comes to explain returns, the policy gets GRPO's accuracy.

Once nearly all rewards are 1 there is nothing left to explain, and the share of almost no variance that the values
explain says nothing. So the critic is looked at in the first 24 steps, in which rewards still differ.
"""

import json
from statistics import mean

import pytest

import perl

UNTIL_REWARDS_AGREE = ["train.max_steps=24", "eval.k=2"]


def trained(folder, algorithm, *overrides):
    """The run's accuracies on held-out problems, and its metrics."""
    run = perl.train("quickstart", [f"algorithm={algorithm}", *overrides], folder / algorithm)
    facts = json.loads((run.path / "run.json").read_text())
    return facts["eval"]["sandbox:addition"], [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.nightly
def test_the_critic_comes_to_explain_the_returns_while_the_policy_learns(tmp_path):
    scores, rows = trained(tmp_path, "ppo", *UNTIL_REWARDS_AGREE)
    explained = [row["critic/explained_variance"] for row in rows]
    assert len(explained) == 24
    assert mean(explained[-8:]) > mean(explained[:8]) + 0.1  # above 1 it cannot be, below 0 as far as it likes
    of_grpo, _ = trained(tmp_path, "grpo", *UNTIL_REWARDS_AGREE)
    assert scores["base"] == of_grpo["base"] < 0.7
    assert scores["adapter"] > scores["base"] + 0.08
    assert scores["adapter"] > of_grpo["adapter"] - 0.06  # two standard errors of such a difference
    losses = [row["critic/loss"] for row in rows]
    assert mean(losses[-8:]) < 0.5 * mean(losses[:8])
