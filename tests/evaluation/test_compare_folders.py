"""Whole folders of results are compared, and named by what differs between their runs."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.comparing.evaluations import compare_folders
from perl.evaluation.comparing.text import as_dict, as_plain
from perl.evaluation.scoring.found_results import find_results
from perl.evaluation.scoring.metrics import corrected
from perl.evaluation.scoring.results import RESULTS, read_results
from perl.recipe import load_recipe
from tests.evaluations import results, task_result
from tests.hub.scored import TASK, write_scored
from tests.oracles import evaluation as by_hand

BASE = ["1000", "0000", "1100", "0101"] * 3
RUN = {"model": {"name": "sandbox:base"}, "data": {"train": "sandbox:addition"}, "rewards": {"accuracy": 1.0}}


def marks_of(name: str) -> list[str]:
    """Some completions, other ones for each name."""
    rng = random.Random(name)
    return ["".join(rng.choice("0111") for _ in range(4)) for _ in BASE]


def scored(folder: Path, name: str, base=BASE, **protocol) -> Path:
    """Results in a folder, with the samples that they stand on."""
    made = results(task_result("sums", ["1"], ["1"]), name=name, adapter_sha256=f"{hash_of(str(folder))}")
    write_scored(folder, replace(made, protocol=replace(made.protocol, **protocol)), base, marks_of(str(folder.name)))
    return folder


def hash_of(text: str) -> str:
    return "".join(random.Random(text).choice("0123456789abcdef") for _ in range(64))


def run(folder: Path, peft: dict | None = None, where: str = "eval", **train) -> Path:
    """A run's folder with a recipe and results."""
    recipe = load_recipe({**RUN, "peft": {"method": "lora", **(peft or {})}, "train": {"max_steps": 5, **train}})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "run.json").write_text('{"status": "done"}')
    scored(folder / where, "chain")
    return folder


def names(comparison) -> list[str]:
    return [policy.name for policy in comparison.policies]


def test_a_folder_of_runs_is_searched_and_its_runs_are_named_by_the_settings_that_differ(tmp_path):
    run(tmp_path / "sweep" / "r10", learning_rate=1e-3)
    run(tmp_path / "sweep" / "r2", learning_rate=2e-5)
    run(tmp_path / "sweep" / "r1", {"method": "dora"}, learning_rate=1e-3)
    found = compare_folders([tmp_path / "sweep"])
    assert names(found) == ["base", "dora lr 1e-3", "lora lr 2e-5", "lora lr 1e-3"]  # r1, r2, r10
    assert found.first == "base"
    facts = as_dict(found)["policies"][2]
    assert facts["folder"] == str(tmp_path / "sweep" / "r2" / "eval")
    assert facts["settings"] == {"peft.method": "lora", "train.learning_rate": "2e-05"}
    assert as_dict(found)["policies"][0]["folder"] is None
    json.dumps(as_dict(found), allow_nan=False)


def test_each_is_compared_with_its_base_and_p_values_are_corrected_over_all_of_them(tmp_path):
    for i in range(4):
        run(tmp_path / f"r{i}", seed=i)
    found = compare_folders([tmp_path])
    adapters = found.policies[1:]
    assert [policy.name for policy in adapters] == [f"seed {i}" for i in range(4)]
    folders = [read_results(policy.folder) for policy in adapters]
    own = [one.tasks[0].difference for one in folders]
    together = corrected(own)
    for policy, alone, shown in zip(adapters, own, together, strict=True):
        found_now = {**policy.differences[TASK].as_dict(), "p_value": policy.differences[TASK].p_value}
        assert shown.as_dict().items() <= found_now.items()
        assert policy.differences[TASK].own_p_value == pytest.approx(alone.p_value)
    assert "p: sign flips by problem, Holm over 4 differences" in " ".join(as_plain(found).split())


@pytest.mark.parametrize("against", ["base", "dora seed 0", None])
def test_what_is_subtracted_can_be_said(tmp_path, against):
    folders = [run(tmp_path / method, {"method": method}, seed=i) for i, method in enumerate(("lora", "dora"))]
    for folder in folders:
        (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace("seed: 1", "seed: 0"))
    wanted = {None: "lora", "base": "base", "dora seed 0": "dora"}[against]
    found = compare_folders(folders, against=None if against is None else wanted)
    assert found.first == wanted
    compared = {policy.name: policy.differences[TASK].mean for policy in found.policies if policy.differences}
    shares = {"base": BASE, "lora": marks_of("eval"), "dora": marks_of("eval")}
    means = {name: by_hand.estimate(by_hand.shares(by_hand.marks(texts))).mean for name, texts in shares.items()}
    assert compared == pytest.approx(
        {name: means[name] - means[wanted] for name in ("lora", "dora") if name != wanted}, abs=1e-9
    )


def test_a_best_adapter_is_called_so_and_earlier_results_are_left_out(tmp_path):
    first = run(tmp_path / "r1", seed=1)
    scored(first / "best" / "eval", "chain")
    scored(first / "eval" / "earlier" / "0123abcd", "chain")
    scored(first / "checkpoints" / "checkpoint-5" / "eval", "chain")
    run(tmp_path / "r2", seed=2)
    assert names(compare_folders([tmp_path])) == ["base", "seed 1 best", "seed 1", "seed 2"]


def test_what_is_not_there_and_what_is_not_ours_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PerlError, match=r"no results: there is no results\.json, nor one in a folder below it"):
        compare_folders([tmp_path / "empty"])
    run(tmp_path / "runs" / "r1", seed=1)
    for one in ([tmp_path / "runs"], [tmp_path / "runs" / "r1", tmp_path / "runs" / "r1" / "eval"]):
        with pytest.raises(PerlError, match=r"a comparison needs two results, and there is one"):
            compare_folders(one)
    run(tmp_path / "runs" / "r2", seed=2)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / RESULTS).write_text('{"results": {}}')
    found = compare_folders([tmp_path / "runs"])
    assert names(found) == ["base", "seed 1", "seed 2"]
    assert any(note.startswith("Left out: ") and "'perl' is absent" in note for note in found.notes)
    with pytest.raises(PerlError, match="'perl' is absent"):
        compare_folders([tmp_path / "runs" / "r1", tmp_path / "runs" / "other"])


def test_results_that_were_edited_are_refused_wherever_they_were_found(tmp_path):
    for i in range(3):
        run(tmp_path / f"r{i}", seed=i)
    file = tmp_path / "r1" / "eval" / RESULTS
    found = json.loads(file.read_text())
    found["perl"]["tasks"][TASK]["adapter"]["accuracy"] = 0.99
    file.write_text(json.dumps(found))
    with pytest.raises(PerlError, match=r"r1/eval: results\.json"):
        compare_folders([tmp_path])


def test_a_secret_of_a_recipe_and_where_files_go_name_no_run(tmp_path):
    for i in range(2):
        folder = run(tmp_path / f"r{i}", seed=i, output_dir=f"runs/{i}")
        text = (folder / "recipe.yaml").read_text()
        (folder / "recipe.yaml").write_text(
            text.replace("args: {}", f"args: {{judge_api_key: sk-{i}}}").replace("repo_id: null", f"repo_id: me/{i}")
        )
    settings = [one.settings for one in find_results([tmp_path])]
    assert all("train.seed" in one for one in settings)
    assert not any(re.search(r"sk-|me/|runs/", text) for one in settings for text in one.values())
