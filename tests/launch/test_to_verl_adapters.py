"""An adapter that goes on in verl, the command line, and the check of a job where there is no verl."""

import json
import logging
from importlib.metadata import PackageNotFoundError

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from perl.cli.commands import run
from perl.errors import MissingExtraError, RecipeError
from perl.launch.verl import check_job
from perl.sandbox import BASE_FOLDER
from perl.training.to_verl import export_verl, prepare_export
from tests.launch.verl_recipes import recipe

PLAIN_LINES = ("train.lr_scheduler_type=constant", "train.use_bias_correction_kl=false")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An rsLoRA of rank 8 and alpha 3 whose factors are random."""
    folder = tmp_path_factory.mktemp("saved")
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    config = peft.LoraConfig(
        r=8, lora_alpha=3, use_rslora=True, lora_dropout=0.1, target_modules=["q_proj", "down_proj"]
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def job(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("continued") / "job"
    return export_verl(recipe(peft={"adapter": str(saved)}), folder)


def logits_of(folder):
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        return model(torch.arange(4, 20)[None]).logits


def test_an_adapter_goes_as_the_plain_lora_that_it_is(job, saved):
    folder, export = job
    values, facts = export.made.values, json.loads((folder / "job.json").read_text())
    alpha = 3 * 8**0.5
    assert values["actor_rollout_ref.model.lora_rank"] == pytest.approx(8)
    assert values["actor_rollout_ref.model.lora_alpha"] == pytest.approx(alpha)
    assert (facts["alpha"], facts["verl_alpha"]) == pytest.approx((3, alpha))
    assert values["actor_rollout_ref.model.lora_adapter_path"] == "@FOLDER@/adapter"
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_dropout"], config["lora_alpha"]) == (False, 0.0, pytest.approx(alpha))
    torch.testing.assert_close(logits_of(folder / "adapter"), logits_of(saved), rtol=0, atol=1e-5)
    weights = [load_file(place / "adapter_model.safetensors") for place in (saved, folder / "adapter")]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_what_an_adapter_cannot_go_on_with_is_refused(saved):
    adapter = {"adapter": str(saved)}
    for sections, words in (
        ({"engine": {"name": "verl", "strategy": "megatron"}}, "Megatron-Bridge's own format"),
        ({"train": {"beta": 0.01, "use_bias_correction_kl": False}}, "not the adapter that is continued"),
    ):
        with pytest.raises(RecipeError, match=words):
            prepare_export(recipe(peft=adapter, **sections))
    train = {"beta": 0.01, "use_bias_correction_kl": False, "reference": "base"}
    made = prepare_export(recipe(peft=adapter, train=train)).made
    assert made.values["actor_rollout_ref.actor.kl_loss_coef"] == pytest.approx(0.01)


def test_the_command_prints_what_would_go_or_a_line_for_each_refusal(capsys, tmp_path):
    assert run(["export-verl", "quickstart", "--dry-run", "engine.gpus=2", *PLAIN_LINES], "perl") == 0
    printed = capsys.readouterr().out.splitlines()
    told = dict(line.split("=", 1) for line in printed if not line.startswith("#"))
    assert float(told["trainer.n_gpus_per_node"]) == pytest.approx(2)
    assert float(told["actor_rollout_ref.rollout.n"]) == pytest.approx(8)
    assert any(line.startswith("# note     rewards:") for line in printed)
    assert run(["export-verl", "quickstart", "-o", str(tmp_path / "job"), "peft.method=dora"], "perl") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert {word for word in ("peft.method", "train.lr_scheduler_type") if any(word in line for line in errors)}
    assert not (tmp_path / "job").exists()
    assert run(["export-verl", "quickstart"], "perl") == 2
    assert "-o DIR" in capsys.readouterr().err


def test_where_there_is_no_verl_or_another_one_a_line_says_so(job, monkeypatch, caplog, capsys):
    folder, _ = job

    def absent(_):
        raise PackageNotFoundError

    monkeypatch.setattr(check_job, "version", absent)
    with pytest.raises(MissingExtraError, match="verl is not installed here"):
        check_job.check_job(folder)
    assert check_job.main([str(folder)]) == 2
    assert "pip install 'verl[vllm]==0.9.1'" in capsys.readouterr().err
    monkeypatch.setattr(check_job, "version", lambda _: "0.10.0")
    with caplog.at_level(logging.WARNING, logger="perl"):
        assert check_job._verl() == "0.10.0"
    assert [record.code for record in caplog.records] == ["PRL347"]
    assert check_job.main([str(folder.parent)]) == 2
    assert "is no job of perl export-verl" in capsys.readouterr().err


def test_a_jobs_overrides_get_the_folders_path(job):
    folder, export = job
    lines = check_job.overrides_of(folder, ["trainer.nnodes=2"])
    assert len(lines) == pytest.approx(len(export.made.values) + 1)
    assert not [line for line in lines if "@FOLDER@" in line]
    assert f"data.train_files='{folder}/train.parquet'" in lines
