"""The trainer's loss, gradients, metrics and adapters are those of TRL's trainer on the same rollouts."""

import itertools
import math
import random
import runpy
from collections import Counter, defaultdict

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.algorithms.registry import LOSSES
from perl.policy.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER, load_problems
from perl.sandbox.tasks import careful_completion, sloppy_completion
from tests.oracles.covering import most_pairs
from tests.oracles.two_trainers import QUIET
from tests.trainer.clocks import CLOCKS

LOSS_TYPES = tuple(name for name, row in LOSSES.items() if row.in_trl)  # the others: test_own_losses.py
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# What the same computation in another order of additions may differ by.
RELATIVE = 1e-5

PROBLEMS = load_problems("sandbox:addition", "train")[:2]
GENERATIONS = 4
# What ours logs besides.
OWN_METRICS = {"rows/trained_fraction", "rows/masked_fraction", "rows/unscored", "tokens/run", "tokens/passes"}


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
            "logprobs": [[0.0] * len(ids) for ids in completions],
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
            **QUIET,
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
    loss = compute(trainer, inputs)
    gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return loss.item(), gradient, trainer._metrics


def step_of_ours(trainer, inputs) -> torch.Tensor:
    """An optimizer step of one micro-batch, or an evaluation batch, and its gradient."""
    if trainer.model.training:
        return trainer.optimizer_step.run_window(trainer.model, [inputs])
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss


def trls_loss(trainer, inputs) -> torch.Tensor:
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return loss


def assert_same_as_trl(trainer, inputs, mode: str) -> dict[str, list[float]]:
    """Compares both losses on one trainer and one micro-batch, and returns TRL's metrics."""
    loss, gradient, metrics = loss_gradient_metrics(trainer, inputs, mode, step_of_ours)
    trl_loss, trl_gradient, trl_metrics = loss_gradient_metrics(trainer, inputs, mode, trls_loss)
    assert math.sqrt(sum(g.pow(2).sum().item() for g in trl_gradient.values())) > 1e-4
    assert relative_difference(gradient, trl_gradient) <= RELATIVE
    # Terms of either sign cancel; they are averaged over tokens, except in LUSPO, which sums over them.
    largest_term = inputs["advantages"].abs().max().item()
    largest_term *= inputs["completion_ids"].size(1) if trainer.loss_type == "luspo" else 1
    assert loss == pytest.approx(trl_loss, rel=RELATIVE, abs=torch.finfo(torch.float32).eps * largest_term)
    for other in ("train", "eval"):
        own = {name for name in metrics[other] if name in OWN_METRICS or name.startswith("sampling/")}
        assert metrics[other].keys() - own == trl_metrics[other].keys()
        for name, values in trl_metrics[other].items():
            assert metrics[other][name] == pytest.approx(values, rel=RELATIVE, abs=1e-7, nan_ok=True), name
    assert "entropy" in trl_metrics[mode]
    return trl_metrics[mode]


SETTINGS = itertools.product(
    LOSS_TYPES, ("token", "sequence"), (0.0, 0.04), ("on policy", "off policy", "tool results")
)


@pytest.mark.parametrize(("loss_type", "level", "beta", "situation"), most_pairs(list(SETTINGS), 24))
def test_loss_gradient_and_metrics_are_trls(loss_type, level, beta, situation):
    """Over fixed rollouts, in training and in evaluation; with two-sided clipping where a loss has it."""
    args = settings(
        PeftRLConfig,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon=0.05,
        epsilon_high=0.9 if loss_type == "cispo" else None,  # CISPO bounds the ratio itself
        delta=1.5 if loss_type in CLIPPED and beta else None,
        use_bias_correction_kl=level == "sequence",
        num_iterations=1 if situation == "on policy" else 2,
        skip_zero_advantage=False,  # metrics are compared, and TRL's are over all rows
    )
    trainer = build(PeftGRPOTrainer, args, tool_results=situation == "tool results")
    inputs = {mode: prepared_inputs(trainer, mode) for mode in ("train", "eval")}
    move_adapter(trainer)
    for mode in inputs:
        off_policy = situation != "on policy" and mode == "train"  # in evaluation the policy does not move
        assert ("old_per_token_logps" in inputs[mode]) == off_policy
        assert ("tool_mask" in inputs[mode]) == (situation == "tool results")
        metrics = assert_same_as_trl(trainer, inputs[mode], mode)
        assert ("kl" in metrics) == (beta > 0)
        if loss_type == "cispo" and off_policy:
            assert 0 < metrics["cispo_clip_ratio"][0] < 1
        if loss_type in CLIPPED:
            assert (metrics["clip_ratio/region_mean"][0] > 0) == off_policy


def history_of(trainer) -> list[dict[str, float]]:
    return [{name: v for name, v in entry.items() if name not in CLOCKS} for entry in trainer.state.log_history]


def assert_same_history(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        closes = "train_loss" in our_entry  # has the last step's metrics too
        carried = {name for entry in ours[:-1] for name in entry} - their_entry.keys() if closes else set()
        assert our_entry.keys() - OWN_METRICS - carried == their_entry.keys()
        for name, value in their_entry.items():
            assert our_entry[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


TRL_SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

def reward_length(completions, **kwargs):
    return [len(completion) % 4 / 4 for completion in completions]

dataset = Dataset.from_dict({"prompt": ["12+34=", "56+7=", "8+91=", "23+45="]})
training_args = GRPOConfig(
    output_dir="run", use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
    report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, learning_rate=0.05, max_steps=4,
    num_generations=4, per_device_train_batch_size=8, max_completion_length=12, beta=0.04, seed=5,
)
trainer = GRPOTrainer(
    model="MODEL",
    reward_funcs=reward_length,
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
"""


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_a_script_written_for_trl_does_the_same_after_renaming_two_classes(tmp_path):
    theirs = TRL_SCRIPT.replace("MODEL", str(BASE_FOLDER))
    ours = theirs.replace("GRPOTrainer", "PeftGRPOTrainer").replace("GRPOConfig", "PeftRLConfig")
    trainers = []
    for script in (theirs, ours.replace("from trl", "from perl")):
        (tmp_path / "script.py").write_text(script)
        torch.manual_seed(3)
        trainers.append(runpy.run_path(str(tmp_path / "script.py"))["trainer"])
    assert [type(trainer) for trainer in trainers] == [GRPOTrainer, PeftGRPOTrainer]
    trl_adapter, adapter = (adapter_of(trainer) for trainer in trainers)
    assert max(tensor.abs().max().item() for name, tensor in trl_adapter.items() if "lora_B" in name) > 1e-3
    assert relative_difference(adapter, trl_adapter) <= RELATIVE
    trl_history, history = (history_of(trainer) for trainer in trainers)
    assert len({entry["reward"] for entry in trl_history[:-1]}) > 1
    assert_same_history(history, trl_history)
