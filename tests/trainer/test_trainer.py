"""PeftGRPOTrainer where it differs from its parent: what is sampled, saved, resumed, written and sent."""

import json
import math
import shutil
import socket
import statistics

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import BrokenPromiseError, RecipeError
from perl.policy.checkpoint import is_complete, latest_checkpoint
from perl.rewards import accuracy_reward
from perl.sandbox import BASE_FOLDER, load_problems


def problems(count=16) -> Dataset:
    chosen = load_problems("sandbox:addition", "train")[:count]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.question}], "solution": p.answer} for p in chosen]
    )


def arguments(folder, **changes) -> PeftRLConfig:
    settings = {
        "use_cpu": True,
        "prompts_per_step": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 24,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "peft_rank": 4,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return PeftRLConfig(str(folder), **{**settings, **changes})


def trainer(folder, model="sandbox:base", **changes) -> PeftGRPOTrainer:
    return PeftGRPOTrainer(
        model=model, reward_funcs=accuracy_reward, args=arguments(folder, **changes), train_dataset=problems()
    )


def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)


def weights_of(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters()) if p.requires_grad])


def test_it_is_a_trl_trainer_and_takes_trls_own_config(tmp_path):
    config = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        per_device_train_batch_size=8,
        max_completion_length=16,
        max_steps=1,
        report_to=[],
        save_strategy="no",
    )
    made = PeftGRPOTrainer(
        model=str(BASE_FOLDER),
        reward_funcs=accuracy_reward,
        args=config,
        train_dataset=problems(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"),
    )
    assert isinstance(made, GRPOTrainer)
    made.train()
    assert made.policy.peft_config["default"].r == 2
    ours = trainer(tmp_path, peft_method="dora", peft_rank=2, peft_alpha=4, peft_target_modules=["q_proj"])
    adapter = ours.policy.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha, adapter.use_dora, adapter.target_modules) == (2, 4, True, {"q_proj"})


def test_the_models_generation_file_has_no_say_in_rollouts(tmp_path):
    """A model may come with a repetition penalty; sampling with it would train on another policy's completions."""
    model = base()
    model.generation_config.no_repeat_ngram_size = 1  # no token twice: a derivation would be impossible
    model.generation_config.min_p = 0.9
    model.generation_config.stop_strings = ["="]
    made = trainer(tmp_path, model=model, max_steps=1)
    made.train()
    texts = [row["completion"][0]["content"] for row in made.latest_group()]
    assert any(len(set(text)) < len(text) for text in texts)


def test_nothing_is_sent_anywhere(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    trainer(tmp_path, max_steps=1).train()


def test_every_trainable_parameter_moves_and_what_is_saved_is_the_policy_on_a_fresh_base(tmp_path):
    made = trainer(tmp_path / "out", max_steps=4, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in made.policy.named_parameters()}
    made.train()
    for name, parameter in made.policy.named_parameters():
        assert torch.equal(before[name], parameter) is not parameter.requires_grad, name
    made.save_adapter(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 17, 23, 9, 31]])
    with torch.no_grad():
        logits = loaded(ids).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.allclose(made.policy_log_probs(ids, torch.ones_like(ids)), expected, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "sandbox:base"
    made.create_model_card(model_name="mine")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# mine" in card
    assert "`sandbox:base`" in card
    assert "None" not in card
    assert str(tmp_path) not in card


def test_an_optimizer_without_all_parameters_is_refused(tmp_path):
    made = trainer(tmp_path)
    frozen_for_a_moment = next(p for p in made.model.parameters() if p.requires_grad)
    frozen_for_a_moment.requires_grad_(False)
    made.create_optimizer()
    frozen_for_a_moment.requires_grad_(True)
    with pytest.raises(BrokenPromiseError, match="1 trainable parameters are not in the optimizer"):
        made.create_optimizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A training of three steps with a checkpoint of each, of which two are kept; the folder and the adapter."""
    folder = tmp_path_factory.mktemp("saved")
    made = trainer(folder, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=2)
    made.train()
    return folder, weights_of(made.policy)


def test_only_as_many_checkpoints_stay_as_asked_for_and_they_are_sealed(saved):
    folder, _ = saved
    kept = sorted(folder.glob("checkpoint-*"))
    assert [path.name for path in kept] == ["checkpoint-2", "checkpoint-3"]
    assert all(map(is_complete, kept))


@pytest.mark.parametrize("newest", [2, 3])
def test_a_trainer_resumes_from_the_newest_complete_checkpoint_also_of_the_last_step(saved, tmp_path, newest):
    folder, straight = saved
    shutil.copytree(folder, tmp_path / "run")
    if newest == 2:
        (tmp_path / "run" / "checkpoint-3" / "complete.json").unlink()  # as if the kill had come before the seal
    assert latest_checkpoint(tmp_path / "run").name == f"checkpoint-{newest}"
    resumed = trainer(tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert torch.equal(weights_of(resumed.policy), straight)


def evaluated(folder, **changes) -> PeftGRPOTrainer:
    """Two steps, evaluated after each, of which the first is the best, by what the evaluations are told."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "mine", "eval_strategy": "steps", "eval_steps": 1}
    kind = type("Told", (PeftGRPOTrainer,), {"evaluate": lambda self, *_, **__: {"eval_mine": -self.state.global_step}})
    saving = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "max_completion_length": 4, **best}
    data, args = problems(8), arguments(folder, **{**saving, **changes})
    return kind(
        "sandbox:base", lambda completions, **_: [float(i % 4) for i in range(len(completions))], args, data, data
    )


def test_a_finished_training_that_is_started_again_ends_like_the_first_time_and_every_callback_hears_of_it(tmp_path):
    made, again = evaluated(tmp_path), evaluated(tmp_path)
    made.train()
    heard = []

    class Hears(TrainerCallback):
        def on_event(self, *_, **__):
            heard.append(1)

        on_train_begin = on_train_end = on_event

    again.add_callback(Hears())
    result = again.train(resume_from_checkpoint=True)
    assert made.state.best_model_checkpoint.endswith("checkpoint-1")
    assert torch.equal(weights_of(again.policy), weights_of(made.policy))
    assert (len(heard), result.global_step, result.training_loss) == (2, 2, 0.0)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ({"max_steps": 2}, {"max_steps": 4}),
        ({"max_steps": -1, "num_train_epochs": 0.5}, {"max_steps": -1, "num_train_epochs": 1}),
    ],
)
def test_a_training_that_is_made_longer_goes_on_at_the_rate_of_its_new_schedule(tmp_path, first, more):
    evaluated(tmp_path, **first).train()
    longer = evaluated(tmp_path, **more)
    result = longer.train(resume_from_checkpoint=True)
    rates = {row["step"]: row["learning_rate"] for row in longer.state.log_history if "learning_rate" in row}
    assert (result.global_step, math.isnan(result.training_loss)) == (4, False)
    assert [rates[step] for step in (3, 4)] == pytest.approx([0.5e-2, 0.25e-2])


def test_evaluation_while_training_scores_whole_groups(tmp_path):
    scored = []

    def lengths(prompts, completions, **_):
        found = [float(len(text[0]["content"])) for text in completions]
        scored.append(list(zip((prompt[0]["content"] for prompt in prompts), found, strict=True)))
        return found

    made = PeftGRPOTrainer(
        model="sandbox:base",
        reward_funcs=lengths,
        args=arguments(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=1, per_device_eval_batch_size=4),
        train_dataset=problems(),
        eval_dataset=problems(4),
    )
    made.train()
    (logged,) = [row for row in made.state.log_history if "eval_reward" in row]
    evaluated = [row for batch in scored[1:] for row in batch]
    groups = [[length for prompt, length in evaluated if prompt == problem] for problem in dict(evaluated)]
    assert [len(group) for group in groups] == [4] * 4
    assert logged["eval_reward"] == pytest.approx(statistics.fmean(length for _, length in evaluated))
    assert logged["eval_frac_reward_zero_std"] == sum(len(set(group)) == 1 for group in groups) / 4


def test_each_evaluation_set_has_its_own_means_over_rows_and_one_of_them_chooses_the_best(tmp_path):
    given = []

    def reward(completions, **_):
        given.append([None, 3.0, 5.0, 1.0][: len(completions)] if len(completions) > 1 else [4.5])
        return given[-1] * (len(completions) // len(given[-1]))

    def made(**changes):
        sets = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "max_completion_length": 4}
        rows = {"num_generations_eval": 1, "per_device_eval_batch_size": 3}
        args, few = arguments(tmp_path, **{**sets, **rows, **changes}), problems(4)
        return PeftGRPOTrainer("sandbox:base", reward, args, problems(), {"a": few, "b": few.select([0])})

    trainer = made(metric_for_best_model="a_reward")
    trainer.train()
    logged = {name: value for row in trainer.state.log_history for name, value in row.items() if "reward" in name}
    found = {name: value for name, value in logged.items() if name.startswith("eval_") and name.endswith("_reward")}
    assert found == pytest.approx({"eval_a_reward": (3.0 + 5.0 + 4.5) / 3, "eval_b_reward": 4.5})
    assert logged["eval_a_rewards/reward/mean"] == found["eval_a_reward"]
    assert trainer.state.best_metric == found["eval_a_reward"]
    assert trainer.predict(problems(1)).metrics["test_reward"] == 4.5
    assert trainer.evaluate(problems(4))["eval_reward"] == found["eval_a_reward"]
    with pytest.raises(RecipeError, match=r"^metric_for_best_model: eval_reward .*eval_a_reward or eval_b_reward"):
        made(metric_for_best_model="eval_reward")
