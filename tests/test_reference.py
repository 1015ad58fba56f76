"""The reference is the pristine base, whatever became of the adapter, and asking for it changes nothing."""

import pytest
import torch
from datasets import Dataset
from peft import PeftModel

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.adapter import attach_adapter
from perl.logprobs import token_log_probs
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.model import load_base, load_tokenizer
from perl.recipe.sections import ModelSection, PeftSection
from perl.reference import reference_log_probs

IDS = torch.tensor([[0, 0, 6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 6, 20, 1]])
MASK = (IDS > 0).long()
REAL = (MASK[:, :-1] * MASK[:, 1:]).bool()


def base():
    return load_base(ModelSection(), torch.device("cpu"))


def pristine() -> torch.Tensor:
    with torch.no_grad():
        return token_log_probs(base(), IDS, MASK)


def policy_of(method: str) -> PeftModel:
    return attach_adapter(base(), adaptation(PeftSection(method=method, rank=4))).eval()


def move_adapter(policy: torch.nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other)[REAL].abs().max().item()


@pytest.mark.parametrize("method", METHODS)
def test_a_new_adapter_is_the_reference_until_it_moves(method):
    policy = policy_of(method)
    with torch.no_grad():
        assert difference(token_log_probs(policy, IDS, MASK), pristine()) <= 1e-5
        move_adapter(policy)
        assert difference(token_log_probs(policy, IDS, MASK), pristine()) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_is_the_pristine_base_after_the_adapter_has_moved(method):
    policy = policy_of(method)
    move_adapter(policy)
    assert difference(reference_log_probs(policy, IDS, MASK), pristine()) <= 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_the_adapter_is_active_and_trainable_again_afterwards(method):
    policy = policy_of(method)
    move_adapter(policy)
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    with torch.no_grad():
        before = token_log_probs(policy, IDS, MASK)
        reference_log_probs(policy, IDS, MASK)
        after = token_log_probs(policy, IDS, MASK)
    assert torch.equal(after, before)
    assert policy.active_adapter == "default"
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == trainable


def test_modules_that_are_trained_whole_are_the_bases_in_the_reference():
    policy = attach_adapter(base(), adaptation(PeftSection(rank=4, kwargs={"modules_to_save": ["norm"]})))
    move_adapter(policy)
    assert difference(reference_log_probs(policy, IDS, MASK), pristine()) <= 1e-6


def test_the_reference_has_no_gradient():
    assert not reference_log_probs(policy_of("lora"), IDS, MASK).requires_grad


def test_a_frozen_copy_named_ref_is_the_reference_of_a_continued_adapter():
    policy = policy_of("lora")
    move_adapter(policy)
    start = token_log_probs(policy, IDS, MASK).detach()
    trainer = trainer_of(policy, beta=0.04)
    assert difference(trainer.reference_log_probs(IDS, MASK), start) <= 1e-6
    move_adapter(policy, seed=2)
    assert difference(trainer.reference_log_probs(IDS, MASK), start) <= 1e-6
    assert difference(trainer.policy_log_probs(IDS, MASK), start) > 0.1
    assert policy.active_adapter == "default"
    assert {n.split(".")[-2] for n, p in policy.named_parameters() if p.requires_grad} == {"default"}


def trainer_of(model, folder="run", **options) -> PeftGRPOTrainer:
    arguments = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_generations": 4}
    arguments |= {"per_device_train_batch_size": 4, "max_completion_length": 8, "temperature": 0.7}
    return PeftGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(i % 4) for i in range(len(completions))],
        args=PeftRLConfig(folder, **arguments, **options),
        train_dataset=Dataset.from_dict({"prompt": ["12+34=", "5+6="]}),
        processing_class=load_tokenizer(ModelSection()),
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> PeftGRPOTrainer:
    folder = str(tmp_path_factory.mktemp("run"))
    trainer = trainer_of(base(), folder, peft_rank=4, peft_dropout=0.5, learning_rate=0.05, max_steps=2)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["policy_log_probs", "reference_log_probs"])
@pytest.mark.parametrize("training", [True, False])
def test_the_trainers_log_probs_are_single_precision_one_for_each_token_but_the_first(trainer, name, training):
    trainer.model.train(training)
    log_probs = getattr(trainer, name)(IDS, MASK)
    assert log_probs.shape == (2, 9)
    assert log_probs.dtype == torch.float32
    assert not log_probs.requires_grad
    assert (log_probs[REAL] <= 0).all()
    assert trainer.model.training is training


def test_the_trainers_reference_is_the_pristine_base_after_training(trainer):
    assert difference(trainer.reference_log_probs(IDS, MASK), pristine()) <= 1e-6
    assert difference(trainer.policy_log_probs(IDS, MASK), pristine()) > 0.01


def test_the_trainers_policy_has_temperature_one_and_no_dropout(trainer):
    expected = trainer.policy_log_probs(IDS, MASK)
    trainer.model.train()
    with torch.no_grad():
        assert difference(token_log_probs(trainer.policy, IDS, MASK), expected) > 1e-3  # dropout acts
        trainer.model.eval()
        assert torch.equal(token_log_probs(trainer.policy, IDS, MASK, temperature=1.0), expected)
    trainer.model.train()
    assert torch.equal(trainer.policy_log_probs(IDS, MASK), expected)
