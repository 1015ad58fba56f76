"""Results come back from their file as they went, and what is no results file is refused in one line."""

from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.scoring.results import OtherScore, read_results
from tests.evaluations import SHA, results, task_result
from tests.oracles import evaluation as by_hand

BOTH = task_result("sums", ["1100", "0000", "1000"], ["1110", "0100", "1000"])
OTHER = replace(BOTH, lighteval={"base": OtherScore(0.25, None, 1, 0), "adapter": OtherScore(0.5, 0.1, 0, 2)})
OTHER = replace(OTHER, samples={"base": "aaaa", "adapter": "bbbb"})
FOUND = results(OTHER, task_result("products", None, ["1", "0"]))


ALONE = results(task_result("sums", ["1" * 16, "01" * 8]), name="base", adapter_sha256=None)


@pytest.mark.parametrize("found", [FOUND, ALONE], ids=["both", "a base alone"])
def test_results_come_back_as_they_went_by_file_by_folder_and_by_run(tmp_path, found):
    folder = tmp_path / "run" / "eval"
    folder.mkdir(parents=True)
    file = found.write(folder)
    assert file == folder / "results.json"
    for place in (file, str(folder), tmp_path / "run"):
        assert read_results(place) == found
    assert read_results(file).seconds == 12.0
    assert list(folder.iterdir()) == [file]


def test_readers_of_lightevals_files_find_their_way():
    facts = FOUND.as_dict()
    assert set(facts) == {
        *("config_general", "results", "versions", "config_tasks", "summary_tasks", "summary_general", "perl")
    }
    right = by_hand.marks(["1110", "0100", "1000"])
    estimates = {f"pass@{k}": by_hand.pass_at(right, k) for k in (1, 2, 4)}
    estimates |= {"avg@4": by_hand.estimate(by_hand.shares(right))}
    estimates |= {"maj@4": by_hand.majority([["1" if r else "2" for r in row] for row in right], right)}
    expected = {name: one.mean for name, one in estimates.items()}
    expected |= {f"{name}_stderr": one.stderr for name, one in estimates.items()}
    expected |= {"avg@n:n=4": 0.5, "avg@n:n=4_stderr": 0.1}  # by lighteval
    assert facts["results"]["sums|0"] == pytest.approx(expected)
    assert facts["results"]["products|0"]["avg@1"] == 0.5
    assert facts["config_tasks"]["sums|0"] == {
        "name": "sums",
        "hf_repo": "someone/sums",
        "hf_revision": "c0ffee" * 6 + "c0ff",
    }
    assert facts["config_general"]["model_name"] == "runs/lora"
    assert facts["config_general"]["model_config"]["temperature"] == 0.6
    assert facts["config_general"]["model_config"]["adapter_sha256"] == SHA


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"there is no results\.json \(perl eval writes them\)"),
        ("{}", "'perl' is absent"),
        ("{", "holds no results"),
        ('{"perl": {"version": 99}}', "its version is 99, known is 2"),
        ('{"perl": {"version": 2, "tasks": {}}}', "subject: Field required"),
        ('{"perl": {"version": 2, "tasks": {"a": {}}}}', "is absent"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, content, reason):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PerlError, match=reason) as caught:
        read_results(file)
    assert str(caught.value).startswith(str(file))
    assert len(str(caught.value).splitlines()) == 1
