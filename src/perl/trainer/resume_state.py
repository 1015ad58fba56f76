"""ResumeState: checkpoints that are complete, or do not count, and from which training resumes bit for bit.

checkpoint -> the policy, the reference, the counters and the rollouts, as they were
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from perl.errors import ModelError
from perl.methods.hooks import hooks_of
from perl.policy.checkpoint import (
    latest_checkpoint,
    load_trainer_state,
    reference_of,
    save_policy,
    save_trainer_state,
    seal,
    unseal,
)
from perl.policy.reference import Reference
from perl.trainer.live import LiveTrainer, Position

logger = logging.getLogger("perl")


class ResumeState:
    """What a checkpoint holds beside transformers' files: TRL forgets its counter and rollouts that are not used up."""

    def __init__(
        self, live: LiveTrainer, position: Position, reference: Reference | None, *, whole_tensors: bool
    ) -> None:
        """Takes what a checkpoint is of.

        Args:
            live: The training.
            position: Where it is among its micro-batches.
            reference: What the KL divergence is measured against; None: the loss has no such term.
            whole_tensors: Whether each process holds the whole of each tensor.
        """
        self._live, self._position, self._reference = live, position, reference
        self._whole_tensors = whole_tensors
        self._warned_of_pushes = False

    def chosen(self, asked: str | bool | None) -> str | bool | None:
        """The checkpoint to resume from; for True the newest *complete* one in ``output_dir``, if there is one."""
        if asked is not True:
            return asked
        return str(latest_checkpoint(Path(self._live.args.output_dir)) or "") or True

    def finished(self, checkpoint: str | bool | None) -> TrainerState | None:
        """The state of a checkpoint of the last step; None if there are steps left to take."""
        if not isinstance(checkpoint, str):
            return None
        state_file = Path(checkpoint) / TRAINER_STATE_NAME
        if not state_file.is_file():
            return None
        state = TrainerState.load_from_json(str(state_file))
        steps = self._live.args.max_steps
        return None if state.global_step < (steps if steps > 0 else state.max_steps) else state

    def finish(self) -> TrainOutput:
        """What ``train`` returns where no step is left; the method is then finished as after a last step."""
        hooks_of(self._live.policy).after_training(self._live.policy)
        return TrainOutput(self._live.state.global_step, math.nan, {})

    def restore(self, checkpoint: str | bool | None) -> None:
        """Puts TRL's counter and rollouts back, before the first step."""
        if isinstance(checkpoint, str):
            args = self._live.args
            counters, rollouts = load_trainer_state(Path(checkpoint), args.process_index, args.device)
            self._position.move(counters.get("micro_step", self._position.micro_batch), rollouts)
        self._position.begin_step()

    def keep_last_step(self, save: Callable[[], None]) -> None:
        """Has a checkpoint of the last whole step written, if it has none, after an error that ended the next one.

        Only for errors that all processes raise at the same place, before anything of the next step is trained on.
        """
        step = self._live.state.global_step
        kept = (Path(self._live.args.output_dir) / f"checkpoint-{step}").is_dir()
        self._live.accelerator.wait_for_everyone()  # one would find what another has begun to write
        if step == 0 or kept:
            return
        self._position.return_to_step_begin()
        save()

    @contextlib.contextmanager
    def completing(self, folder: Path) -> Iterator[None]:
        """Adds to what transformers writes as a checkpoint meanwhile, seals it, and only then deletes older ones.

        Args:
            folder: Of the checkpoints.
        """
        args, state = self._live.args, self._live.state
        checkpoint = folder / f"checkpoint-{state.global_step}"
        if args.should_save:
            unseal(checkpoint)
        yield
        if args.should_save and self._whole_tensors:
            reference = self._reference
            snapshot = {} if reference is None or reference.is_the_base else reference.snapshot  # a base is made anew
            save_policy(checkpoint, self._live.policy, snapshot, "" if reference is None else reference.spec)
        counters = {"micro_step": self._position.micro_batch}
        save_trainer_state(checkpoint, counters, self._unused_rollouts(), args.process_index)
        self._live.accelerator.wait_for_everyone()
        if args.should_save:
            seal(checkpoint)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=False,
            )

    def load_reference(self, checkpoint: Path, snapshot: dict[str, torch.Tensor]) -> None:
        """Puts the reference back. The base and the policy at the start, this process has found again by itself.

        Raises:
            ModelError: The reference moves along and the checkpoint does not hold it.
        """
        reference = self._reference
        if reference is None or reference.is_the_base:
            return
        written = reference_of(checkpoint)
        if written == reference.spec:
            reference.load(snapshot)
        elif reference.every is not None:
            was = f"was written with the reference {written}" if written else "does not say what its reference was"
            raise ModelError(
                f"{checkpoint} {was}, so that {reference.spec} cannot go on from it",
                "train.reference",
                f"resume with {written or 'base'}, or start anew",
            )

    def warn_of_pushes(self) -> None:
        """Warns, once, that checkpoints stay here."""
        if not self._warned_of_pushes:
            self._warned_of_pushes = True
            logger.warning("checkpoints are not pushed while a script trains; trainer.push_to_hub() pushes")

    def _unused_rollouts(self) -> list[dict[str, Any]] | None:
        """The current generation batch, if later steps still train on it.

        Rows with images hold more than tensors; a run that resumes among those generates them anew.
        """
        args, rollouts = self._live.args, self._position.rollouts
        used_up = self._position.micro_batch % (args.steps_per_generation * args.num_iterations) == 0
        if used_up or rollouts is None:
            return None
        plain = all(isinstance(value, torch.Tensor) for batch in rollouts for value in batch.values())
        return rollouts if plain else None
