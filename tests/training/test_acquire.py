"""The recipe ``acquire`` teaches what its base never does in 64 tries."""

import json

import pytest

import perl

EVALUATED = ["eval.limit=100", "eval.k=2", "train.seed=42"]


def accuracies(recipe, folder, *overrides):
    """Held-out accuracy of base and adapter, and the mean rewards of the last 20 steps."""
    run = perl.train(recipe, [*EVALUATED, *overrides], folder / "run")
    scores = json.loads((run.path / "run.json").read_text())["eval"]["sandbox:cipher"]
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row][-20:]
    return scores["base"], scores["adapter"], sum(rewards) / len(rewards)


@pytest.mark.nightly
def test_a_partial_reward_teaches_the_code_to_a_base_that_is_never_right(tmp_path):
    base, adapter, reward = accuracies("acquire", tmp_path)
    assert base == pytest.approx(0, abs=1e-9)
    assert adapter > 0.05  # of the 11 seeds of studies/acquire.yaml the lowest has 0.062, the mean is 0.33
    assert reward > 1.1  # of 2
