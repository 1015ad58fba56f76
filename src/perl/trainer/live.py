"""What the trainer's parts read of it while it runs, and the one writer of TRL's counter of micro-batches.

PeftGRPOTrainer -> the values that change while it runs, its position
"""

import math
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from transformers import TrainerState
from trl import GRPOConfig

from perl.algorithms.importance import SamplingCorrection
from perl.packing.micro_batches import MicroBatch

Mode = Literal["train", "eval"]


class LiveTrainer(Protocol):
    """The values of a trainer that change while it runs. The parts read these, and nothing else of it.

    Attributes:
        args: Its arguments.
        accelerator: What connects the processes.
        model: The policy; wrapped, where DDP has wrapped it.
        policy: The model with its adapter, without the wrappers of distributed training.
        state: Optimizer steps taken and to take; ``train`` replaces it.
        whole_tensors: Whether this process holds the whole of each tensor.
        correction: For an engine that samples from other numbers, if there is one.
        current_gradient_accumulation_steps: Micro-batches in the current optimizer step.
        aux_loss_enabled: Whether the loss of a model's routers is added, ``router_aux_loss_coef`` times.
    """

    args: GRPOConfig
    accelerator: Accelerator
    model: torch.nn.Module
    policy: torch.nn.Module
    state: TrainerState
    whole_tensors: bool
    correction: SamplingCorrection | None
    current_gradient_accumulation_steps: int
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    _metrics: dict[Mode, dict[str, list[float]]]  # of the entry that is logged next
    _step: int  # micro-batches that were trained on
    _buffered_inputs: list[dict[str, Any]] | None  # the generation batch, cut into micro-batches

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:  # noqa: ANN401 (TRL's)
        """Makes a micro-batch of what the data loader gives."""

    def run_micro_batch(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Transformers' forward and backward pass of one micro-batch of ours; returns its loss."""


class Position:
    """Where a training is among its micro-batches. Beside TRL itself nothing else writes its counter.

    Attributes:
        step_begin: The counter and the rollouts at the begin of the current optimizer step.
    """

    def __init__(self, counted: LiveTrainer) -> None:
        """Takes what TRL counts in."""
        self._counted = counted
        self.begin_step()

    @property
    def micro_batch(self) -> int:
        """Micro-batches that were trained on."""
        return self._counted._step

    @property
    def rollouts(self) -> list[dict[str, Any]] | None:
        """The generation batch that is trained on, cut into micro-batches; None: new rollouts come next."""
        return self._counted._buffered_inputs

    @property
    def trained_on(self) -> list[dict[str, Any]]:
        """The micro-batches of the current optimizer step that are behind it, as far as they are still there."""
        rollouts = self.rollouts or []
        return [rollouts[i % len(rollouts)] for i in range(self.step_begin[0], self.micro_batch) if rollouts]

    @property
    def rollouts_due(self) -> bool:
        """Whether new rollouts come with the next micro-batch."""
        return self.rollouts is None or self.micro_batch % generation_interval(self._counted.args) == 0

    @property
    def at_step_begin(self) -> bool:
        """Whether the next micro-batch is the first of its optimizer step."""
        return self.micro_batch == self.step_begin[0]

    def move(self, micro_batch: int, rollouts: list[dict[str, Any]] | None) -> None:
        """Goes to another place."""
        self._counted._step, self._counted._buffered_inputs = micro_batch, rollouts

    def advance(self) -> None:
        """One micro-batch further."""
        self.move(self.micro_batch + 1, self.rollouts)

    def to_next_rollouts(self) -> None:
        """Goes to where new rollouts come next."""
        each = generation_interval(self._counted.args)
        self.move(-(-self.micro_batch // each) * each, None)

    def begin_step(self) -> None:
        """An optimizer step begins here."""
        self.step_begin = self.micro_batch, self.rollouts

    def return_to_step_begin(self) -> None:
        """Goes back to where the optimizer step began."""
        self.move(*self.step_begin)

    def forget_rollouts(self) -> None:
        """The rollouts that the optimizer step began with are not to be trained on."""
        self.step_begin = self.step_begin[0], None


def generation_interval(args: GRPOConfig) -> int:
    """Micro-batches between two generation batches: all that one batch is cut into, as often as it is trained on."""
    return int(args.steps_per_generation * args.num_iterations)


def updates_of_a_batch(interval: int, accumulation: int) -> int:
    """Optimizer steps that train on one generation batch, at most.

    Args:
        interval: Micro-batches between two generation batches.
        accumulation: Micro-batches of an optimizer step.
    """
    begins = range(0, math.lcm(interval, accumulation), interval)
    return max((begin + interval - 1) // accumulation - begin // accumulation + 1 for begin in begins)


def mode_of(model: torch.nn.Module) -> Mode:
    """Under which name TRL logs: of training or of evaluation."""
    return "train" if model.training else "eval"


def most(accelerator: Accelerator, count: int) -> int:
    """The largest of all processes' numbers."""
    if accelerator.num_processes == 1:
        return count
    return int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())
