"""What a report says of scores, beside numbers that are computed here."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from perl.training.studies.cells import CHOOSES, SCORES, cells_of
from perl.training.studies.findings import findings
from perl.training.studies.plan import load_study
from perl.training.studies.report import write_report
from perl.training.studies.results import CHOSEN, CellRow, StudyResult, read_chosen
from perl.training.studies.run_study import chosen_of

METHODS, RATES = ("lora", "dora", "ia3"), (1e-4, 1e-3, 1e-2)
CHOOSE, SCORE = (0, 1), (5, 6, 7, 8)
# Two seeds that choose, at three rates; four that score at the chosen rate, and at LoRA's.
TRIED = {
    "lora": [(0.2, 0.3), (0.6, 0.7), (0.5, 0.5)],
    "dora": [(0.1, 0.1), (0.4, 0.5), (0.6, 0.7)],
    "ia3": [(0.1, 0.1), (0.2, 0.2), (0.3, None)],
}
AT_BEST = {"lora": (0.60, 0.64, 0.66, 0.70), "dora": (0.63, 0.65, 0.72, 0.74), "ia3": (0.21, 0.30, 0.22, 0.27)}
DORA_AT_LORAS = (0.41, 0.44, 0.45, 0.52)


def rows_for(candidate, seeds, stage, scores):
    for cell, score in zip(cells_of([candidate], seeds, stage), scores, strict=True):
        status, why = ("done", "") if score is not None else ("failed", "exit code 1")
        settings, title = candidate.settings, candidate.title
        yield CellRow(cell.name, title, settings, cell.seed, stage, status, score, why, data={"train": "v1"})


@pytest.fixture
def result(tmp_path):
    """A study of three methods whose cells are made up, and its results."""
    grid, seeds = {"peft.method": [*METHODS], "train.learning_rate": [*RATES]}, {"choose": [*CHOOSE], "score": [*SCORE]}
    study = load_study({"recipe": "quickstart", "grid": grid, "seeds": seeds, "baseline": {"peft.method": "lora"}})
    arms = dict(zip(METHODS, study.arms, strict=True))
    found = StudyResult(tmp_path)
    for name, arm in arms.items():
        for candidate, scores in zip(arm, TRIED[name], strict=True):
            found.rows += rows_for(candidate, CHOOSE, CHOOSES, scores)
    found.chosen = chosen_of(study, found.rows)
    for name, place in (("lora", 1), ("dora", 2), ("ia3", 1)):
        found.rows += rows_for(arms[name][place], SCORE, SCORES, AT_BEST[name])
    found.rows += rows_for(arms["dora"][1], SCORE, SCORES, DORA_AT_LORAS)
    return study, found


def test_arms_are_held_against_the_baseline_at_their_best_and_at_its_rate(result):
    found = findings(*result)
    arms = {arm.title: arm for arm in found.arms}
    assert [arm.title for arm in found.sorted()] == ["dora", "lora", "ia3"]
    assert found.reference == "lora"
    for name, scores in AT_BEST.items():
        assert arms[name].best.score == pytest.approx(np.mean(scores))
        assert arms[name].best.stderr == pytest.approx(np.std(scores, ddof=1) / 2)
    assert arms["lora"].best.difference is None
    for name in ("dora", "ia3"):
        paired = np.subtract(AT_BEST[name], AT_BEST["lora"])
        one = arms[name].best.difference
        assert one.mean == pytest.approx(paired.mean())
        half = 3.182446 * paired.std(ddof=1) / 2  # Student's t of three degrees of freedom at 95 %
        assert (one.low, one.high) == pytest.approx((paired.mean() - half, paired.mean() + half), abs=1e-6)
    # Holm: the smaller of two p values counts twice, the other once and never less than that
    t = [
        np.mean(d) / (np.std(d, ddof=1) / 2)
        for d in (np.subtract(AT_BEST[n], AT_BEST["lora"]) for n in ("dora", "ia3"))
    ]
    p = [2 * stats.t.sf(abs(one), 3) for one in t]
    small = 2 * min(p)
    expected = [small if one == min(p) else max(small, one) for one in p]
    assert [arms[name].best.difference.p_value for name in ("dora", "ia3")] == pytest.approx(expected, rel=1e-3)
    at_loras = arms["dora"].at_baseline
    assert at_loras.score == pytest.approx(np.mean(DORA_AT_LORAS))
    assert at_loras.difference.mean == pytest.approx(np.mean(np.subtract(DORA_AT_LORAS, AT_BEST["lora"])))


def test_what_was_chosen_at_the_edge_what_failed_and_other_data_are_said(result, tmp_path):
    study, found = result
    assert {arm.title: arm.at_edge for arm in findings(study, found).arms} == {
        "lora": (),
        "dora": ("learning rate 0.01",),
        "ia3": (),  # of the three only two have a score on both seeds, and the larger one of all was tried
    }
    report = write_report(study, found).read_text()
    assert "dora (learning rate 0.01)" in report
    assert "## All with what was chosen for lora: learning rate 0.001" in report
    assert "- Cells that failed or have not ended: 1." in report
    assert "`ia3_learning_rate-0.01_seed-1`: failed: exit code 1" in report
    assert "A data file was changed" not in report
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["score_by_setting.png"]
    found.rows[-1] = replace(found.rows[-1], data={"train": "v2"})
    assert "A data file was changed" in write_report(study, found).read_text()


def test_a_choice_is_read_as_it_was_written(result, tmp_path):
    _, found = result
    assert read_chosen(tmp_path) is None
    found.write(CHOSEN)
    assert read_chosen(tmp_path) == found.rows
