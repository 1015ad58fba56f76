"""Results come back from their file as they went, and what is no results file is refused in one line."""

import json
from dataclasses import replace

import pytest

from perl.errors import PerlError
from perl.evaluation.results import OtherScore, read_results
from tests.evaluations import SHA, results, task_result

BOTH = task_result("sums", ["1100", "0000", "1000"], ["1110", "0100", "1000"])
OTHER = replace(BOTH, lighteval={"base": OtherScore({"pass@k:k=1": 0.25}, 1, 0), "adapter": OtherScore({}, 0, 2)})
OTHER = replace(OTHER, samples={"base": "aaaa", "adapter": "bbbb"})
FOUND = results(OTHER, task_result("products", None, ["1", "0"]))


def test_results_come_back_as_they_went(tmp_path):
    file = FOUND.write(tmp_path)
    assert file == tmp_path / "results.json"
    assert read_results(file) == FOUND
    assert read_results(file).seconds == 12.0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_base_alone_comes_back(tmp_path):
    alone = results(task_result("sums", ["1" * 16, "01" * 8]), name="base", adapter_sha256=None)
    assert read_results(alone.write(tmp_path)) == alone
    assert alone.task("sums").score == alone.task("sums").base
    assert alone.task("sums").score.g_pass


def test_what_names_the_samples_is_where_a_reader_looks_for_it():
    assert FOUND.as_dict()["perl"]["tasks"]["sums"]["samples"] == {"base": "aaaa", "adapter": "bbbb"}
    assert FOUND.as_dict()["perl"]["tasks"]["products"]["samples"] == {}


def test_other_tasks_that_a_folder_has_of_the_same_policies_are_kept(tmp_path):
    results(BOTH, task_result("products", None, ["1", "0"])).write(tmp_path)
    again = replace(results(task_result("sums", ["0"], ["1"]), task_result("powers", ["0"], ["1"])), seconds=3.0)
    together = again.with_earlier(tmp_path)
    assert [task.name for task in together.tasks] == ["sums", "powers", "products"]
    assert together.task("sums") == again.task("sums")
    assert together.seconds == 3.0


@pytest.mark.parametrize("other", ["name", "base", "base_sha256", "adapter_sha256"])
def test_tasks_of_another_policy_are_not_kept(tmp_path, other):
    results(task_result("products", None, ["1", "0"]), **{other: "another"}).write(tmp_path)
    assert results(BOTH).with_earlier(tmp_path) == results(BOTH)


def test_tasks_under_another_protocol_or_engine_are_not_kept(tmp_path):
    ours = results(BOTH)
    products = task_result("products", None, ["1", "0"])
    hotter = replace(ours.protocol, temperature=0.9)
    for earlier in (results(products, protocol=hotter), replace(results(products), engine={"backend": "transformers"})):
        earlier.write(tmp_path)
        assert ours.with_earlier(tmp_path) == ours
    replace(results(products), engine={**ours.engine, "logp_diff": None}).write(tmp_path)  # measured anew each time
    assert len(ours.with_earlier(tmp_path).tasks) == 2


def test_a_folder_without_results_or_with_broken_ones_adds_nothing(tmp_path):
    assert results(BOTH).with_earlier(tmp_path / "nowhere") == results(BOTH)
    (tmp_path / "results.json").write_text("{")
    assert results(BOTH).with_earlier(tmp_path) == results(BOTH)


def test_results_are_found_by_file_by_folder_and_by_run(tmp_path):
    (tmp_path / "run" / "eval").mkdir(parents=True)
    file = FOUND.write(tmp_path / "run" / "eval")
    for place in (file, str(file.parent), tmp_path / "run"):
        assert read_results(place).task("sums") == OTHER


def test_the_file_is_json_that_any_reader_takes_even_where_there_is_no_error(tmp_path):
    single = results(task_result("sums", ["10"], ["11"]))

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    facts = json.loads(single.write(tmp_path).read_text(), parse_constant=refuse)
    assert facts["perl"]["tasks"]["sums"]["difference"]["mean"] == 0.5
    back = read_results(tmp_path).task("sums").difference
    assert back.mean == 0.5
    assert back.low != back.low  # NaN again


def test_readers_of_lightevals_files_find_their_way():
    facts = FOUND.as_dict()
    assert set(facts) == {
        *("config_general", "results", "versions", "config_tasks", "summary_tasks", "summary_general", "perl")
    }
    scores = facts["results"]["sums|0"]
    assert scores["avg@4"] == pytest.approx((0.75 + 0.25 + 0.25) / 3)
    assert scores["pass@4"] == 1.0
    assert {"avg@4_stderr", "pass@1", "pass@2", "maj@4"} <= set(scores)
    assert facts["results"]["products|0"]["avg@1"] == 0.5
    assert facts["config_tasks"]["sums|0"] == {
        "name": "sums",
        "hf_repo": "someone/sums",
        "hf_revision": "c0ffee" * 6 + "c0ff",
    }
    assert facts["config_general"]["model_name"] == "runs/lora"
    assert facts["config_general"]["model_config"]["temperature"] == 0.6
    assert facts["config_general"]["model_config"]["adapter_sha256"] == SHA


def test_lightevals_own_score_is_that_of_what_was_evaluated():
    scored = {"base": OtherScore({"own": 0.25}, 0, 0), "adapter": OtherScore({"own": 0.75}, 0, 0)}
    with_adapter = results(replace(BOTH, lighteval=scored)).as_dict()
    alone = results(replace(BOTH, adapter=None, difference=None, lighteval=scored)).as_dict()
    assert with_adapter["results"]["sums|0"]["own"] == 0.75
    assert alone["results"]["sums|0"]["own"] == 0.25


def test_problems_are_short_to_read():
    problems = FOUND.as_dict()["perl"]["tasks"]["sums"]["problems"]
    assert problems["0"] == {"base": "1100", "adapter": "1110"}
    assert FOUND.as_dict()["perl"]["tasks"]["products"]["problems"]["1"] == {"adapter": "0"}


def test_a_task_that_was_not_evaluated_is_not_there():
    with pytest.raises(KeyError):
        FOUND.task("aime24")
    with pytest.raises(ValueError, match="sums was not scored"):
        _ = replace(BOTH, base=None, adapter=None).score


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "'perl' is absent"),
        ("[]", "holds no results"),
        ('"text"', "holds no results"),
        ("{", "holds no results"),
        ("", "holds no results"),
        ('{"perl": {"version": 99}}', "its version is 99, known is 2"),
        ('{"perl": {"version": 2, "tasks": []}}', "holds no results"),
        ('{"perl": {"version": 2, "tasks": {}}}', "is absent"),
        ('{"perl": {"version": 2, "tasks": {"a": {}}}}', "is absent"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, content, reason):
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(PerlError, match=reason) as caught:
        read_results(file)
    assert str(caught.value).startswith(str(file))
    assert len(str(caught.value).splitlines()) == 1


def test_where_there_are_no_results_it_is_said_what_writes_them(tmp_path):
    with pytest.raises(PerlError, match=r"no results: there is no results\.json \(perl eval writes them\)"):
        read_results(tmp_path / "nowhere")
