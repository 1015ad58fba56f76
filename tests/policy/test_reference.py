"""The reference is the pristine base, whatever became of the adapter, and asking for it changes nothing."""

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, VeraConfig

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import ModelError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base, load_tokenizer
from perl.policy.reference import Reference, reference_log_probs, token_log_probs
from perl.recipe.sections import ModelSection, PeftSection
from tests.a_few_methods import A_FEW

IDS = torch.tensor([[0, 0, 6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 6, 20, 1]])
MASK = (IDS > 0).long()
REAL = (MASK[:, :-1] * MASK[:, 1:]).bool()


def base():
    return load_base(ModelSection(), torch.device("cpu"))


def pristine() -> torch.Tensor:
    with torch.no_grad():
        return token_log_probs(base(), IDS, MASK)


def policy_of(method: str) -> torch.nn.Module:
    """The base as this method starts."""
    if method in METHODS and not METHODS[method].config:
        return base().requires_grad_(True)
    if method == "lora and whole modules":
        return attach_adapter(base(), adaptation(PeftSection(rank=4, kwargs={"modules_to_save": ["norm"]}))).eval()
    rank = {"rank": 4} if "rank" in METHODS[method].settings else {}
    return attach_adapter(base(), adaptation(PeftSection(method=method, **rank))).eval()


def move_adapter(policy: torch.nn.Module, seed: int = 1) -> None:
    vera = isinstance(policy, PeftModel) and isinstance(policy.active_peft_config, VeraConfig)
    size = 0.5 if vera else 0.05  # VeRA's vectors scale small matrices
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other)[REAL].abs().max().item()


def policy_log_probs(policy: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return token_log_probs(policy, IDS, MASK)


@pytest.mark.parametrize(
    ("method", "spec"),
    [*((name, "base") for name in A_FEW), ("lora", "initial"), ("full", "base"), ("lora and whole modules", "initial")]
    + [pytest.param(name, "initial", marks=pytest.mark.nightly) for name in METHODS],
)
def test_a_reference_stays_while_the_policy_moves_and_leaves_it_as_it_is(method, spec):
    """A new adapter's is the pristine base, from which it does not differ yet."""
    policy = policy_of(method)
    assert difference(policy_log_probs(policy), pristine()) <= 1e-5
    if spec == "initial":
        move_adapter(policy)
    start, reference = policy_log_probs(policy), Reference(policy, spec)
    move_adapter(policy, seed=2)
    now = policy_log_probs(policy)
    before = {name: (p, p.detach().clone(), p.requires_grad) for name, p in policy.named_parameters()}
    found = reference_log_probs(policy, IDS, MASK, reference)
    assert not found.requires_grad
    assert difference(found, start) <= 1e-5
    if spec == "base":
        assert difference(found, pristine()) <= 1e-6
        if isinstance(policy, PeftModel):
            assert torch.equal(reference_log_probs(policy, IDS, MASK), found)  # the default
    assert difference(now, start) > 0.1
    assert torch.equal(policy_log_probs(policy), now)
    for name, parameter in policy.named_parameters():
        same, values, trained = before[name]
        assert parameter is same
        assert torch.equal(parameter, values)
        assert parameter.requires_grad is trained


def test_a_reference_costs_the_numbers_that_are_trained_or_none():
    policy = policy_of("lora")
    assert Reference(policy).snapshot == {}
    kept = Reference(policy, "initial").snapshot
    assert list(kept) == [name for name, p in policy.named_parameters() if p.requires_grad]
    linear = [layer for _, layer in base().named_modules() if isinstance(layer, torch.nn.Linear)]
    adapted = [layer for layer in linear if layer.out_features != 128 or layer.weight.data_ptr()][:-1]  # not the head
    expected = sum(4 * (layer.in_features + layer.out_features) for layer in adapted)  # A: R x I, B: O x R
    assert sum(tensor.numel() for tensor in kept.values()) == expected
    model = policy_of("full")  # without an adapter, the base is a copy of all there is
    assert list(Reference(model).snapshot) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("spec", "step_of"), [("rolling:3", lambda n: n // 3 * 3), ("initial", lambda _: 0), ("base", lambda _: 0)]
)
def test_a_rolling_reference_is_the_policy_at_the_last_multiple_and_no_other_is_renewed(spec, step_of):
    policy = policy_of("lora")
    reference, seen = Reference(policy, spec), [policy_log_probs(policy)]
    for step in range(1, 8):
        move_adapter(policy, seed=step)
        seen.append(policy_log_probs(policy))
        reference.after_step(policy, step)
        assert torch.equal(reference_log_probs(policy, IDS, MASK, reference), seen[step_of(step)])


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_model_without_an_adapter_has_a_reference_only_where_the_loss_needs_it(beta):
    trainer = trainer_of(base(), beta=beta, peft_method="full")
    with torch.no_grad():
        trainer.policy.model.norm.weight.mul_(2.0)
    assert difference(trainer.policy_log_probs(IDS, MASK), pristine()) > 0.1
    if beta:
        assert difference(trainer.reference_log_probs(IDS, MASK), pristine()) <= 1e-6
    else:
        with pytest.raises(ModelError, match=r"^train\.beta: without an adapter a reference is kept only where beta"):
            trainer.reference_log_probs(IDS, MASK)


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


def test_the_trainers_log_probs_are_those_of_plain_forward_passes(trainer):
    """Of the policy and of the pristine base; single precision, one for each token but the first, without dropout."""
    model = trainer.model
    model.eval()
    with torch.no_grad():
        logits = trainer.policy(IDS, attention_mask=MASK, position_ids=(MASK.cumsum(-1) - 1).clamp(min=0)).logits
        by_hand = logits[:, :-1].float().log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    for training in (True, False):
        model.train(training)
        policy, reference = (getattr(trainer, f"{of}_log_probs")(IDS, MASK) for of in ("policy", "reference"))
        assert model.training is training
        for found in (policy, reference):
            assert found.shape == (2, 9)
            assert found.dtype == torch.float32
            assert not found.requires_grad
            assert (found[REAL] <= 0).all()
        assert difference(policy, by_hand) <= 1e-5
        assert difference(reference, pristine()) <= 1e-6
        assert difference(policy, pristine()) > 0.01
    model.train()
    with torch.no_grad():
        assert difference(token_log_probs(trainer.policy, IDS, MASK), policy) > 1e-3  # dropout acts
        model.eval()
        assert torch.equal(token_log_probs(trainer.policy, IDS, MASK, temperature=1.0), policy)
    model.train()
    assert torch.equal(trainer.policy_log_probs(IDS, MASK), policy)
