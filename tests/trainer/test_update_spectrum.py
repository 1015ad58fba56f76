"""The callback `UpdateSpectrum`: the numbers of `perl spectrum` while a policy trains, on two processes too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl import SFTConfig, SFTTrainer

import perl
from perl.callbacks import LearningCurves, UpdateSpectrum
from perl.errors import RecipeError
from perl.run.files import sha256_of
from tests.ports import free_port
from tests.training.scripted_callbacks import trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
KEYS = {f"spectrum/{name}" for name in ("stable_rank", "unchanged", "off_principal_out", "off_principal_in")}


def rows_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def measured(folder):
    """Step -> what was logged of the spectrum."""
    found = {row["step"]: {name: row[name] for name in row if name in KEYS} for row in rows_of(folder)}
    return {step: values for step, values in found.items() if values}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spectrum") / "whole"
    trainer_of(folder, [UpdateSpectrum(every=2), LearningCurves()], max_steps=4).train()
    return folder


def test_its_numbers_are_those_of_the_saved_adapter_and_change_none_of_the_training(watched, tmp_path):
    found = measured(watched)
    assert list(found) == [2, 4]
    for step, values in found.items():
        pooled = perl.spectrum(watched / f"checkpoint-{step}").pooled
        assert values["spectrum/stable_rank"] == pytest.approx(pooled.stable_rank, rel=1e-4)
        assert values["spectrum/unchanged"] == pytest.approx(pooled.unchanged, abs=1e-5)
        assert 1 - values["spectrum/off_principal_out"] == pytest.approx(pooled.energy.left, rel=1e-3)
        assert 1 - values["spectrum/off_principal_in"] == pytest.approx(pooled.energy.right, rel=1e-3)
    assert found[4]["spectrum/unchanged"] < found[2]["spectrum/unchanged"] < 1
    trainer_of(tmp_path / "bare", [], max_steps=4).train()
    digests = [sha256_of(one / "checkpoint-4" / "adapter_model.safetensors") for one in (watched, tmp_path / "bare")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("options", [{"bf16": True, "peft_method": "dora"}, {"peft_method": "ln_tuning"}], ids=str)
def test_it_measures_other_methods_and_types(options, tmp_path):
    callback = UpdateSpectrum(every=1, modules=r"layers\.0\.", principal=0.2)
    trainer_of(tmp_path / "out", [callback, LearningCurves()], max_steps=1, save_steps=1, **options).train()
    (values,) = measured(tmp_path / "out").values()
    pooled = perl.spectrum(tmp_path / "out" / "checkpoint-1", modules=r"layers\.0\.", principal=0.2).pooled
    assert values["spectrum/stable_rank"] == pytest.approx(pooled.stable_rank, rel=1e-3)
    assert 1 - values["spectrum/off_principal_in"] == pytest.approx(pooled.energy.right, rel=1e-2)


def test_it_works_with_trls_trainers_and_refuses_what_has_no_base(tmp_path):
    from datasets import Dataset
    from peft import LoraConfig

    from perl.sandbox import BASE_FOLDER

    texts = Dataset.from_list([{"text": f"{i}+1={i + 1}"} for i in range(8)])
    settings = {"use_cpu": True, "report_to": "none", "logging_steps": 1, "max_steps": 2, "bf16": False}
    settings |= {"activation_checkpointing": False, "disable_tqdm": True, "per_device_train_batch_size": 4}
    arguments = SFTConfig(str(tmp_path / "out"), **settings)
    made = [UpdateSpectrum(every=2, principal=None), LearningCurves()]
    lora = LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM")
    SFTTrainer(str(BASE_FOLDER), arguments, train_dataset=texts, callbacks=made, peft_config=lora).train()
    (values,) = measured(tmp_path / "out").values()
    assert values.keys() == {"spectrum/stable_rank", "spectrum/unchanged"}
    assert 1 <= values["spectrum/stable_rank"] <= 2
    with pytest.raises(RecipeError, match="of a model that is trained itself no base is left"):
        SFTTrainer(str(BASE_FOLDER), arguments, train_dataset=texts, callbacks=[UpdateSpectrum()]).train()
    with pytest.raises(RecipeError, match=r"UpdateSpectrum\(modules\): 'q_prog' fits no adapted layer"):
        trainer_of(tmp_path / "other", [UpdateSpectrum(modules="q_prog")]).train()
    for wrong in ({"every": 0}, {"principal": 1.0}, {"modules": "("}):
        with pytest.raises(RecipeError, match=rf"UpdateSpectrum\({next(iter(wrong))}\)"):
            UpdateSpectrum(**wrong)


def train_here(folder: str, strategy: str) -> None:
    """What each of two processes does."""
    torch.set_num_threads(1)
    options = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 4, "strategy": strategy}
    trainer_of(folder, [UpdateSpectrum(every=2), LearningCurves()], **options).train()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_measure_once_and_go_on(strategy, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, *launcher, "-m", "tests.trainer.test_update_spectrum", str(tmp_path / "out"), strategy]
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = measured(tmp_path / "out")
    assert list(found) == [2]
    pooled = perl.spectrum(tmp_path / "out" / "checkpoint-2").pooled
    assert found[2]["spectrum/stable_rank"] == pytest.approx(pooled.stable_rank, rel=1e-3)
    assert 1 - found[2]["spectrum/off_principal_out"] == pytest.approx(pooled.energy.left, rel=1e-2)


if __name__ == "__main__":
    train_here(*sys.argv[1:])
