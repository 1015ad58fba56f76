"""A recipe that says ``algorithm: ppo``: its plan, its run folder, and one completion of each prompt."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import perl
from perl.errors import PerlError
from perl.hub.card.published import public_recipe
from perl.policy.critic import Critic
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER
from perl.training.forecast_text import plan_lines
from perl.training.prepare import prepare, read_recipe

SHORT = {
    "extends": "quickstart",
    "rollout": {"max_completion_length": 16},
    "eval": {"enabled": False},
    "engine": {"device": "cpu", "threads": 1},
    "train": {"max_steps": 3, "prompts_per_step": 4, "num_generations": 2, "per_device_train_batch_size": 8},
}


@pytest.mark.nightly
def test_a_run_exports_its_critic_beside_the_adapter_and_never_in_it(tmp_path, trainers):
    overrides = ["algorithm=ppo", "train.critic_rank=4", "train.critic_warmup_steps=1", "train.beta=0.02"]
    overrides += ["train.kl_in_reward=true", "train.kl_estimator=k1"]
    run = perl.train(SHORT, overrides, tmp_path / "run")
    assert run.status == "done"
    (trainer,) = trainers
    about = json.loads((run.critic / "critic.json").read_text())
    assert (about["rank"], about["base"], about["gamma"], about["lambda"]) == (4, "sandbox:base", 1.0, 0.95)
    assert about["base_fingerprint"] == run.facts["fingerprint"]["base"]
    read = Critic(trainer.policy, rank=4, seed=99)
    read.load(run.critic / "critic.safetensors")
    trained = trainer.critic_training.critic.state()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in read.state().items())
    assert trained["value_head.bias"] != 0
    of_adapter = [path.name for path in run.adapter.iterdir()]
    assert not any("critic" in name for name in of_adapter)
    with safe_open(run.adapter / "adapter_model.safetensors", framework="pt") as file:
        assert not any("value_head" in name for name in file.keys())  # noqa: SIM118
    assert "ppo" in run.card.read_text()
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("critic/explained_variance" in row and "kl" in row for row in rows)
    lines = list(plan_lines(prepare(read_recipe(SHORT, overrides))))
    (line,) = [line for line in lines if line.startswith("critic ")]
    assert f" {sum(t.numel() for t in trained.values()):,} parameters (rank 4, and a value head)" in line
    assert line.endswith(f", learning rate {trainer.critic_training.learning_rate:g}")
    assert any(line.startswith("algorithm ppo: ") and "gae_lambda 0.95" in line for line in lines)


@pytest.mark.nightly
def test_a_run_starts_from_another_runs_critic_or_says_before_a_model_is_loaded_why_not(tmp_path, monkeypatch):
    first = perl.train(SHORT, ["algorithm=ppo", "train.critic_rank=4", "train.max_steps=1"], tmp_path / "first")
    given = ["algorithm=ppo", "train.critic_rank=4", "train.max_steps=1", f"train.critic_adapter={first.path}"]
    second = perl.train(SHORT, given, tmp_path / "second")
    values = [json.loads(run.metrics.read_text().splitlines()[0])["critic/value_mean"] for run in (first, second)]
    assert values[0] == 0
    assert values[1] != 0
    recipe = public_recipe(load_recipe(second.path / "recipe.yaml"))
    assert "critic_adapter: first" in recipe
    assert str(tmp_path) not in recipe
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    config = AutoConfig.from_pretrained(BASE_FOLDER)
    config.intermediate_size += 8
    narrow = tmp_path / "narrow"
    shutil.copytree(BASE_FOLDER, narrow)
    config.save_pretrained(narrow)
    for changes, words in {
        "train.critic_rank=8": r"train.critic_rank: [^\n]*rank 4[^\n]*rank 8",
        f"train.critic_adapter={tmp_path}/absent": r"train.critic_adapter: [^\n]*no such folder",
        f"model.name={narrow}": r"model.name: [^\n]*critic of another base: [^\n]*mlp",
    }.items():
        with pytest.raises(PerlError, match=words) as caught:
            prepare(read_recipe(SHORT, [*given, changes]))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("remax", marks=pytest.mark.nightly)])
def test_one_completion_of_each_prompt_trains(tmp_path, algorithm):
    overrides = [f"algorithm={algorithm}", "train.num_generations=1", "train.prompts_per_step=6"]
    overrides += ["train.per_device_train_batch_size=3", "rewards.format=0.2"]
    run = perl.train(SHORT, overrides, tmp_path / "run")
    assert run.status == "done"
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    trained = [row for row in rows if "loss" in row]
    assert [row["num_tokens"] > 0 for row in trained] == [True] * 3
    assert all(0 <= row["frac_reward_zero_std"] <= 1 for row in trained)
    assert any(row["grad_norm"] > 0 for row in trained)
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert len(samples) == 3  # a group of one a step
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in adapter.values())
