"""The trainer's loss, gradients, metrics and adapters are those of TRL's trainer on the same rollouts."""

import math
import random
import runpy
from collections import Counter, defaultdict
from pathlib import Path
from typing import get_args

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.losses import LossType
from perl.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection
from perl.sandbox import load_problems
from perl.sandbox.tasks import careful_completion, sloppy_completion

LOSS_TYPES = get_args(LossType)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# What the same computation in another order of additions may differ by.
RELATIVE = 1e-5

PROBLEMS = load_problems("sandbox:addition", "train")[:2]
GENERATIONS = 4
# Differs between two runs of the same thing.
CLOCKS = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


@pytest.fixture(autouse=True)
def _rollout_functions_are_known_to_be_experimental(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def fixed_texts(question: str) -> list[str]:
    """Completions of different lengths and worth, the same at every call."""
    problem = next(p for p in PROBLEMS if p.question == question)
    rng = random.Random(question)
    right, wrong = sloppy_completion(problem, rng, right=1.0), sloppy_completion(problem, rng, right=0.0)
    return [careful_completion(problem), right, wrong, wrong[: len(wrong) // 2]]


def fixed_rollouts(tool_results: bool = False):
    """A rollout function that deals out the fixed completions; with tool results in the middle of some."""
    tokenizer = load_tokenizer(ModelSection())

    def rollout(prompts, trainer):  # noqa: ARG001 (TRL's signature)
        dealt = Counter()
        completions = []
        for prompt in prompts:
            texts = fixed_texts(prompt)
            completions.append(tokenizer(texts[dealt[prompt] % len(texts)])["input_ids"])
            dealt[prompt] += 1
            if dealt[prompt] % len(texts):
                completions[-1].append(tokenizer.eos_token_id)
        output = {
            "prompt_ids": tokenizer(prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": [[-0.5] * len(ids) for ids in completions],
        }
        if tool_results:
            output["env_mask"] = [[int(not 3 <= i < 6) for i in range(len(ids))] for ids in completions]
        return output

    return rollout


def dyadic_reward(completions, **_):
    """Quarters, whose means and deviations no order of additions can change."""
    return [len(text) % 4 / 4 for text in completions]


def settings(config_class, **options):
    """Arguments for a CPU that draw nothing at random and report to nobody."""
    return config_class(
        "run",
        **{
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "num_generations": GENERATIONS,
            "per_device_train_batch_size": GENERATIONS,
            "per_device_eval_batch_size": GENERATIONS * len(PROBLEMS),
            "gradient_accumulation_steps": len(PROBLEMS),
            "max_completion_length": 64,
            "seed": 11,
            **options,
        },
    )


def build(trainer_class, args, tool_results=False):
    """A trainer whose adapter starts from the same random numbers every time."""
    model = load_base(ModelSection(), torch.device("cpu"))
    torch.manual_seed(7)
    return trainer_class(
        model=model,
        reward_funcs=dyadic_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [problem.question for problem in PROBLEMS]}),
        processing_class=load_tokenizer(ModelSection()),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"),
        rollout_func=fixed_rollouts(tool_results),
    )


def adapter_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def move_adapter(trainer) -> None:
    """As if some optimizer steps had been taken since the rollouts."""
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    difference = math.sqrt(sum((ours[name] - theirs[name]).double().pow(2).sum().item() for name in ours))
    return difference / math.sqrt(sum(tensor.double().pow(2).sum().item() for tensor in theirs.values()))


def prepared_inputs(trainer, mode: str):
    """A micro-batch as the training or evaluation loop gets it."""
    trainer.model.train(mode == "train")
    rows = GENERATIONS if mode == "train" else 2 * GENERATIONS
    prompts = [{"prompt": problem.question} for problem in PROBLEMS for _ in range(GENERATIONS)]
    inputs = trainer._prepare_inputs(prompts)
    assert inputs["completion_ids"].size(0) == rows
    return inputs


def loss_gradient_metrics(trainer, inputs, mode: str, compute):
    trainer.model.train(mode == "train")
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.model.zero_grad()
    loss = compute(trainer, trainer.model, inputs)
    loss.backward()
    gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return loss.item(), gradient, trainer._metrics


def assert_same_as_trl(trainer, inputs, mode: str) -> dict[str, list[float]]:
    """Compares both losses on one trainer and one micro-batch, and returns TRL's metrics."""
    loss, gradient, metrics = loss_gradient_metrics(trainer, inputs, mode, PeftGRPOTrainer._compute_loss)
    trl_loss, trl_gradient, trl_metrics = loss_gradient_metrics(trainer, inputs, mode, GRPOTrainer._compute_loss)
    assert math.sqrt(sum(g.pow(2).sum().item() for g in trl_gradient.values())) > 1e-4
    assert relative_difference(gradient, trl_gradient) <= RELATIVE
    assert loss == pytest.approx(trl_loss, rel=RELATIVE, abs=1e-7)  # on policy the terms cancel
    for other in ("train", "eval"):
        assert metrics[other].keys() == trl_metrics[other].keys()
        for name, values in trl_metrics[other].items():
            assert metrics[other][name] == pytest.approx(values, rel=RELATIVE, abs=1e-7, nan_ok=True), name
    assert "entropy" in trl_metrics[mode]
    return trl_metrics[mode]


@pytest.mark.parametrize("situation", ["on policy", "off policy", "tool results"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_gradient_and_metrics_are_trls(loss_type, level, beta, situation):
    args = settings(
        PeftRLConfig,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        num_iterations=1 if situation == "on policy" else 2,
    )
    trainer = build(PeftGRPOTrainer, args, tool_results=situation == "tool results")
    inputs = {mode: prepared_inputs(trainer, mode) for mode in ("train", "eval")}
    move_adapter(trainer)
    for mode in inputs:
        assert ("old_per_token_logps" in inputs[mode]) == (situation != "on policy")
        assert ("tool_mask" in inputs[mode]) == (situation == "tool results")
        metrics = assert_same_as_trl(trainer, inputs[mode], mode)
        assert ("kl" in metrics) == (beta > 0)
        if loss_type in CLIPPED:
            assert (metrics["clip_ratio/region_mean"][0] > 0) == (situation != "on policy")
