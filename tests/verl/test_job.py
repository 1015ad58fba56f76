"""The folder that goes to verl: its files, its rows, its script, its adapter, and rewards that judge there as here."""

import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import peft
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from perl.cli.commands import run
from perl.errors import PerlError, RecipeError
from perl.recipe import Recipe
from perl.rewards.one_by_one import scorer
from perl.run.files import sha256_of
from perl.sandbox import BASE_FOLDER
from perl.training.on_verl import export_verl, prepare_export
from perl.verl import check_job
from perl.verl.job_folder import find_job
from tests.verl.recipes import recipe


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of rsLoRA, written."""
    folder = tmp_path_factory.mktemp("jobs") / "mine"
    given = recipe(peft={"method": "rslora", "rank": 16, "alpha": 6.0})
    return export_verl(given, folder, ["engine.gpus=4", "eval.limit=40"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An rsLoRA of rank 8 and alpha 3 whose factors are random."""
    folder = tmp_path_factory.mktemp("saved")
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=3, use_rslora=True, lora_dropout=0.1, target_modules=targets)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def test_a_job_has_all_that_it_needs_and_says_what_it_is(job):
    folder, export = job
    facts = json.loads((folder / "job.json").read_text())
    assert (facts["format"], facts["verl_version"], facts["strategy"]) == (1, "0.9.1", "fsdp2")
    assert {name: sha256_of(folder / name) for name in facts["files"]} == facts["files"]
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written - set(facts["files"]) == {"job.json", "README.txt"}
    assert "actor_rollout_ref.model.lora_alpha=24" in (folder / "overrides.txt").read_text().splitlines()
    assert Recipe.of_run(folder / "recipe.yaml").engine.gpus == pytest.approx(4)
    assert (folder / "run.sh").stat().st_mode & 0o111 == 0o111
    assert len(facts["base_fingerprint"]) == pytest.approx(64)
    lines = find_job(folder).overrides
    assert len(lines) == len(export.told.values)
    assert not [line for line in lines if "@FOLDER@" in line]
    assert f"data.train_files='{folder}/train.parquet'" in lines


def test_rows_are_verls_and_their_prompts_the_recipes(job):
    folder, export = job
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    assert len(rows) == len(export.job.train)
    assert len(pyarrow.parquet.read_table(folder / "eval.parquet")) == pytest.approx(40)
    first = export.job.train[0]
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": first["solution"]}
    assert rows[0]["prompt"] == [{key: message[key] for key in ("role", "content")} for message in first["prompt"]]


def test_run_sh_hands_verl_what_was_written_wherever_it_lies_and_nothing_else(job, tmp_path):
    """With a program in Python's place that writes down how it was called."""
    folder = Path(shutil.copytree(job[0], tmp_path / "R&D jobs &"))
    seen, python = tmp_path / "seen", tmp_path / "python"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{seen}.$(date +%s%N)"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    more = subprocess.run([folder / "run.sh", "trainer.nnodes=2"], env=environment, capture_output=True, text=True)
    assert (more.returncode, "engine.overrides" in more.stderr) == (2, True)
    subprocess.run([folder / "run.sh"], check=True, env=environment)
    calls = [file.read_text().splitlines() for file in sorted(tmp_path.glob("seen.*"))]
    assert calls == [
        ["-m", "perl.verl.check_job", str(folder)],
        ["-m", "verl.trainer.main_ppo", *find_job(folder).overrides],
    ]


def test_where_there_is_no_verl_or_another_one_or_a_changed_job_a_line_says_so(
    job, monkeypatch, caplog, capsys, tmp_path
):
    folder = Path(shutil.copytree(job[0], tmp_path / "job"))

    def absent(_):
        raise PackageNotFoundError

    assert check_job.main([str(folder), "actor_rollout_ref.model.lora_rank=16"]) == 2
    assert "lora_rank=16: takes a job and nothing else (set engine.overrides" in capsys.readouterr().err
    monkeypatch.setattr(check_job, "version", absent)
    assert check_job.main([str(folder)]) == 2
    assert "pip install 'verl[vllm]==0.9.1'" in capsys.readouterr().err
    monkeypatch.setattr(check_job, "version", lambda _: "0.10.0")
    with caplog.at_level(logging.WARNING, logger="perl"):
        assert check_job._installed_verl() == "0.10.0"
    assert [record.code for record in caplog.records] == ["PRL347"]
    with (folder / "overrides.txt").open("a") as file:
        file.write("trainer.nnodes=2\n")
    assert check_job.main([str(folder)]) == 2
    assert "overrides.txt: was changed since it was exported" in capsys.readouterr().err
    assert check_job.main([str(tmp_path)]) == 2
    assert "job.json (perl export-verl" in capsys.readouterr().err


def logits_of(folder):
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        return model(torch.arange(4, 20)[None]).logits


def test_an_adapter_goes_on_as_the_plain_lora_that_it_is_where_the_reference_is_the_base(saved, tmp_path):
    adapter, train = {"adapter": str(saved)}, {"beta": 0.01, "use_bias_correction_kl": False}
    with pytest.raises(RecipeError, match=r"train\.reference.*not the adapter that is continued"):
        prepare_export(recipe(peft=adapter, train=train))
    folder, export = export_verl(recipe(peft=adapter, train={**train, "reference": "base"}), tmp_path / "job")
    values, alpha = export.told.values, 3 * 8**0.5
    names = ("model.lora_rank", "model.lora_alpha", "actor.kl_loss_coef")
    assert [values[f"actor_rollout_ref.{name}"] for name in names] == pytest.approx([8, alpha, 0.01])
    assert values["actor_rollout_ref.model.lora_adapter_path"] == "@FOLDER@/adapter"
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_dropout"], config["lora_alpha"]) == (False, 0.0, pytest.approx(alpha))
    torch.testing.assert_close(logits_of(folder / "adapter"), logits_of(saved), rtol=0, atol=1e-5)
    weights = [load_file(place / "adapter_model.safetensors") for place in (saved, folder / "adapter")]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_the_command_prints_what_would_go_or_a_line_for_each_refusal(job, capsys, tmp_path):
    plain = ("train.lr_scheduler_type=constant", "train.use_bias_correction_kl=false")
    assert run(["export-verl", "quickstart", "--dry-run", "engine.gpus=2", *plain], "perl") == 0
    printed = capsys.readouterr().out.splitlines()
    told = dict(line.split("=", 1) for line in printed if not line.startswith("#"))
    assert float(told["trainer.n_gpus_per_node"]) == pytest.approx(2)
    assert float(told["actor_rollout_ref.rollout.n"]) == pytest.approx(8)
    assert any(line.startswith("# note     rewards:") for line in printed)
    engine = ("engine.name=verl", "engine.gpus=2", "engine.threads=null", "engine.device=auto")
    assert run(["train", "quickstart", "--dry-run", *engine, *plain], "perl") == 0
    assert capsys.readouterr().out.splitlines() == printed
    assert run(["export-verl", "quickstart", "-o", str(tmp_path / "job"), "peft.method=dora"], "perl") == 2
    assert "peft.method: dora" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()
    with pytest.raises(PerlError, match="exists already"):
        export_verl(recipe(), job[0])


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
    for name, words in (("carried_reward:counts", "completion_ids"), ("length_penalty", "group")):
        with pytest.raises(RecipeError, match=words):
            prepare_export(recipe(rewards={name: 1.0}))
