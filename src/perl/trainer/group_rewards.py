"""What a generation batch is trained on: rollouts with rewards, advantages and log-probs; what is logged of rewards.

examples -> TRL's rollouts and rewards -> selected groups -> advantages, log-probs, metrics
rollouts with old log-probs and advantages, of all processes -> a mask of tokens that the loss treats apart

Clip-Cov and KL-Cov select tokens once for each batch, over those of all processes. The mask stays with the rollouts, as
the old policy's log-probs do: no division into micro-batches changes it, every update of the batch has the same one,
and a checkpoint holds it.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.advantages import (
    left_out,
    nan_std,
    normalized_sum_advantages,
    partly_scored,
    penalised_returns,
    weighted_rewards,
    whitened,
)
from perl.algorithms.covariance import CovarianceSettings, covariances, drawn, highest
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import off_reward
from perl.algorithms.registry import LOSSES, Selection, function_at
from perl.errors import RecipeError, RewardError, warn
from perl.packing.micro_batches import SAMPLED_STEP, SELECTED, STEPS_BEHIND
from perl.trainer.arguments import shown_to_trl
from perl.trainer.arguments.config import own_setting
from perl.trainer.live import LiveTrainer, generation_interval, mode_of
from perl.trainer.overrides import is_replaced, received
from perl.trainer.prompts.refill import Examples, Rollouts
from perl.trainer.sampling.generation import generates_by_itself
from perl.trainer.sampling.given_rewards import checked_reward
from perl.trainer.sampling.greedy_baseline import greedy_rewards

SELECTED_AT = "selected_at_step"
"""The optimizer steps taken when tokens were selected, of a loss whose selected tokens have a gradient of their own."""
COVARIANCE, SHARE = "cov/mean", "cov/selected_fraction"
"""Covariance of log-probability and advantage over the tokens of a generation batch; share that is selected."""


class GroupRewards:
    """Makes advantages of a trainer's rewards: exactly 0 in a group whose rewards agree, which TRL's are not.

    Attributes:
        estimator: The row of what compares rewards.
        penalised: Whether the KL divergence is taken off the rewards.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        """Takes the trainer, before its other parts are made."""
        self._trainer, self._warns = trainer, trainer.accelerator.is_main_process
        self._scored: dict[str, int] = {}
        self.estimator = ADVANTAGES[own_setting(trainer.args, "advantage_estimator")]
        self.penalised = off_reward(vars(trainer.args))

    def complete(self, output: dict[str, Any], rewards_NK: torch.Tensor, rows: int) -> None:
        """Gives rollouts our advantages and log-probabilities, in the order in which one needs the other.

        Advantages say which rows need log-probabilities; a KL penalty in the rewards needs those of every row first.
        Tokens are selected by both.

        Args:
            output: Rollouts of this process as TRL makes them.
            rewards_NK: Of all processes; NaN where a function gave None.
            rows: Of this process.

        Raises:
            RewardError: A reward is infinite; or negative, and the estimator has no meaning for that.
        """
        trainer = self._trainer
        if self.penalised:
            trainer.add_log_probs(output)
        self.put_advantages(output, rewards_NK, rows)
        if not self.penalised:
            trainer.add_log_probs(output)
        select_tokens(trainer, output)
        if trainer.model.training:
            trainer.optimizer_step.gaps.begin(output, trainer.num_generations)

    def put_advantages(self, output: dict[str, Any], rewards_NK: torch.Tensor, rows: int) -> None:
        """Puts our advantages in the place of TRL's: into rollouts, of so many rows, and into the log."""
        trainer, estimator = self._trainer, self.estimator
        generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        rewards_PGK = rewards_NK.view(-1, generations, rewards_NK.size(1))
        weights_K: torch.Tensor = trainer.reward_weights.to(rewards_NK.device)
        metrics, mask_NT = trainer._metrics[mode_of(trainer.model)], _mask(output)
        lengths_PG = greedy_PG = penalties_PG = None
        if "lengths_PG" in estimator.reads:  # of all processes, as the rewards are
            lengths_PG = trainer.accelerator.gather(mask_NT.sum(dim=1)).view(-1, generations)
        if "greedy_PG" in estimator.reads:
            source = trainer.rollout_source
            greedy_PGK = greedy_rewards(trainer, source, source.inputs).view_as(rewards_PGK)
            greedy_PG = weighted_rewards(greedy_PGK, weights_K)
            metrics["reward/greedy"].append(greedy_PG.nanmean().item())
            metrics["rows/without_baseline"].append(greedy_PG.isnan().float().mean().item())
        divergences_NT = torch.zeros(())
        if self.penalised:
            divergences_NT = output["old_per_token_logps"] - output["ref_per_token_logps"]
            sums = torch.stack([(divergences_NT * mask_NT).sum(), mask_NT.sum().float()])
            added, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
            metrics["kl"].append(added / max(count, 1.0))
            if estimator.penalty == "completion":
                sums_n = trainer.beta * (divergences_NT * mask_NT).sum(dim=1)
                penalties_PG = trainer.accelerator.gather(sums_n).view(-1, generations)
        facts = {"scale": trainer.scale_rewards, "lengths_PG": lengths_PG, "greedy_PG": greedy_PG}
        advantages_N = self._advantages(rewards_PGK, weights_K, {**facts, "penalties_PG": penalties_PG})
        own = slice(trainer.accelerator.process_index * rows, (trainer.accelerator.process_index + 1) * rows)
        output["advantages"] = advantages_N[own]
        if estimator.critic or (self.penalised and penalties_PG is None):
            rewards_N = self._before_kl(weighted_rewards(rewards_PGK, weights_K), greedy_PG, advantages_N)[own]
            if estimator.critic:
                trainer.critic_training.complete(output, rewards_N, trainer.beta * divergences_NT)
                return
            # The divergence is taken off token by token.
            returns_NT = penalised_returns(rewards_N, divergences_NT, mask_NT, trainer.beta)
            total, white = partial(trainer.accelerator.reduce, reduction="sum"), estimator.penalty == "whitened"
            output["advantages"] = whitened(returns_NT, mask_NT, total) if white else left_out(returns_NT, mask_NT)
        elif not is_replaced(trainer, "_generate_and_score_completions"):  # a subclass may change advantages yet
            output["largest_advantage"] = advantages_N.abs().max()

    def _before_kl(
        self, rewards_PG: torch.Tensor, greedy_PG: torch.Tensor | None, advantages_N: torch.Tensor
    ) -> torch.Tensor:
        """(N,) what a KL penalty of tokens is taken off, of all processes; NaN without a reward, or a baseline's."""
        if self.estimator.before_kl:
            differences_PG: torch.Tensor = function_at(self.estimator.before_kl)(rewards_PG)
            return differences_PG.flatten()
        missing_PG = rewards_PG.isnan() if greedy_PG is None else rewards_PG.isnan() | greedy_PG.isnan()
        return advantages_N.masked_fill(missing_PG.flatten(), torch.nan)

    def _advantages(self, rewards_PGK: torch.Tensor, weights_K: torch.Tensor, facts: dict[str, Any]) -> torch.Tensor:
        """(N,) advantages over all processes, from rewards of P prompts, G completions each, by K functions.

        Args:
            rewards_PGK: NaN where a function gave None.
            weights_K: Of the functions.
            facts: What estimators read besides: how advantages are scaled, tokens of each completion that are in the
                loss, rewards of the greedy completion of each completion's prompt; ``penalties_PG``, what is taken off
                the reward of each completion before rewards are compared, and is not logged.
        """
        metrics = self._trainer._metrics[mode_of(self._trainer.model)]
        infinite_K = rewards_PGK.isinf().flatten(end_dim=1).any(dim=0)
        if bool(infinite_K.any()):  # every process sees the same
            what = "returned inf, which is not finite"
            raise RewardError(what, f"reward {self._named(infinite_K)}", "a number, or None: no reward")
        if self._trainer.multi_objective_aggregation == "normalize_then_sum":
            of_rewards_N = advantages_N = normalized_sum_advantages(rewards_PGK, weights_K).flatten()
        else:
            rewards_PG = weighted_rewards(rewards_PGK, weights_K)
            self._check_signs(rewards_PG, rewards_PGK * weights_K)
            read = {name: facts[name] for name in self.estimator.reads}
            of_rewards_N = advantages_N = function_at(self.estimator.function)(rewards_PG, **read).flatten()
            if facts["penalties_PG"] is not None:
                left_PG = rewards_PG - facts["penalties_PG"]
                advantages_N = function_at(self.estimator.function)(left_PG, **read).flatten()
        self._log_unscored(rewards_PGK, weights_K, metrics)
        # TRL's takes equal rewards that are not dyadic, and groups without a reward, for different ones.
        flat_P = (of_rewards_N.view(rewards_PGK.shape[:2]) == 0).all(dim=1)
        metrics["frac_reward_zero_std"][-1] = flat_P.float().mean().item()
        logged = self._trainer._logs["advantages"]
        for _ in range(min(len(advantages_N), len(logged))):
            logged.pop()
        logged.extend(advantages_N.tolist())
        return advantages_N

    def _named(self, which_K: torch.Tensor) -> str:
        """The names of some reward functions."""
        return ", ".join(name for name, is_one in zip(self._trainer.reward_func_names, which_K, strict=True) if is_one)

    def _check_signs(self, rewards_PG: torch.Tensor, weighted_PGK: torch.Tensor) -> None:
        """Refuses negative rewards where the estimator divides by their mean; every process sees the same."""
        negative_PG = rewards_PG < 0
        if not self.estimator.not_negative or not bool(negative_PG.any()):
            return
        to_blame_K = ((weighted_PGK < 0) & negative_PG.unsqueeze(2)).flatten(end_dim=1).any(dim=0)
        what = f"gave a completion a reward of {rewards_PG[negative_PG].min().item():g} after weighting, and "
        what += f"{self.estimator.name} divides by the mean of a group's rewards"
        hint = "rewards that are not negative, or advantage_estimator: rloo"
        raise RewardError(what, f"reward {self._named(to_blame_K)}", hint)

    @contextlib.contextmanager
    def counting_rows(self, metrics: dict[str, list[float]], rows: int) -> Iterator[None]:
        """Has each metric of an evaluation batch as often as the batch has rows, a reward's as often as it has rewards.

        Args:
            metrics: Gets those of the batch meanwhile.
            rows: Of the batch.
        """
        before, self._scored = {name: len(values) for name, values in metrics.items()}, {}
        yield
        for name, values in metrics.items():
            values[before.get(name, 0) :] *= self._scored.get(name, rows)

    def _log_unscored(
        self, rewards_PGK: torch.Tensor, weights_K: torch.Tensor, metrics: dict[str, list[float]]
    ) -> None:
        """Logs how many rows have no reward; TRL's "reward" also sums up what is known of those."""
        rewards_PG, names = weighted_rewards(rewards_PGK, weights_K), self._trainer.reward_func_names
        metrics["rows/unscored"].append(float(rewards_PG.isnan().sum()))
        counts_K = (~rewards_PGK.isnan()).sum(dim=(0, 1)).tolist()
        by_name = [("reward", int((~rewards_PG.isnan()).sum()))]
        by_name += [(f"rewards/{name}/mean", count) for name, count in zip(names, counts_K, strict=True)]
        self._scored = dict(by_name)
        if rewards_PG.isnan().any():
            metrics["reward"][-1] = rewards_PG.nanmean().item()
            metrics["reward_std"][-1] = nan_std(rewards_PG.view(1, -1)).item()
        partly_PGK = partly_scored(rewards_PGK)
        if not self._warns or not partly_PGK.any():
            return
        self._warns = False
        warn(
            "PRL335",
            "%s gave None for some completions of a group: they have no reward and are not trained on, %d of %d "
            "(logged as rows/unscored)",
            self._named(partly_PGK.flatten(end_dim=1).any(dim=0)),
            int(partly_PGK.any(dim=2).sum()),
            rewards_PG.numel(),
        )


def _mask(output: Mapping[str, Any]) -> torch.Tensor:
    """(N, T) 1 for the tokens that count."""
    mask_NT: torch.Tensor = output["completion_mask"] * output.get("tool_mask", 1)
    return mask_NT


def latest_group(logs: Mapping[str, Any], generations: int, gaps: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest logged completions of one prompt, of TRL's table of completions; with tokens and gaps where known."""
    return [
        {
            "prompt": logs["prompt"][i],
            "completion": logs["completion"][i],
            "rewards": {name: values[i] for name, values in logs["rewards"].items()},
            "advantage": logs["advantages"][i],
            **{name: values[i] for name, values in logs["extra"].items() if len(values) > i},
            **gaps.get(i, {}),
        }
        for i in range(min(generations, len(logs["prompt"])))
    ]


def means_of(metrics: dict[str, list[float]], prefix: str) -> dict[str, float | None]:
    """The metrics of an evaluation under its name, None where no row has one; takes them out of what is logged next.

    Args:
        metrics: As :meth:`GroupRewards.counting_rows` leaves them.
        prefix: ``eval``, or that with the name of one of several sets.
    """
    ends = {"min_length": min, "min_terminated_length": min, "max_length": max, "max_terminated_length": max}
    found = {}
    for name, values in metrics.items():
        valid = [value for value in values if not math.isnan(value)]
        summary = ends.get(name.rpartition("/")[2], statistics.fmean)
        found[f"{prefix}_{name}"] = summary(valid) if valid else None
    metrics.clear()
    return found


def scored_rollouts(trainer: GRPOTrainer, inputs: Examples, theirs: Callable[[Examples], Rollouts]) -> Rollouts:
    """A generation batch, or a batch of an evaluation.

    Args:
        trainer: Whose.
        inputs: The examples of this process, one for each completion.
        theirs: TRL's own rollouts of examples.
    """
    replaced = not trainer.rollout_source.is_served and generates_by_itself(trainer.policy)
    if replaced and trainer._group_rewards.estimator.writes_greedy:
        what = "a generate that a script has put on the model writes no likeliest completion"
        raise RecipeError(what, "advantage_estimator", "rloo, which compares with the other completions")
    rollouts, rewards_NK = _made(trainer, inputs, theirs)
    if trainer.model.training and trainer.prompt_selection is not None:

        def sample(examples: Examples) -> tuple[Rollouts, torch.Tensor]:
            with trainer.rollout_source.out_of_turn():
                return _made(trainer, examples, theirs)

        batch = trainer.prompt_selection.selected(inputs, rollouts, rewards_NK, sample)
        inputs, rollouts, rewards_NK = batch.inputs, batch.rollouts, batch.rewards_NK
        trainer.rollout_source.inputs = inputs
    trainer._group_rewards.complete(rollouts, rewards_NK, len(inputs))
    if trainer.model.training and trainer.prompt_selection is not None:
        trainer.prompt_selection.log_first()
    if trainer.optimizer_step.teaching is not None:
        trainer.optimizer_step.teaching.add_prompts(inputs, rollouts)
    if trainer.model.training and trainer.rollout_source.is_served:
        rollouts[STEPS_BEHIND] = torch.tensor(trainer.rollout_source.steps_behind)
    return rollouts


def _made(
    trainer: GRPOTrainer, inputs: Examples, theirs: Callable[[Examples], Rollouts]
) -> tuple[Rollouts, torch.Tensor]:
    """Rollouts of this process as TRL makes them, without log-probs of ours; the rewards of all processes."""
    trainer.rollout_source.inputs = inputs
    compared = trainer.model.training and not trainer.step_is_ours and trainer.correction is not None  # by TRL
    named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    checked = [checked_reward(function, name) for function, name in named]
    conversations = trainer.conversations
    conversations.begin()
    with (
        shown_to_trl.for_rollouts(trainer, checked, ours=trainer.step_is_ours),
        received(trainer, "_generate_single_turn", conversations.note),
        received(trainer, "_calculate_rewards") as rewards,
    ):
        made = trainer._rollout_check.judged(lambda: theirs(inputs)) if compared else theirs(inputs)
    conversations.check(made)
    if trainer.model.training and trainer.rollout_source.is_served:
        made[SAMPLED_STEP] = trainer.rollout_source.token_steps.column(
            made["completion_ids"], trainer.state.global_step
        )
    return made, conversations.without_void(rewards[-1])


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
    return bool(trainer._group_rewards.penalised or (ours and (not _one_update(args) or asked)))


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
    args, accelerator, mask_NT = trainer.args, trainer.accelerator, _mask(output)
    first, step = accelerator.process_index * len(mask_NT), trainer.state.global_step
    total = partial(accelerator.reduce, reduction="sum")
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
