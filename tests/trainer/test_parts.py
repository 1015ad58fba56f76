"""Each part of the trainer by itself, on a bare tiny model without a trainer, against an independent computation."""

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model
from transformers import TrainerState

from perl import PeftRLConfig
from perl.policy.checkpoint import load_policy
from perl.trainer.live import Position
from perl.trainer.resume_state import ResumeState
from perl.trainer.step.log_prob_passes import LogProbPasses
from perl.trainer.step.optimizer_step import OptimizerStep
from tests.oracles.rollouts import EOS, PAD
from tests.oracles.two_trainers import ADAPTERS, OFFSET, QUIET, base, displace, relative_difference

PROMPTS = [[5, 9, 12], [7, 3, 4, 8, 21]]
COMPLETIONS = [[6, 2, 17, EOS], [11, EOS], [14, 15, 30], [40, 41, 42, 43]]


@dataclass
class Bare:
    """What parts read of a trainer: a policy off its base, and no more."""

    model: torch.nn.Module
    args: PeftRLConfig
    accelerator: Accelerator = field(default_factory=lambda: Accelerator(cpu=True))
    state: TrainerState = field(default_factory=TrainerState)
    whole_tensors: bool = True
    shares_optimizer: bool = False
    correction: Any = None
    current_gradient_accumulation_steps: int = 1
    _metrics: Any = field(default_factory=lambda: {mode: defaultdict(list) for mode in ("train", "eval")})
    _step: int = 0
    _buffered_inputs: Any = None
    _prepare_inputs = staticmethod(dict)

    @property
    def policy(self) -> torch.nn.Module:
        return self.model


@pytest.fixture
def bare(tmp_path) -> Bare:
    model = get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(ADAPTERS["lora"]))
    displace({name: p for name, p in model.named_parameters() if p.requires_grad}, OFFSET)
    return Bare(model, PeftRLConfig(str(tmp_path), **QUIET, temperature=0.7, max_completion_length=4))


def passes_of(bare: Bare) -> LogProbPasses:
    return LogProbPasses(bare, longest_prompt=lambda seen: seen, asleep_bytes=lambda: 0)


def rollouts() -> dict[str, torch.Tensor]:
    """Two groups of two completions, padded as TRL pads them."""
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    tensors = {
        "prompt_ids": [[PAD] * (5 - len(ids)) + ids for ids in prompts],
        "prompt_mask": [[0] * (5 - len(ids)) + [1] * len(ids) for ids in prompts],
        "completion_ids": [ids + [PAD] * (4 - len(ids)) for ids in COMPLETIONS],
        "completion_mask": [[1] * len(ids) + [0] * (4 - len(ids)) for ids in COMPLETIONS],
    }
    found = {name: torch.tensor(values) for name, values in tensors.items()}
    return found | {"advantages": torch.tensor([1.0, -1.0, 0.5, -0.25]), "num_items_in_batch": torch.tensor(13)}


def own_log_probs(model: torch.nn.Module, temperature: float) -> torch.Tensor:
    """(N, T) of the rollouts, each row by itself, without padding or packing, as plain transformers compute them."""
    result = torch.zeros(4, 4)
    for index, completion in enumerate(COMPLETIONS):
        ids = torch.tensor([[*PROMPTS[index // 2], *completion]])
        logits = model(input_ids=ids).logits[0, -len(completion) - 1 : -1] / temperature
        chosen = torch.tensor(completion)[:, None]
        result[index, : len(completion)] = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    return result


def gradient_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_log_probs_are_those_of_each_row_by_itself(bare):
    expected = own_log_probs(copy.deepcopy(bare.model), 0.7).detach()
    passes, found, metrics = passes_of(bare), rollouts(), defaultdict(list)
    passes.add(found, metrics, old=True)
    assert torch.allclose(found["old_per_token_logps"], expected, atol=1e-5)
    assert "ref_per_token_logps" not in found
    assert metrics["rows/masked_fraction"] == [0.0]


class Stands:
    """Takes all rollouts for the policy's."""

    def begin(self) -> None:
        self.begun = True

    def accepts(self, gap: float | None) -> bool:
        return gap is None

    def make_again(self, asked: Any) -> Any:
        raise AssertionError(asked)


def step_of(bare: Bare, accumulation: int) -> OptimizerStep:
    def backward(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = step.loss_of(model, batch)
        loss.backward()
        return loss.detach()

    bare.run_micro_batch, bare.current_gradient_accumulation_steps = backward, accumulation
    step = OptimizerStep(bare, passes_of(bare), Stands(), Position(bare))
    return step


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_of_a_step_is_the_policy_gradients(bare, micro_batches):
    """On policy, -sum of A grad log p over the tokens; the loss of DAPO divides by their number."""
    bare.args.loss_type, bare.args.steps_per_generation = "dapo", micro_batches
    plain = copy.deepcopy(bare.model)
    batch = rollouts()
    log_probs = own_log_probs(plain, 0.7)
    (-(batch["advantages"][:, None] * log_probs * batch["completion_mask"]).sum() / 13).backward()

    step, rows = step_of(bare, micro_batches), 4 // micro_batches
    bare.model.train()
    for first in range(0, 4, rows):
        part = {name: value[first : first + rows] if value.dim() else value for name, value in batch.items()}
        bare.accelerator.gradient_state._set_sync_gradients(first + rows == 4)
        step.take(bare.model, part)
    assert bare._step == micro_batches
    assert relative_difference(gradient_of(bare.model), gradient_of(plain)) <= 1e-5
    assert bare._metrics["train"]["rows/trained_fraction"] == [1.0]
    assert len(bare._metrics["train"]["step_time"]) == 1


def test_a_checkpoint_brings_back_the_counter_and_the_rollouts_that_are_left(bare, tmp_path):
    position = Position(bare)
    resume = ResumeState(bare, position, None)
    bare.args.steps_per_generation, bare.state.global_step, bare.state.max_steps = 4, 3, 3
    position.move(6, [rollouts(), rollouts()])
    with resume.completing(tmp_path):
        (tmp_path / "checkpoint-3").mkdir()
        bare.state.save_to_json(str(tmp_path / "checkpoint-3" / "trainer_state.json"))
        assert resume.chosen(True) is True  # none is complete yet
    trained = {name: p.detach().clone() for name, p in bare.model.named_parameters() if p.requires_grad}
    displace({name: p for name, p in bare.model.named_parameters() if p.requires_grad}, 1.0)
    position.move(0, None)

    checkpoint = resume.chosen(True)
    assert checkpoint == str(tmp_path / "checkpoint-3")
    resume.restore(checkpoint)
    assert (position.micro_batch, position.step_begin[0]) == (6, 6)
    assert torch.equal(position.rollouts[1]["completion_ids"], rollouts()["completion_ids"])
    assert load_policy(tmp_path / "checkpoint-3", bare.model) is not None
    assert all(torch.equal(p, trained[name]) for name, p in bare.model.named_parameters() if p.requires_grad)
