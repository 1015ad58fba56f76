"""Runs beside each other: what they scored, in what they differ, and what may not be compared."""

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy
import pytest
from scipy import stats

import perl
from perl.cli.commands import run as run_command
from perl.errors import PerlError, RunFolderError
from perl.evaluation.scoring.protocol import Protocol
from perl.reports.comparison.runs import find_runs
from tests.reports.compared import marks, write_finished
from tests.reports.written import write_run

TINY = ["train.max_steps=2", "eval.limit=8", "eval.k=2", "engine.threads=1"]


def shares(rows: list[str]) -> numpy.ndarray:
    """Of each problem the share of right completions."""
    return numpy.array([[mark == "1" for mark in row] for row in rows]).mean(axis=1)


def row_of(compared, name):
    return next(row for row in compared.rows if row.name == name)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """Two methods of four seeds, and a run of one seed."""
    folder = tmp_path_factory.mktemp("study")
    for seed in range(4):
        write_finished(folder / f"lora-{seed}", marks(0.5, seed), seed=seed)
        # Half of them name the rate that the method has where none is named, which is the same setting.
        rate = 1e-5 if seed % 2 else None
        write_finished(folder / f"dora-{seed}", marks(0.65, 100 + seed), seed=seed, method="dora", rate=rate)
    write_finished(folder / "high", marks(0.55, 7), rate=5e-3)
    return folder


def test_two_runs_are_paired_by_problem(study):
    found = perl.compare([study / "lora-0", study / "high"])
    best, other = found.rows
    high, lora = shares(marks(0.55, 7)), shares(marks(0.5, 0))
    assert (best.name, best.reference, best.what_differs) == ("high", True, "lr 5e-3")
    assert (best.score, best.stderr) == pytest.approx((high.mean(), stats.sem(high)))
    assert other.difference.mean == pytest.approx((lora - high).mean())
    assert other.difference.stderr == pytest.approx(stats.sem(lora - high))
    by_flips = stats.permutation_test(
        (lora - high,), numpy.mean, permutation_type="samples", n_resamples=20_000, rng=numpy.random.default_rng(5)
    )
    assert other.difference.p_value == pytest.approx(by_flips.pvalue, abs=0.02)
    assert other.difference.low < other.difference.mean < other.difference.high
    assert (other.difference.by, other.difference.pairs) == ("problem", 40)
    assert (other.tokens, other.training_seconds, other.seconds, other.trainable_parameters) == (8000, 4.0, 12.5, 1536)


def test_runs_that_differ_in_their_seeds_are_one_setting_and_are_paired_by_seed(study):
    found = perl.compare(study)
    dora, lora, high = (row_of(found, name) for name in ("dora lr 1e-5", "lora lr 1e-5", "high"))
    scores = {m: [shares(marks(c, o + s)).mean() for s in range(4)] for m, c, o in (("l", 0.5, 0), ("d", 0.65, 100))}
    assert (dora.kind, dora.seeds, dora.reference) == ("seeds", (0, 1, 2, 3), True)
    assert (dora.score, dora.stderr) == pytest.approx((numpy.mean(scores["d"]), stats.sem(scores["d"])))
    right = stats.ttest_rel(scores["l"], scores["d"])
    low, high_end = right.confidence_interval(0.95)
    assert (lora.difference.low, lora.difference.high) == pytest.approx((low, high_end))
    assert (lora.difference.own_p_value, lora.difference.by, lora.difference.pairs) == (
        pytest.approx(right.pvalue),
        "seed",
        4,
    )
    # The single run of seed 0 is compared with the setting's run of that seed.
    assert high.difference.mean == pytest.approx((shares(marks(0.55, 7)) - shares(marks(0.65, 100))).mean())
    # Three settings have three pairs, and the best is known by these scores only.
    smaller, larger = sorted([lora.difference.own_p_value, high.difference.own_p_value])
    corrected = sorted([lora.difference.p_value, high.difference.p_value])
    assert corrected == pytest.approx([min(1, 3 * smaller), min(1, max(3 * smaller, 2 * larger))])
    members = [row.name for row in found.rows if row.kind == "seed"]
    assert members == [*(f"dora-{s}" for s in range(4)), *(f"lora-{s}" for s in range(4))]


def test_one_that_is_named_beforehand_is_compared_with_each_other_one(study):
    for to in ("lora-2", study / "lora-2", "lora lr 1e-5"):
        found = perl.compare(study, to=to)
        dora, high = row_of(found, "dora lr 1e-5"), row_of(found, "high")
        assert row_of(found, "lora lr 1e-5").reference
        smaller, larger = sorted([dora.difference.own_p_value, high.difference.own_p_value])
        corrected = sorted([dora.difference.p_value, high.difference.p_value])
        assert corrected == pytest.approx([min(1, 2 * smaller), min(1, max(2 * smaller, larger))])
    with pytest.raises(PerlError, match=r"'lora-9' is not among the runs .did you mean lora-"):
        perl.compare(study, to="lora-9")


def test_scores_of_other_protocols_are_not_compared(tmp_path):
    other = Protocol(preset="perl", temperature=0.7, top_p=0.95, max_new_tokens=512, k=4)
    write_finished(tmp_path / "a", marks(0.5, 1))
    write_finished(tmp_path / "b", marks(0.6, 2), rate=1e-3)
    write_finished(tmp_path / "c", marks(0.9, 3), rate=2e-3, protocol=other, changes={"protocol_hash": "f" * 16})
    found = perl.compare(tmp_path)
    shown = [(row.name, row.group, row.reference, row.difference is None) for row in found.rows]
    assert shown == [("b", 0, True, True), ("a", 0, False, False), ("c", 1, False, True)]
    assert found.rows[1].difference.mean == pytest.approx(shares(marks(0.5, 1)).mean() - shares(marks(0.6, 2)).mean())
    assert any("not compared: c (temperature 0.7" in note for note in found.notes)
    assert any("the others temperature 0.6" in note for note in found.notes)


def test_files_that_contradict_each_other_have_no_score(tmp_path):
    for name in ("good", "figure", "another"):
        write_finished(tmp_path / name, marks(0.5, 1), rate=float(f"{len(name)}e-3"))
    results = tmp_path / "figure" / "eval" / "results.json"
    edited = json.loads(results.read_text())
    edited["perl"]["tasks"]["sums"]["adapter"]["accuracy"] = 0.99
    results.write_text(json.dumps(edited))
    shutil.copy(tmp_path / "good" / "eval" / "results.json", tmp_path / "another" / "eval" / "results.json")
    reasons = {row.name: row.reason for row in perl.compare(tmp_path).rows}
    assert reasons["good"] == ""
    assert "accuracy" in reasons["figure"]
    assert reasons["another"] == "results.json is of another adapter than run.json names"


def test_runs_without_a_score_say_why_and_keep_their_reward(tmp_path):
    write_finished(tmp_path / "done", marks(0.5, 1))
    write_finished(tmp_path / "plain", None, rate=1e-3)
    write_finished(tmp_path / "later", marks(0.4, 2), rate=2e-3)
    (tmp_path / "later" / "evals").mkdir()
    (tmp_path / "later" / "eval").rename(tmp_path / "later" / "evals" / "perl")  # as perl eval leaves them
    write_finished(tmp_path / "fails", None, rate=1e-3, status="failed", error="ModelError: too little memory")
    write_run(tmp_path / "runs-now", steps=3, planned=12, status="running")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text('{"status": "running"}')
    rows = {row.name: row for row in perl.compare(tmp_path).rows}
    assert next(iter(rows)) == "done"
    assert rows["plain"].reason == "not scored at the end"
    assert (rows["fails"].status, rows["fails"].reason) == ("failed", "ModelError: too little memory")
    assert rows["runs-now"].reason == "running, step 3 of 12"
    assert rows["new"].reason.startswith("running, step 0")
    assert rows["fails"].reward == pytest.approx(0.835)
    assert rows["later"].score == pytest.approx(shares(marks(0.4, 2)).mean())
    assert all(row.score is None for name, row in rows.items() if name not in ("done", "later"))


def test_without_scores_the_last_rewards_are_compared_and_only_seeds_pair_them(tmp_path):
    rewards = {"lora": [0.61, 0.66, 0.64], "dora": [0.70, 0.72, 0.78]}
    for method, of_seed in rewards.items():
        for seed, reward in enumerate(of_seed):
            write_finished(tmp_path / f"{method}{seed}", None, seed=seed, method=method, reward=reward)
    found = perl.compare(tmp_path)
    assert found.measure.key == "reward"
    lora = row_of(found, "lora")
    assert lora.score == pytest.approx(numpy.mean(rewards["lora"]) + 0.035)  # of the last two of four steps
    assert lora.difference.own_p_value == pytest.approx(stats.ttest_rel(rewards["lora"], rewards["dora"]).pvalue)
    alone = perl.compare([tmp_path / "lora0", tmp_path / "dora0"]).rows[1]
    assert (alone.difference.mean, alone.difference.by) == (pytest.approx(-0.09), "")
    assert math.isnan(alone.difference.low)


def test_other_scores(study, tmp_path):
    right = [row.count("1") for row in marks(0.5, 0)]
    passed = numpy.mean([1 - math.comb(4 - n, 2) / math.comb(4, 2) for n in right])
    assert row_of(perl.compare(study, score="sums/pass@2"), "lora-0").score == pytest.approx(passed)
    write_run(tmp_path / "run", steps=4, planned=4)
    assert perl.compare(tmp_path, score="entropy").rows[0].score == pytest.approx(
        numpy.mean([0.1 * math.exp(-2 * done) for done in (0.75, 1.0)])
    )
    with pytest.raises(PerlError, match=r"--score: no run has a score 'entropi' .did you mean entropy"):
        perl.compare(tmp_path, score="entropi")


def test_what_others_wrote_is_text(tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    write_finished(tmp_path / f"=1+{hostile}", marks(0.5, 1))
    write_finished(tmp_path / "b", marks(0.5, 2), rate=1e-3)
    write_finished(tmp_path / "c", None, status="failed", error=f"E: {hostile}\x1b[31m")
    found = perl.compare(tmp_path)
    page = found._repr_html_()
    assert "<img" not in page
    assert page.count("&lt;img") >= 3
    assert page.count("<tr>") == 4
    assert "\x1b" not in str(found) + page + found.to_csv()
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [line["name"] for line in lines if "img" in line["name"]] == [f"'=1+{hostile}"]
    values = json.loads(found.to_json())
    assert [float(line["score"]) for line in lines if line["score"]] == [
        row["score"] for row in values["rows"] if row["score"] is not None
    ]
    assert values["rows"][1]["difference"]["p_corrected"] == found.rows[1].difference.p_value


def test_which_runs_are_meant(study, tmp_path):
    folders, notes = find_runs([study / "lora-*", study / "lora-1" / "eval", study])
    assert (len(folders), notes) == (9, [])
    assert [folder.name for folder in folders[:5]] == ["lora-0", "lora-1", "lora-2", "lora-3", "dora-0"]
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    folders, notes = find_runs([study / "high", tmp_path / "notes.txt", tmp_path / "empty"])
    assert (len(folders), len(notes)) == (1, 2)
    with pytest.raises(RunFolderError) as error:
        find_runs([study / "hihg", study / "grpo-*"])
    first, second = map(str, error.value.mistakes)
    assert "no such folder (did you mean high?)" in first
    assert "grpo-*: matches nothing" in second
    with pytest.raises(RunFolderError, match=r"perl\.compare\(runs\): must be a run or its folder, not 3.5"):
        perl.compare([study, 3.5])
    with pytest.raises(RunFolderError, match="holds no run"):
        find_runs([tmp_path / "empty"])


@pytest.mark.nightly
def test_the_command_compares_trained_runs(tmp_path, capsys):
    """A run and its copy are two runs of one seed, which do not differ."""
    trained = tmp_path / "trained"
    perl.train("quickstart", TINY, trained / "tiny")
    shutil.copytree(trained / "tiny", trained / "copy")
    assert run_command(["compare", f"{trained}/*", "--json", "--csv", str(trained / "table.csv")], "perl") == 0
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    known = json.loads((trained / "tiny" / "run.json").read_text())
    scored = known["eval"]["sandbox:addition"]
    first, second = values["rows"]
    assert [first["score"], first["stderr"]] == pytest.approx([scored["adapter"], scored["stderr"]])
    assert (second["difference"]["mean"], second["difference"]["p_value"], second["pairs"]) == (0.0, 1.0, 8)
    assert first["trainable_parameters"] == known["trainable_parameters"]
    assert 0 < first["training_seconds"] < first["seconds"]
    assert len((trained / "table.csv").read_text().splitlines()) == 3
    assert run_command(["compare", str(trained / "tiny"), "--score", "reward"], "perl") == 0
    assert "mean reward of the last steps" in capsys.readouterr().out
