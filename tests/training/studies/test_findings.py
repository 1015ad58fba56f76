"""What a report says of scores, beside numbers that are computed here."""

import json

import numpy as np
import pytest

from perl.training.studies.cells import CHOOSES, SCORES, cells_of
from perl.training.studies.choose import choose
from perl.training.studies.findings import findings
from perl.training.studies.report import write_report
from perl.training.studies.results import Row, StudyResult
from perl.training.studies.written_plan import load_study

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


@pytest.fixture
def result(tmp_path):
    """A study of three methods whose cells are made up, and its results."""
    grid = {"peft.method": [*METHODS], "train.learning_rate": [*RATES]}
    study = load_study(
        {
            "recipe": "quickstart",
            "grid": grid,
            "seeds": {"choose": [*CHOOSE], "score": [*SCORE]},
            "baseline": {"peft.method": "lora"},
        }
    )
    found = StudyResult(tmp_path, "0" * 64)

    def row(cell, stage, score):
        one = cell.candidate
        status, why = ("done", "") if score is not None else ("failed", "exit code 1")
        found.rows.append(Row(cell.name, one.title, one.settings, cell.seed, stage, status, score, why, "perl train"))

    by_rate = {name: [c for c in study.candidates if c.arm["peft.method"] == name] for name in METHODS}
    for name in METHODS:
        for candidate, scores in zip(by_rate[name], TRIED[name], strict=True):
            for cell, score in zip(cells_of([candidate], CHOOSE, CHOOSES), scores, strict=True):
                row(cell, CHOOSES, score)
    known = {
        (c.key, s): x
        for n in METHODS
        for c, row_ in zip(by_rate[n], TRIED[n], strict=True)
        for s, x in zip(CHOOSE, row_, strict=True)
        if x is not None
    }
    for arm in study.arms:
        found.chosen[arm[0].title] = choose(arm, known, CHOOSE, {})
    for name, place, scores in [
        ("lora", 1, AT_BEST["lora"]),
        ("dora", 2, AT_BEST["dora"]),
        ("ia3", 1, AT_BEST["ia3"]),
        ("dora", 1, DORA_AT_LORAS),
    ]:
        for cell, score in zip(cells_of([by_rate[name][place]], SCORE, SCORES), scores, strict=True):
            row(cell, SCORES, score)
    return study, found


def test_arms_are_held_against_the_baseline_at_their_best_and_at_its_rate(result):
    found = findings(*result)
    arms = {arm.title: arm for arm in found.arms}
    assert [arm.title for arm in found.sorted()] == ["dora", "lora", "ia3"]
    assert found.reference == "lora"
    for name, scores in AT_BEST.items():
        assert arms[name].best.mean.mean == pytest.approx(np.mean(scores))
        assert arms[name].best.mean.stderr == pytest.approx(np.std(scores, ddof=1) / 2)
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
    p = [2 * _upper_tail(abs(one)) for one in t]
    small = 2 * min(p)
    expected = [small if one == min(p) else max(small, one) for one in p]
    assert [arms[name].best.difference.p_value for name in ("dora", "ia3")] == pytest.approx(expected, rel=1e-3)
    at_loras = arms["dora"].at_baseline
    assert at_loras.mean.mean == pytest.approx(np.mean(DORA_AT_LORAS))
    assert at_loras.difference.mean == pytest.approx(np.mean(np.subtract(DORA_AT_LORAS, AT_BEST["lora"])))


def _upper_tail(t):
    """Of Student's t with three degrees of freedom: its density, integrated."""
    x = np.linspace(t, t + 4000, 4_000_001)
    density = 2 / (np.pi * np.sqrt(3) * (1 + x**2 / 3) ** 2)
    return float(np.trapezoid(density, x))


def test_what_was_chosen_at_the_edge_and_what_failed_is_said(result, tmp_path):
    study, found = result
    assert {arm.title: arm.at_edge for arm in findings(study, found).arms} == {
        "lora": (),
        "dora": ("learning rate 0.01",),
        "ia3": (),  # of the three only two have a score on both seeds, and the larger one of all was tried
    }
    report = write_report(study, found).read_text()
    assert "dora (learning rate 0.01)" in report
    assert "- Cells that failed or have not ended: 1." in report
    assert "`ia3_learning_rate-0.01_seed-1`: failed: exit code 1" in report
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["findings"]["arms"][1]["best"]["mean"]["mean"] == pytest.approx(np.mean(AT_BEST["dora"]))
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"score_by_setting.png"}


def test_without_a_baseline_the_best_of_the_scores_is_corrected_for_all_pairs(tmp_path):
    grid = {"peft.method": [*METHODS]}
    study = load_study({"recipe": "quickstart", "grid": grid, "seeds": {"score": [*SCORE]}})
    rows = [
        Row(
            cell.name, cell.candidate.title, cell.candidate.settings, cell.seed, SCORES, "done", score, "", "perl train"
        )
        for candidate, name in zip(study.candidates, METHODS, strict=True)
        for cell, score in zip(cells_of([candidate], SCORE, SCORES), AT_BEST[name], strict=True)
    ]
    found = findings(study, StudyResult(tmp_path, "0" * 64, rows))
    assert (found.reference, found.named_by, found.tests) == ("dora", "score", 3)
    paired = np.subtract(AT_BEST["lora"], AT_BEST["dora"])
    p = 2 * _upper_tail(abs(paired.mean() / (paired.std(ddof=1) / 2)))
    lora = next(arm for arm in found.arms if arm.title == "lora")
    assert lora.best.difference.p_value == pytest.approx(min(1.0, 2 * p), rel=1e-3)  # the second of three
    assert "chosen by its own scores" in write_report(study, StudyResult(tmp_path, "0" * 64, rows)).read_text()
