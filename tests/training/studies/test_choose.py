"""Which candidate of an arm is chosen, by numbers that are computed by hand."""

import json
import math

import pytest

from perl.errors import RunFolderError
from perl.training.studies.cells import Candidate, Cell
from perl.training.studies.processes import CellEnd
from perl.training.studies.results import better_share, choose, row_of
from perl.training.studies.run_study import reward_at

RATES = [Candidate({"peft.method": "lora"}, {"train.learning_rate": rate}) for rate in (1e-4, 1e-3, 1e-2, 1e-1)]
SEEDS = (0, 1, 2)
DRAWN = dict.fromkeys((one.key for one in RATES), 1000)


def scores(*rows):
    found = zip(RATES, rows, strict=True)
    return {(one.key, seed): s for one, row in found for seed, s in zip(SEEDS, row, strict=True) if s is not None}


def test_the_best_mean_is_chosen_and_the_good_interval_is_two_standard_errors_wide():
    found = choose(RATES, scores((0.2, 0.2, 0.2), (0.5, 0.6, 0.7), (0.48, 0.49, 0.5), (0.1, 0.1, 0.9)), SEEDS, DRAWN)
    assert found.candidate is RATES[1]
    assert [found.scores[one.key] for one in RATES] == pytest.approx([0.2, 0.6, 0.49, 1.1 / 3])
    # the standard error of 0.5, 0.6, 0.7 is 0.1 / sqrt(3) = 0.0577: what is above 0.6 - 0.1155 is as good
    assert found.good == (RATES[1], RATES[2])
    # seeds that agree by chance: 0.9 of 3 x 75 completions has the standard error sqrt(0.09 / 225) = 0.02
    same = scores((0.87, 0.87, 0.87), (0.9, 0.9, 0.9), (0.85, 0.85, 0.85), (0.1, 0.1, 0.1))
    assert choose(RATES, same, SEEDS, dict.fromkeys(DRAWN, 75)).good == (RATES[0], RATES[1])
    assert choose(RATES, same, SEEDS, dict.fromkeys(DRAWN, 7500)).good == (RATES[1],)


def test_a_candidate_that_failed_with_a_seed_is_not_chosen():
    found = choose(RATES, scores((0.2, 0.2, 0.2), (0.9, 0.9, None), (0.3, 0.3, 0.3), (None, None, None)), SEEDS, DRAWN)
    assert found.candidate is RATES[2]
    assert math.isnan(found.scores[RATES[1].key])
    assert choose(RATES, {}, SEEDS, DRAWN).candidate is None


@pytest.mark.parametrize(("keep", "left"), [(0.5, [0, 3]), (0.25, [3]), (0.01, [3]), (0.6, [0, 2, 3])])
def test_the_better_share_of_an_arm_goes_on(keep, left):
    rewards = {RATES[0].key: 0.4, RATES[2].key: 0.1, RATES[3].key: 0.7}
    assert better_share(RATES, rewards, keep) == [RATES[index] for index in left]


def test_scores_and_rewards_are_those_of_the_run(tmp_path):
    rows = [{"step": step, "reward": step / 100} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert reward_at(tmp_path, 20) == pytest.approx(0.155)  # the mean of steps 11 to 20
    assert reward_at(tmp_path, 3) == pytest.approx(0.02)
    cell, done = Cell(RATES[0], 1, "score"), CellEnd("done")
    assert row_of(cell, tmp_path, done, "").reason == "it has no score"
    tasks = {"a": {"adapter": 0.25, "n": 4, "k": 2}, "b": {"adapter": 0.75, "n": 8, "k": 1}}
    facts = {"status": "done", "trainable_parameters": 9, "eval": tasks, "fingerprint": {"adapter": "ab"}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    row = row_of(cell, tmp_path, done, "perl train")
    assert row.score == pytest.approx(0.5)
    assert (row.completions, row.parameters, row.adapter, row.command) == (16, 9, "ab", "perl train")
    assert row_of(cell, tmp_path, CellEnd("failed", "why"), "").score is None
    (tmp_path / "run.json").write_text(json.dumps({**facts, "eval": {"a": {"adapter": None, "n": 4, "k": 2}}}))
    with pytest.raises(RunFolderError, match="its scores are malformed"):
        row_of(cell, tmp_path, done, "")
