"""A package holds exactly what is said of an adapter, and nothing of another or of this machine."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from perl.errors import PerlError
from perl.evaluation.results import read_results
from perl.hub.card.candidate import find_candidate
from perl.hub.gate.gate import is_ours
from perl.hub.push.package import (
    MOST_ROWS,
    Package,
    _public_config,
    package_candidate,
    package_mistakes,
    read_package,
    thinned,
)
from perl.policy.name import policy_name
from perl.run.folder import Run, log_rows
from tests.hub.push_runs import FILES, add_best, add_checkpoint, publishable
from tests.hub_fixtures import TOKEN


def rows(content):
    return [json.loads(line) for line in content.splitlines()]


def test_it_holds_these_files_and_no_others():
    run = publishable()
    for stranger in ("adapter/training_args.bin", "eval/table.md", "plots/notes.txt", "adapter/.DS_Store"):
        (run.path / stranger).write_bytes(b"\x80\x04")
    assert list(package_candidate(find_candidate(run), "user/a").files) == FILES


def test_results_of_another_adapter_are_not_in_it():
    run = publishable()
    add_best(run)
    files = package_candidate(find_candidate(run, "best"), "user/a").files
    assert not [name for name in files if name.startswith("eval/")]
    assert "plots/curves.png" in files


def test_a_checkpoint_ends_where_it_was_saved():
    run = publishable()
    add_checkpoint(run, 10)
    package = package_candidate(find_candidate(run, 10), "user/a")
    assert rows(package.files["metrics.jsonl"])[-1]["step"] == 10
    assert "plots/curves.png" not in package.files


def test_a_long_log_is_thinned_and_keeps_its_ends():
    log = [{"step": step} for step in range(1, 5001)]
    steps = [row["step"] for row in rows(thinned(log))]
    assert len(steps) == MOST_ROWS == 1000
    assert (steps[0], steps[-1]) == (1, 5000)
    assert steps == sorted(set(steps))
    assert max(b - a for a, b in pairwise(steps)) <= 6
    assert thinned(log[:1000]).splitlines() == [json.dumps(row).encode() for row in log[:1000]]


def test_a_line_that_a_kill_cut_short_is_left_out():
    assert log_rows('{"step": 1}\n[]\n{"step": 2, "rew') == [{"step": 1}]


@pytest.mark.parametrize("base", ["/home/alice/models/base", "../models/base", "C:\\Users\\alice\\base"])
def test_a_base_that_is_a_path_is_called_by_its_last_part(base):
    run = publishable()
    config = run.adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
    package = package_candidate(find_candidate(run), "user/a")
    assert json.loads(package.files["adapter_config.json"])["base_model_name_or_path"] == "base"


def test_results_that_name_a_path_are_published_without_it():
    run = publishable()
    file = run.path / "eval" / "results.json"
    facts = json.loads(file.read_text())
    facts["perl"]["subject"]["name"] = facts["config_general"]["model_name"] = "/home/alice/runs/mine"
    file.write_text(json.dumps(facts))
    there = json.loads(package_candidate(find_candidate(run), "user/a").files["eval/results.json"])
    assert there["perl"]["subject"]["name"] == "mine"
    assert there["perl"]["tasks"] == facts["perl"]["tasks"]
    assert there["results"] == facts["results"]


def test_a_sound_package_has_no_problems_and_a_leak_is_one():
    run = publishable()
    package = package_candidate(find_candidate(run), "user/a")
    assert package_mistakes(package, run.path) == []
    for name, leak in (("metrics.jsonl", b'{"x": "/home/alice/x"}'), ("perl_recipe.yaml", TOKEN.encode())):
        changed = Package({**package.files, name: leak})
        # The card, which comes from these files, is found to say something else too.
        assert f"{name}:1" in {problem.where for problem in package_mistakes(changed, run.path)}


def test_a_card_that_disagrees_with_its_results_is_a_problem():
    run = publishable()
    package = package_candidate(find_candidate(run), "user/a")
    accuracy = json.loads(package.files["eval/results.json"])["perl"]["tasks"]
    assert accuracy
    wrong = package.files["README.md"].replace(b"value: ", b"value: 9")
    assert package_mistakes(Package({**package.files, "README.md": wrong}), run.path)


def test_it_is_the_same_when_it_was_written(tmp_path):
    package = package_candidate(find_candidate(publishable()), "user/a")
    package.write(tmp_path / "staged")
    assert read_package(tmp_path / "staged").files == package.files
    assert package.size == sum(path.stat().st_size for path in (tmp_path / "staged").rglob("*") if path.is_file())


def test_what_is_ours_is_told_from_what_is_not():
    ours = ["README.md", "eval/x.png", "plots/x.png", ".eval_results/gsm8k.yaml", "metrics.jsonl"]
    others = ["LICENSE", "eval/x.txt", "plots/a/x.png", ".eval_results/hle.yaml", "x/README.md", "model.safetensors"]
    assert [name for name in (*ours, *others) if is_ours(name)] == ours


def test_it_is_packed_from_the_folder_alone(tmp_path, monkeypatch):
    run = publishable()
    package = package_candidate(find_candidate(Run.read(run.path)), "user/a")
    before = package.files
    (tmp_path / "elsewhere").mkdir()
    absolute = run.path.resolve()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert package_candidate(find_candidate(Run.read(absolute)), "user/a").files == before


@pytest.mark.parametrize("change", [{"lora_alpha": 99}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 1}}])
def test_results_are_not_shown_beside_an_edited_config(change, caplog):
    run = publishable()
    config = run.adapter / "adapter_config.json"
    assert find_candidate(run).results is not None
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    assert find_candidate(run).results is None
    assert "adapter_config.json" in caplog.text
    files = package_candidate(find_candidate(run), "user/a").files
    assert not [name for name in files if name.startswith("eval/")]


def test_results_on_another_base_are_not_shown():
    run = publishable()
    found = read_results(run.path)
    subject = {**found.subject, "base_sha256": "e" * 64}
    named = [subject[name] for name in ("base_sha256", "adapter_sha256", "adapter_config_sha256")]
    replace(found, subject={**subject, "policy": policy_name(*named)}).write(run.path / "eval")
    assert find_candidate(run).results is None


@pytest.mark.parametrize("value", [5, ["a"], {"a": "b"}])
@pytest.mark.parametrize("key", ["base_model_name_or_path", "revision"])
def test_a_config_whose_base_is_no_text_is_one_line(key, value):
    with pytest.raises(PerlError, match=f"^adapter_config.json: {key} is not text$"):
        _public_config(json.dumps({"base_model_name_or_path": "a/b", key: value}).encode())


def test_a_card_or_a_sample_that_is_not_utf8_is_one_line_or_unknown():
    run = publishable()
    run.samples.write_bytes(b'{"prompt": "\xff"}\n')
    run.card.write_bytes(b"# x\n\n## Notes\n\n\xff\n")
    with pytest.raises(PerlError, match=r"README.md: is not UTF-8"):
        package_candidate(find_candidate(run), "user/a")
    run.card.unlink()
    package = package_candidate(find_candidate(run), "user/a")
    assert json.loads(package.files["perl_run.json"])["chat"] is None
