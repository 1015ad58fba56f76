"""The example loop and the trainer make the same adapter of the same rollouts."""

import importlib.util
import runpy
import sys

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.data import render_prompts
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection, PeftSection
from perl.rewards import accuracy_reward
from perl.sandbox import load_problems
from tests.completing import Drawing, complete
from tests.conftest import CHECKOUT

STEPS, PROMPTS, GENERATIONS, LEARNING_RATE = 3, 3, 4, 0.05
BASE = ModelSection(name="sandbox:base")
LOOP = CHECKOUT / "examples" / "grpo_loop.py"


@pytest.fixture(scope="module")
def loop():
    spec = importlib.util.spec_from_file_location("grpo_loop", LOOP)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_loop"] = module
    spec.loader.exec_module(module)
    return module


def rows():
    return [
        {"prompt": [{"role": "user", "content": p.question}], "solution": p.answer}
        for p in load_problems("sandbox:addition", "train")[: STEPS * PROMPTS]
    ]


def recorded_rollouts(prompts, tokenizer):
    """Completions of the base for all steps: by step, then in the order of the repeated prompts."""
    base = load_base(BASE, torch.device("cpu"))
    rollouts = []
    for step in range(STEPS):
        chosen = prompts[step * PROMPTS : (step + 1) * PROMPTS]
        repeated = [prompt for prompt in chosen for _ in range(GENERATIONS)]
        rollouts.append(complete(base, tokenizer, repeated, Drawing(longest=40, seed=step * len(repeated))))
    return rollouts


def adapter_of(policy):
    return torch.cat([value.flatten() for _, value in sorted(get_peft_model_state_dict(policy).items())])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_loop_and_the_trainer_agree_after_three_sgd_steps(loop, tmp_path, loss_type, beta):
    tokenizer = load_tokenizer(BASE)
    prompts = render_prompts(rows(), tokenizer)
    rollouts = recorded_rollouts(prompts, tokenizer)
    step = iter(range(STEPS))

    def replay(prompts, _trainer):
        completions = rollouts[next(step)]
        assert len(prompts) == len(completions)
        return {
            "prompt_ids": [list(prompt_ids) for prompt_ids in repeated_ids(prompts, tokenizer)],
            "completion_ids": [list(c.token_ids) for c in completions],
            "logprobs": [[0.0] * len(c.token_ids) for c in completions],
        }

    trainer = PeftGRPOTrainer(
        model="sandbox:base",
        reward_funcs=accuracy_reward,
        args=PeftRLConfig(
            str(tmp_path),
            use_cpu=True,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            shuffle_dataset=False,
            max_steps=STEPS,
            prompts_per_step=PROMPTS,
            num_generations=GENERATIONS,
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            max_completion_length=40,
            loss_type=loss_type,
            beta=beta,
            peft_rank=4,
            peft_alpha=16,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows()),
        processing_class=tokenizer,
        rollout_func=replay,
    )
    policy = attach_adapter(load_base(BASE, torch.device("cpu")), adaptation(PeftSection(rank=4, alpha=16)))
    set_peft_model_state_dict(policy, get_peft_model_state_dict(trainer.policy))
    start = adapter_of(policy)
    trainer.train()

    settings = loop.LoopSettings(
        steps=STEPS,
        prompts_per_step=PROMPTS,
        num_generations=GENERATIONS,
        loss=loop.LossSettings(loss_type=loss_type, beta=beta, max_completion_length=40),
    )
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=LEARNING_RATE)
    reports = []
    loop.grpo_loop(policy, optimizer, prompts, settings, lambda _, __, index: rollouts[index], reports.append)

    moved = (adapter_of(policy) - start).norm()
    assert moved > 1e-3
    assert (adapter_of(policy) - adapter_of(trainer.policy)).norm() / moved <= 1e-5
    logged = [row for row in trainer.state.log_history if "reward" in row and "loss" in row]
    assert [r.reward for r in reports] == pytest.approx([row["reward"] for row in logged])
    assert [r.length for r in reports] == pytest.approx([row["completions/mean_length"] for row in logged])
    if beta:
        assert [r.kl for r in reports] == pytest.approx([row["kl"] for row in logged], rel=1e-3, abs=1e-7)


def repeated_ids(prompts, tokenizer):
    return [p.token_ids for p in render_prompts([{"prompt": prompt} for prompt in prompts], tokenizer)]


def test_the_example_is_one_page_and_runs_as_a_script(tmp_path, monkeypatch, capsys):
    assert len(LOOP.read_text().splitlines()) <= 200
    monkeypatch.setattr(sys, "argv", [str(LOOP), "--steps", "1", "--output", str(tmp_path / "run")])
    runpy.run_path(str(LOOP), run_name="__main__")
    assert "step   1  reward" in capsys.readouterr().out
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
