"""What an adapter needs at each optimizer step, and the proofs that it trains.

trainer events -> the hooks of the method, the rolling reference, guards
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from perl.errors import RecipeError, warn
from perl.methods.hooks import hooks_of
from perl.policy.fingerprint import base_fingerprint, source_fingerprint
from perl.policy.guards import Movement, check_base_unchanged, check_replicas, check_start
from perl.policy.quantised import was_quantised
from perl.run.joint_work import Processes, joined
from perl.trainer.live import most

NOTHING_TRAINED = "nothing was trained: there was no gradient in any"


class AdapterCallback(TrainerCallback):
    """Runs a method's own steps and the guards; the trainer adds it by itself.

    Each process judges what it holds; what one of them finds wrong ends all of them, with its error.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        """Takes the trainer whose policy is trained."""
        self.trainer = trainer
        self.movement: Movement | None = None
        self._processes = Processes()
        self.begun_at = 0
        self._watches = True  # until every tensor has moved, on all processes
        self.weights: str | None = None  # fingerprint of what is in memory; quantised, it is no checkpoint's
        self._started = False
        self.idle = False  # once a training has ended without a gradient in any of its steps

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Prepares the method for the number of steps; proves that the policy starts where it should."""
        self._processes = joined()
        with self._one_verdict():
            policy = self.trainer.policy
            if 0 < state.max_steps <= self._waiting:  # of so many epochs, which nobody knew before
                what = f"the policy waits for {self._waiting} steps, and there are only {state.max_steps}"
                raise RecipeError(what, "critic_warmup_steps", f"fewer than {state.max_steps}")
            hooks_of(policy).before_training(policy, state.max_steps - self._waiting)
            self.movement, self._watches, self.begun_at = Movement(policy), True, state.global_step
            if isinstance(policy, PeftModel):
                if self.trainer.base_fingerprint is None:
                    self.trainer.base_fingerprint = source_fingerprint(policy)
                quantised = was_quantised(policy.get_base_model())
                self.weights = base_fingerprint(policy) if quantised else self.trainer.base_fingerprint
                # A second call of train() goes on with a policy that has left its reference.
                if state.global_step == 0 and not self._started and self.trainer.reference is not None:
                    check_start(policy, self.trainer.reference, must=self.trainer._adapted.starts_as_reference)
        self._compare("before training")
        self._started = True

    @property
    def _waiting(self) -> int:
        """Steps at the begin that are a critic's alone; a method counts those in which its adapter moves."""
        critic = self.trainer.critic_training
        return 0 if critic is None else critic.warmup_steps

    def _compare(self, when: str) -> None:
        """Sees that all processes hold the same policy, and the same critic."""
        if self._processes.count == 1:
            return
        critic = self.trainer.critic_training
        trained = {name: p for name, p in self.trainer.policy.named_parameters() if p.requires_grad}
        beside = {} if critic is None else {f"critic.{name}": p for name, p in critic.critic.tensors.items()}
        check_replicas({**trained, **beside}, when)

    @contextlib.contextmanager
    def _one_verdict(self) -> Iterator[None]:
        """What fails inside on one process fails on all."""
        with self._processes.failing_together():
            yield
        self._processes.meet()

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:  # noqa: ANN401 (transformers')
        """Remembers what is about to move."""
        if self.movement is not None and self._watches:
            self.movement.before_step(optimizer, taught=self.trainer.optimizer_step.teaches)

    def on_optimizer_step(self, _: Any, state: TrainerState, *__: Any, optimizer: Any = None, **___: Any) -> None:  # noqa: ANN401
        """Proves that it moved; runs the method's own step while the gradients are still there."""
        if self.movement is not None and self._watches:
            with self._one_verdict():
                self.movement.after_step(skipped=bool(getattr(optimizer, "step_was_skipped", False)))
            self._watches = bool(most(self.trainer.accelerator, int(not self.movement.proven)))
        step = state.global_step + 1 - self._waiting
        if step > 0:
            hooks_of(self.trainer.policy).after_step(self.trainer.policy, step)

    def on_step_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401
        """Compares the processes' policies; renews a rolling reference."""
        self._compare(f"after step {state.global_step}")
        if self.trainer.reference is not None:
            self.trainer.reference.after_step(self.trainer.policy, state.global_step)

    def on_train_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401
        """Proves that something was trained, and that the base was not touched; the policy is then what is saved."""
        updates = most(self.trainer.accelerator, 0 if self.movement is None else self.movement.updates)
        self.idle, steps = not updates, state.global_step - self.begun_at
        if self.idle and steps and state.is_world_process_zero:
            warn("PRL323", "%s of %d steps", NOTHING_TRAINED, steps)
        with self._one_verdict():
            if self.movement is not None:
                self.movement.at_end()
            hooks_of(self.trainer.policy).after_training(self.trainer.policy)
            if self.weights is not None:
                check_base_unchanged(self.trainer.policy, self.weights)
