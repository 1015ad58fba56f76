"""ResumableGRPOTrainer: TRL's GRPOTrainer whose checkpoints are complete and resume bit for bit.

checkpoint -> the policy, the reference, the counters and the rollouts, as they were

One of the six modules that know TRL's and transformers' private methods (with trainer.py, step.py, served.py and
packed.py); each override says which method it replaces and why. Knows nothing of methods, rewards or losses.
"""

import logging
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import HubStrategy, TrainOutput, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from perl.errors import ModelError
from perl.methods import adalora
from perl.policy.checkpoint import (
    latest_checkpoint,
    load_policy,
    load_trainer_state,
    reference_of,
    save_policy,
    save_trainer_state,
    seal,
    unseal,
)
from perl.policy.model import base_identity
from perl.policy.reference import Reference
from perl.policy.save_adapter import write_adapter_files
from perl.policy.sharding import strategy_of
from perl.trainer.prompt_order import ResumableRepeatSampler

logger = logging.getLogger("perl")


class ResumableGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with checkpoints that another process can go on from as if nothing had happened.

    Attributes:
        reference: What the KL divergence is measured against; None if the loss has no such term.
        base_fingerprint: Of the base's weights, once it is known; goes into saved adapters.
    """

    _step: int
    _step_begins_at: tuple[int, Any]
    reference: Reference | None = None
    base_fingerprint: str | None = None
    _said_of_pushes = False

    @property
    def policy(self) -> torch.nn.Module:
        """The model with its adapter, without the wrappers of distributed training."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def whole_tensors(self) -> bool:
        """Whether this process holds the whole of each tensor: not under DeepSpeed or FSDP."""
        return not (self.is_deepspeed_enabled or self.is_fsdp_enabled)

    @cached_property
    def strategy(self) -> str | None:
        """What shards the parameters; None: every process holds the whole of each, as under ZeRO 1 and 2 too."""
        return strategy_of(self.accelerator, self.policy)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:  # noqa: ANN401
        """Trains, from the start or from a checkpoint.

        Replaces ``Trainer.train`` to choose the newest *complete* checkpoint, to restore what TRL forgets (its
        micro-batch counter and rollouts that are not used up), and to take no further step when the checkpoint is the
        last one.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the newest one in ``output_dir``.
            *args: As in transformers.
            **kwargs: As in transformers.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(latest_checkpoint(Path(self.args.output_dir)) or "") or True
        if isinstance(resume_from_checkpoint, str):
            checkpoint = Path(resume_from_checkpoint)
            finished = self._load_if_finished(checkpoint)
            if finished is not None:
                return finished
            counters, window = load_trainer_state(checkpoint, self.args.process_index, self.args.device)
            self._step = counters.get("micro_step", self._step)
            self._buffered_inputs = window
        self._step_begins_at = self._step, self._buffered_inputs
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> "torch.utils.data.Sampler[int]":  # noqa: ANN401
        """Replaces TRL's sampler by one with the same order that can start in any epoch."""
        sampler = super()._get_train_sampler(dataset)
        if type(sampler) is RepeatSampler:
            return ResumableRepeatSampler(sampler, epoch_of=lambda: int(self.state.epoch or 0))
        return sampler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (transformers')
        """Extends ``Trainer.get_batch_samples``, with which each optimizer step begins: remembers where that is."""
        self._step_begins_at = self._step, self._buffered_inputs
        return super().get_batch_samples(*args, **kwargs)

    def keep_last_step(self) -> None:
        """Writes a checkpoint of the last whole step, if it has none, after an error that ended the next one.

        Only for errors that all processes raise at the same place, before anything of the next step is trained on.
        """
        step = self.state.global_step
        kept = (Path(self.args.output_dir) / f"checkpoint-{step}").is_dir()
        self.accelerator.wait_for_everyone()  # one would find what another has begun to write
        if step == 0 or kept:
            return
        self._step, self._buffered_inputs = self._step_begins_at
        self._save_checkpoint(self.model, trial=None)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:  # noqa: ANN401
        """Extends Trainer's checkpoint: adds what TRL forgets, seals it, and only then deletes older ones."""
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            unseal(checkpoint)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save and self.whole_tensors:
            spec = self.reference.spec if self.reference is not None else ""
            save_policy(checkpoint, self.policy, self._reference_to_keep(), spec)
        save_trainer_state(checkpoint, {"micro_step": self._step}, self._unused_rollouts(), self.args.process_index)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(checkpoint)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,
            )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Replaces ``Trainer._save`` for adapters: what plain PEFT loads on the pristine base, and no pickles."""
        folder = Path(output_dir or self.args.output_dir)
        if not isinstance(self.policy, PeftModel) or not self.whole_tensors:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            write_adapter_files(self.policy, folder, *base_identity(self.policy), self.base_fingerprint)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        if self.args.should_save:
            self.write_card(folder)  # in the place of PEFT's, where it has written one

    def write_card(self, folder: Path) -> None:
        """Writes the card that lies beside what was saved; for subclasses, which know more of it."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Replaces ``Trainer._push_from_checkpoint`` for adapters, which sends pickles too: sends nothing.

        ``push_to_hub`` publishes; with a recipe ``hub.push: every_save`` publishes checkpoints too.
        """
        if not isinstance(self.policy, PeftModel):
            super()._push_from_checkpoint(checkpoint_folder)
        elif self.args.hub_strategy != HubStrategy.END and not self._said_of_pushes:
            self._said_of_pushes = True
            logger.warning("checkpoints are not pushed while a script trains; trainer.push_to_hub() pushes")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Replaces ``Trainer._load_from_checkpoint`` for adapters: every tensor as it was, and the reference."""
        snapshot = load_policy(Path(resume_from_checkpoint), self.policy)
        if snapshot is None or not isinstance(self.policy, PeftModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_reference(Path(resume_from_checkpoint), snapshot or {})

    def _load_reference(self, checkpoint: Path, snapshot: dict[str, torch.Tensor]) -> None:
        """Puts the reference back. The base and the policy at the start, this process has found again by itself.

        Raises:
            ModelError: The reference moves along and the checkpoint does not hold it.
        """
        if self.reference is None or self.reference.is_the_base:
            return
        written = reference_of(checkpoint)
        if written == self.reference.spec:
            self.reference.load(snapshot)
        elif self.reference.every is not None:
            was = f"was written with the reference {written}" if written else "does not say what its reference was"
            raise ModelError(
                f"{checkpoint} {was}, so that {self.reference.spec} cannot go on from it",
                "train.reference",
                f"resume with {written or 'base'}, or start anew",
            )

    def _load_best_model(self) -> None:
        """Replaces ``Trainer._load_best_model`` for adapters, as :meth:`_load_from_checkpoint` does."""
        best = Path(self.state.best_model_checkpoint)
        if not isinstance(self.policy, PeftModel) or load_policy(best, self.policy) is None:
            super()._load_best_model()

    def _reference_to_keep(self) -> dict[str, torch.Tensor]:
        """The reference's snapshot for a checkpoint; that of a whole model's base is made anew instead."""
        if self.reference is None or self.reference.is_the_base:
            return {}
        return self.reference.snapshot

    def _unused_rollouts(self) -> list[dict[str, torch.Tensor]] | None:
        """The current generation batch, if later steps still train on it.

        Rows with images hold more than tensors; a run that resumes among those generates them anew.
        """
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        if used_up or self._buffered_inputs is None:
            return None
        plain = all(isinstance(value, torch.Tensor) for batch in self._buffered_inputs for value in batch.values())
        return self._buffered_inputs if plain else None

    def _load_if_finished(self, checkpoint: Path) -> TrainOutput | None:
        """Loads a checkpoint of the last step and returns; None if there are steps left to take."""
        state_file = checkpoint / TRAINER_STATE_NAME
        if not state_file.is_file():
            return None
        state = TrainerState.load_from_json(str(state_file))
        if state.global_step < (self.args.max_steps if self.args.max_steps > 0 else state.max_steps):
            return None
        self._load_from_checkpoint(str(checkpoint))
        adalora.finish(self.policy)
        self.state = state
        return TrainOutput(state.global_step, math.nan, {})
