"""The trainer's loss, gradients, metrics and adapters are those of TRL's trainer on the same rollouts."""

import math
import random
import runpy
from collections import Counter, defaultdict

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.algorithms.registry import LOSSES
from perl.policy.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection
from perl.sandbox import BASE_FOLDER, load_problems
from perl.sandbox.tasks import careful_completion, sloppy_completion
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


def constant_reward(completions, **_):
    """No dyadic number: the mean of a few of them is another number."""
    return [0.7] * len(completions)


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


def build(trainer_class, args, tool_results=False, reward=dyadic_reward):
    """A trainer whose adapter starts from the same random numbers every time."""
    model = load_base(ModelSection(), torch.device("cpu"))
    torch.manual_seed(7)
    return trainer_class(
        model=model,
        reward_funcs=reward,
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


def own_loss(trainer, inputs) -> torch.Tensor:
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss


def assert_same_as_trl(trainer, inputs, mode: str, compute=step_of_ours) -> dict[str, list[float]]:
    """Compares both losses on one trainer and one micro-batch, and returns TRL's metrics."""
    loss, gradient, metrics = loss_gradient_metrics(trainer, inputs, mode, compute)
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
        epsilon=0.05,
        epsilon_high=0.9 if loss_type == "cispo" else None,  # CISPO bounds the ratio itself
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


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "vespo"])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_correction_for_another_engines_numbers_is_trls(loss_type, per_row):
    mode = "sequence_mask" if per_row else "token_truncate"
    args = settings(PeftRLConfig, loss_type=loss_type, beta=0.04, num_iterations=2, vllm_importance_sampling_mode=mode)
    trainer = build(PeftGRPOTrainer, args)
    inputs = prepared_inputs(trainer, "train")
    move_adapter(trainer)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    old, mask = inputs["old_per_token_logps"], inputs["completion_mask"]
    difference = 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(5)) * mask
    inputs["sampling_per_token_logps"] = old - difference
    if per_row:
        ratio = difference.sum(1, keepdim=True).exp()
        ratio[ratio > trainer.vllm_importance_sampling_clip_max] = 0
    else:
        ratio = difference.exp().clamp(max=trainer.vllm_importance_sampling_clip_max)
    inputs["importance_sampling_ratio"] = ratio  # for TRL, which computes it with the rollouts
    assert_same_as_trl(trainer, inputs, "train")


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_two_sided_clipping_and_uneven_bounds_are_trls(loss_type):
    options = {"loss_type": loss_type, "epsilon": 0.01, "epsilon_high": 0.3, "delta": 1.5, "num_iterations": 2}
    trainer = build(PeftGRPOTrainer, settings(PeftRLConfig, beta=0.04, use_bias_correction_kl=False, **options))
    inputs = prepared_inputs(trainer, "train")
    move_adapter(trainer)
    assert_same_as_trl(trainer, inputs, "train")


@pytest.mark.parametrize(
    "options", [{"top_entropy_quantile": 0.1}, {"entropy_coef": 0.1}, {"off_policy_mask_threshold": 1e-4}], ids=str
)
def test_options_beside_the_loss_type_act_as_in_trl(options):
    trainer = build(PeftGRPOTrainer, settings(PeftRLConfig, num_iterations=2, **options))
    inputs = prepared_inputs(trainer, "train")
    move_adapter(trainer)
    compute = step_of_ours if trainer.step_is_ours else own_loss
    assert_same_as_trl(trainer, inputs, "train", compute)
    _, with_option, _ = loss_gradient_metrics(trainer, inputs, "train", compute)
    plain = build(PeftGRPOTrainer, settings(PeftRLConfig, num_iterations=2))
    move_adapter(plain)
    _, without, _ = loss_gradient_metrics(plain, inputs, "train", step_of_ours)
    assert relative_difference(with_option, without) > 1e-2


def trained(trainer_class, args):
    """The adapter before and after training, and what was logged; builds and trains from the same random numbers."""
    trainer = build(trainer_class, args)
    before = adapter_of(trainer)
    trainer.train()
    return before, adapter_of(trainer), history_of(trainer)


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.04, "num_iterations": 2},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_three_steps_give_trls_adapter(loss_type, options):
    options = {"loss_type": loss_type, "optim": "sgd", "learning_rate": 0.5, "max_steps": 3, **options}
    before, after, history = trained(PeftGRPOTrainer, settings(PeftRLConfig, **options))
    trl_before, trl_after, trl_history = trained(GRPOTrainer, settings(GRPOConfig, **options))
    assert relative_difference(before, trl_before) == 0
    moved = {name: after[name] - before[name] for name in before}
    trl_moved = {name: trl_after[name] - trl_before[name] for name in trl_before}
    assert math.sqrt(sum(m.pow(2).sum().item() for m in trl_moved.values())) > 0.05
    assert relative_difference(after, trl_after) <= RELATIVE
    assert relative_difference(moved, trl_moved) <= RELATIVE
    assert_same_history(history, trl_history)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_completions_that_all_get_the_same_reward_have_advantages_of_exactly_zero(scale):
    group = 7  # the single-precision mean of seven 0.7 is another number
    sizes = {"num_generations": group, "per_device_train_batch_size": group, "per_device_eval_batch_size": group}
    trainer = build(PeftGRPOTrainer, settings(PeftRLConfig, scale_rewards=scale, **sizes), reward=constant_reward)
    prompts = [{"prompt": problem.question} for problem in PROBLEMS for _ in range(group)]
    for training in (True, False):
        trainer.model.train(training)
        output = trainer._generate_and_score_completions(prompts)
        assert torch.equal(output["advantages"], torch.zeros(2 * group))
        assert list(trainer._logs["advantages"]) == [0.0] * 2 * group


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
