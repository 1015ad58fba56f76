"""Rollouts with rewards, advantages and log-probs: what a generation batch is trained on.

examples -> TRL's rollouts and rewards -> selected groups -> advantages, log-probs
"""

from collections.abc import Callable

import torch
from trl import GRPOTrainer

from perl.packing.micro_batches import SAMPLED_STEP, STEPS_BEHIND
from perl.trainer import shown_to_trl
from perl.trainer.group_rewards import complete
from perl.trainer.overrides import received
from perl.trainer.prompts.refill import Examples, Rollouts


def scored_rollouts(trainer: GRPOTrainer, inputs: Examples, theirs: Callable[[Examples], Rollouts]) -> Rollouts:
    """A generation batch, or a batch of an evaluation.

    Args:
        trainer: Whose.
        inputs: The examples of this process, one for each completion.
        theirs: TRL's own rollouts of examples.
    """
    rollouts, rewards_NK = _made(trainer, inputs, theirs)
    if trainer.model.training and trainer.prompt_selection is not None:

        def sample(examples: Examples) -> tuple[Rollouts, torch.Tensor]:
            with trainer.rollout_source.out_of_turn():
                return _made(trainer, examples, theirs)

        batch = trainer.prompt_selection.selected(inputs, rollouts, rewards_NK, sample)
        inputs, rollouts, rewards_NK = batch.inputs, batch.rollouts, batch.rewards_NK
        trainer.rollout_source.inputs = inputs
    complete(trainer, trainer._group_rewards, rollouts, rewards_NK, len(inputs))
    if trainer.model.training and trainer.prompt_selection is not None:
        trainer.prompt_selection.log_first()
    trainer.optimizer_step.add_prompts(inputs, rollouts)
    if trainer.model.training and trainer.rollout_source.is_served:
        rollouts[STEPS_BEHIND] = torch.tensor(trainer.rollout_source.steps_behind)
    return rollouts


def _made(
    trainer: GRPOTrainer, inputs: Examples, theirs: Callable[[Examples], Rollouts]
) -> tuple[Rollouts, torch.Tensor]:
    """Rollouts of this process as TRL makes them, without log-probs of ours; the rewards of all processes."""
    trainer.rollout_source.inputs = inputs
    compared = trainer.model.training and not trainer.step_is_ours and trainer.correction is not None  # by TRL
    with (
        shown_to_trl.for_rollouts(trainer, ours=trainer.step_is_ours),
        received(trainer, "_calculate_rewards") as rewards,
    ):
        made = trainer._rollout_check.judged(lambda: theirs(inputs)) if compared else theirs(inputs)
    if trainer.model.training and trainer.rollout_source.is_served:
        made[SAMPLED_STEP] = trainer.rollout_source.token_steps.column(
            made["completion_ids"], trainer.state.global_step
        )
    return made, rewards[-1]
