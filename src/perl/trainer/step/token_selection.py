"""Which tokens of a generation batch a loss treats apart: Clip-Cov's and KL-Cov's, chosen once for each batch.

rollouts with old log-probs and advantages, of all processes -> a mask beside the rollouts, metrics

The choice is over the tokens of all processes and stays with the rollouts, as the old policy's log-probs do: no
division into micro-batches changes it, every update of the batch has the same one, and a checkpoint holds it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.covariance import CovarianceSettings, covariances, drawn, highest
from perl.algorithms.kl_place import off_reward
from perl.algorithms.registry import LOSSES, Selection, function_at
from perl.errors import warn
from perl.packing.micro_batches import SELECTED
from perl.trainer.arguments.config import own_setting
from perl.trainer.live import LiveTrainer, generation_interval

SELECTED_AT = "selected_at_step"
"""The optimizer steps taken when tokens were selected, of a loss whose selected tokens have a gradient of their own."""
COVARIANCE, SHARE = "cov/mean", "cov/selected_fraction"
"""Covariance of log-probability and advantage over the tokens of a generation batch; share that is selected."""


def selection_of(args: GRPOConfig) -> Selection | None:
    """How the loss of a training selects tokens; None: it treats all alike, or is not in the table."""
    row = LOSSES.get(args.loss_type)
    return None if row is None else row.selection


def reads_old(trainer: GRPOTrainer) -> bool:
    """Whether the loss, or the reward, reads the old policy's log-probs: else the optimizer step has them itself.

    An update lies between the rollout and the loss, or they are requested.
    """
    args, ours = trainer.args, (trainer.step_is_ours or trainer.loss_is_ours) and trainer.model.training
    asked = trainer.correction is not None and not own_setting(args, "reuse_old_log_probs")
    return bool(off_reward(vars(args)) or (ours and (not _one_update(args) or asked)))


def selects(trainer: GRPOTrainer) -> bool:
    """Whether tokens of the rollouts that are made now are selected."""
    return bool(
        (trainer.step_is_ours or trainer.loss_is_ours)
        and trainer.model.training
        and selection_of(trainer.args) is not None
    )


def select_tokens(trainer: GRPOTrainer, output: dict[str, Any]) -> None:
    """Gives rollouts the mask of their selected tokens, if the loss has any; logs how many, of all processes.

    Args:
        trainer: Whose rollouts; every process must ask.
        output: Rollouts of this process, with advantages and the old policy's log-probs of every row; the latter are
            taken out where nothing else reads them.
    """
    selection = selection_of(trainer.args)
    if selection is None or not selects(trainer):
        return
    args, accelerator, mask_NT = (
        trainer.args,
        trainer.accelerator,
        output["completion_mask"] * output.get("tool_mask", 1),
    )
    first, step = accelerator.process_index * len(mask_NT), trainer.state.global_step

    def total(sums: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = accelerator.reduce(sums, reduction="sum")
        return added

    settings = CovarianceSettings(*(own_setting(args, f"cov_{name}") for name in ("fraction", "low", "high")))
    advantages = output["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    found_NT, tokens = covariances(output["old_per_token_logps"], advantages, mask_NT, total)
    ranks_NT = function_at(selection.ranks)(found_NT, lambda: drawn(mask_NT.shape, first, args.seed, step), settings)
    ranks_NT = ranks_NT.masked_fill(~mask_NT.bool(), -torch.inf)
    output[SELECTED] = highest(ranks_NT, settings.count(tokens), first, accelerator.gather)
    if selection.acts:
        output[SELECTED_AT] = torch.tensor(step, device=mask_NT.device)
    sums = total(torch.stack([found_NT.sum(), output[SELECTED].sum().double()])) / max(tokens, 1)
    for name, value in zip((COVARIANCE, SHARE), sums.tolist(), strict=True):
        trainer._metrics["train"][name].append(value)
    if not reads_old(trainer):
        del output["old_per_token_logps"]


def acting(batches: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Micro-batches with those selected tokens alone that have a gradient of their own in this optimizer step.

    In the first update after its rollouts a batch has none: the policy is the old one. Two passes differ by rounding,
    though, and abs(log r) has a gradient as large for that as for any other difference; it would depend on the division
    into micro-batches.

    Args:
        batches: As TRL prepares them.
        step: Optimizer steps taken.
    """
    return [
        {**batch, SELECTED: torch.zeros_like(batch[SELECTED])}
        if SELECTED_AT in batch and int(batch[SELECTED_AT]) == step
        else batch
        for batch in batches
    ]


def warn_without_second_update(live: LiveTrainer) -> None:
    """Warns where what is done to selected tokens can have no effect."""
    selection = selection_of(live.args)
    if selection is not None and selection.acts and _one_update(live.args) and live.accelerator.is_main_process:
        warn(
            "PRL319",
            "%s has no effect with a single update per batch, before which no token has moved: set num_iterations, or "
            "steps_per_generation above gradient_accumulation_steps",
            live.args.loss_type,
        )


def _one_update(args: GRPOConfig) -> bool:
    """Whether no update lies between rollouts and any of their losses."""
    return bool(args.gradient_accumulation_steps % generation_interval(args) == 0)
