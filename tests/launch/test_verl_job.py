"""The folder that goes to verl: its files, its rows, its script, and rewards that judge there as here."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow.parquet
import pytest
from datasets import Dataset

from perl.errors import PerlError, RecipeError
from perl.launch.verl.check_job import check_lengths, overrides_of
from perl.launch.verl.reward_files import reward_files
from perl.launch.verl.rows import write_rows
from perl.recipe import Recipe
from perl.rewards import check
from perl.rewards.one_by_one import scorer, settings_text
from perl.run.files import sha256_of
from perl.training.to_verl import export_verl, prepare_export
from tests.launch.verl_recipes import recipe

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of rsLoRA, written."""
    folder = tmp_path_factory.mktemp("jobs") / "mine"
    given = recipe(peft={"method": "rslora", "rank": 16, "alpha": 6.0}, train={"seed": 11})
    return export_verl(given, folder, ["engine.gpus=4", "eval.limit=40"])


def test_a_job_has_all_that_it_needs_and_says_what_it_is(job):
    folder, export = job
    facts = json.loads((folder / "job.json").read_text())
    assert (facts["rank"], facts["alpha"], facts["verl_alpha"]) == pytest.approx((16, 6.0, 24.0))
    assert (facts["format"], facts["seed"], facts["steps"]) == pytest.approx((1, 11, 8))
    assert (facts["method"], facts["use_rslora"], facts["verl_version"]) == ("rslora", True, "0.9.1")
    assert {name: sha256_of(folder / name) for name in facts["files"]} == facts["files"]
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written - set(facts["files"]) == {"job.json"}
    lines = (folder / "overrides.txt").read_text().splitlines()
    assert "actor_rollout_ref.model.lora_alpha=24" in lines
    assert len(lines) == len(export.made.values)
    assert Recipe.of_run(folder / "recipe.yaml").engine.gpus == pytest.approx(4)
    assert (folder / "run.sh").stat().st_mode & 0o111 == 0o111
    assert len(facts["base_fingerprint"]) == pytest.approx(64)


def test_rows_are_verls_and_their_prompts_the_recipes(job):
    folder, export = job
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    assert len(rows) == len(export.job.train)
    assert len(pyarrow.parquet.read_table(folder / "eval.parquet")) == pytest.approx(40)
    first = export.job.train[0]
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": first["solution"]}
    assert rows[0]["prompt"] == [{key: message[key] for key in ("role", "content")} for message in first["prompt"]]


def test_a_column_called_plain_is_the_data_sets(tmp_path):
    problems = Dataset.from_list([{"prompt": f"{i}+1=", "solution": "2", "plain": 0.5 + i} for i in range(3)])
    write_rows(problems, tmp_path / "rows.parquet", "mine", "train")
    extra = [row["extra_info"] for row in pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()]
    assert [one["plain"] for one in extra] == [True] * 3
    assert [json.loads(one["columns"])["plain"] for one in extra] == pytest.approx([0.5, 1.5, 2.5])


def test_every_row_is_measured_before_verl_cuts_one():
    class Words:
        def apply_chat_template(self, prompt, **_):
            return {"input_ids": prompt[0]["content"].split()}

    prompts = [[{"role": "user", "content": "a " * length}] for length in (3, 5, 9, 7, 2)]
    data = SimpleNamespace(max_prompt_length=9, apply_chat_template_kwargs={})
    check_lengths(prompts, Words(), data, Path("train.parquet"))
    data.max_prompt_length = 6
    with pytest.raises(RecipeError) as caught:
        check_lengths(prompts, Words(), data, Path("train.parquet"))
    numbers = [int(word) for word in str(caught.value).replace("=", " ").replace(":", " ").split() if word.isdigit()]
    assert numbers == pytest.approx([2, 6, 2])  # how many are longer than what, the first
    assert "max_prompt_length=9" in str(caught.value)


def test_run_sh_hands_verl_what_was_written_wherever_it_lies(job, tmp_path):
    """With a program in Python's place that writes down how it was called."""
    folder = Path(shutil.copytree(job[0], tmp_path / "R&D jobs &"))
    seen, python = tmp_path / "seen", tmp_path / "python"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{seen}.$(date +%s%N)"\n')
    python.chmod(0o755)
    further = ["trainer.nnodes=2", "+a={b: c d}"]
    for given in (further, further[:1]):
        subprocess.run([folder / "run.sh", *given], check=True, env={**os.environ, "PYTHON": str(python)})
    calls = [file.read_text().splitlines() for file in sorted(tmp_path.glob("seen.*"))]
    assert calls[0] == ["-m", "perl.launch.verl.check_job", str(folder), *further]
    assert calls[1] == ["-m", "verl.trainer.main_ppo", *overrides_of(folder, further)]
    assert [len(one) for one in calls] == pytest.approx(
        [5, len(job[1].made.values) + 4, 4, len(job[1].made.values) + 3]
    )
    kept = (folder / "further_overrides.txt").read_text().splitlines()
    assert kept == [*further, *further[:1]]


def test_a_jobs_rewards_judge_as_ours_do(job):
    folder, _ = job
    score = scorer(folder)
    rows = pyarrow.parquet.read_table(folder / "train.parquet").slice(0, 12).to_pylist()
    written = ["so it is \\boxed{%s}", "it is %s0", "no idea", "\\boxed{%s.0}"]
    texts = [
        (row, form % row["reward_model"]["ground_truth"] if "%" in form else form) for row in rows for form in written
    ]
    theirs = [score(text, row["reward_model"]["ground_truth"], row["extra_info"])["score"] for row, text in texts]
    ours = [float(check(row["reward_model"]["ground_truth"], text).right) for row, text in texts]
    assert theirs == pytest.approx(ours)
    assert 0 < sum(ours) < len(ours)


def test_a_users_reward_goes_along_with_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "carried_words.py").write_text("WORDS = {'yes': 1.0}\n")
    (tmp_path / "carried_reward.py").write_text(
        "import json\nfrom carried_words import WORDS\n\n\n"
        "async def polite(completions, level=0, *, bonus=0.0, **_):\n"
        "    return [WORDS.get(one[0]['content'], 0.25) + bonus for one in completions]\n\n\n"
        "def counts(completions, completion_ids, **_):\n    return [len(ids) for ids in completion_ids]\n"
    )
    given = recipe(rewards={"carried_reward:polite": {"weight": 2.0, "args": {"bonus": 0.5}}, "accuracy": 1.0})
    folder, _ = export_verl(given, tmp_path / "job")
    carried = {path.name for path in (folder / "reward_files").iterdir()}
    assert carried == {"carried_reward.py", "carried_words.py"}
    answer = scorer(folder)("yes", "7", {"columns": json.dumps({"solution": "7"})})
    assert answer["score"] == pytest.approx(2.0 * 1.5)
    parts = [answer[name] for name in ("reward/polite", "reward/accuracy", "unjudged")]
    assert parts == pytest.approx([1.5, 0.0, 0.0])
    # In verl's workers the job's own copy counts, whatever has become of the file where they start.
    for name in ("carried_words", "carried_reward"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(tmp_path)])
    theirs = runpy.run_path(str(folder / "rewards.py"))["compute_score"]
    again = theirs("it", "yes", "7", {"columns": json.dumps({"solution": "7"})})
    assert again == pytest.approx(answer)
    with pytest.raises(RecipeError, match="completion_ids"):
        prepare_export(recipe(rewards={"carried_reward:counts": 1.0}))


def test_rewards_may_be_called_as_verls_own_numbers_are(tmp_path, monkeypatch):
    module = ModuleType("named_as_verls")
    for name, value in (("score", 0.5), ("unjudged", 3.0), ("reward", 0.25), ("acc", -1.0)):
        setattr(module, name, lambda completions, value=value, **_: [value for _ in completions])
        getattr(module, name).__name__ = name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    weights = {"score": 0.2, "unjudged": 1.0, "reward": 2.0, "acc": 1.0}
    given = recipe(rewards={f"named_as_verls:{name}": {"weight": weight} for name, weight in weights.items()})
    (tmp_path / "rewards.json").write_text(settings_text(given.rewards, 32, {}))
    found = scorer(tmp_path)("text", "", {"plain": True, "columns": json.dumps({"plain": "yes"})})
    assert found["score"] == pytest.approx(0.1 + 3.0 + 0.5 - 1.0)
    assert (found["unjudged"], found["reward/score"], found["reward/acc"]) == pytest.approx((0.0, 0.5, -1.0))
    assert set(found) & {"reward", "acc", "overlong"} == set()


def test_what_a_reward_is_of_goes_or_is_installed_or_is_refused(tmp_path, monkeypatch):
    site = tmp_path / "dist-packages"
    for place in (tmp_path / "spaced" / "deep", site / "distributed"):
        place.mkdir(parents=True)
        (place / "scored.py").write_text("def one(completions, **_):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "linked.py").symlink_to(site / "distributed" / "scored.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(site), *sys.path])
    kinds = ("spaced.deep.scored", "distributed.scored", "linked", "json")
    for name in kinds:
        __import__(name)
    found = reward_files([f"{name}:one" for name in kinds])
    assert {path: file.stat().st_size for path, file in found.items()} == pytest.approx({"spaced/deep/scored.py": 65})
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    with pytest.raises(RecipeError, match=r"rewards\.nowhere:one.*\.py file"):
        reward_files(["nowhere:one"])


def test_rewards_that_see_a_group_or_tokens_are_refused():
    for name, words in (("length_penalty", "group"), ("cosine_length", "tokens"), ("repetition_penalty", "tokens")):
        with pytest.raises(PerlError, match=words):
            prepare_export(recipe(rewards={"accuracy": 1.0, name: 0.1}))


def test_a_folder_that_is_there_is_not_written_to(job, tmp_path):
    folder, _ = job
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(PerlError, match="exists already"):
        export_verl(recipe(), folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(PerlError):
        export_verl(recipe(peft={"method": "dora"}), tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
