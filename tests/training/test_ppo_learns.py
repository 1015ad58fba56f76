"""PPO on the quickstart by its own defaults: the critic comes to explain returns, the policy gets GRPO's accuracy.

Once nearly all rewards are 1 there is nothing left to explain, and the share of almost no variance that the values
explain says nothing. So the critic is looked at in the first 24 steps, in which rewards still differ.
"""

import json
from statistics import mean

import pytest

import perl

UNTIL_REWARDS_AGREE = ["train.max_steps=24", "eval.k=2"]
SEEDS = [0, pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly)]


def trained(folder, algorithm, *overrides):
    """The run's accuracies on held-out problems, and its metrics."""
    run = perl.train("quickstart", [f"algorithm={algorithm}", *overrides], folder / algorithm)
    facts = json.loads((run.path / "run.json").read_text())
    return facts["eval"]["sandbox:addition"], [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critic_comes_to_explain_the_returns_while_the_policy_learns(seed, tmp_path):
    scores, rows = trained(tmp_path, "ppo", f"train.seed={seed}", *UNTIL_REWARDS_AGREE)
    explained = [row["critic/explained_variance"] for row in rows]
    assert len(explained) == 24
    assert mean(explained[-8:]) > mean(explained[:8]) + 0.1  # above 1 it cannot be, below 0 as far as it likes
    of_grpo, _ = trained(tmp_path, "grpo", f"train.seed={seed}", *UNTIL_REWARDS_AGREE)
    assert scores["base"] == of_grpo["base"] < 0.7
    assert scores["adapter"] > scores["base"] + 0.08
    assert scores["adapter"] > of_grpo["adapter"] - 0.06  # two standard errors of such a difference
    losses = [row["critic/loss"] for row in rows]
    assert mean(losses[-8:]) < 0.5 * mean(losses[:8])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_quickstart_ends_where_grpo_ends(seed, tmp_path):
    scores = {name: trained(tmp_path, name, f"train.seed={seed}")[0] for name in ("ppo", "grpo")}
    assert scores["ppo"]["base"] == scores["grpo"]["base"] < 0.7
    assert scores["ppo"]["adapter"] > 0.96
    assert scores["ppo"]["adapter"] > scores["grpo"]["adapter"] - 0.02
