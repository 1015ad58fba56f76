"""What a generation batch is trained on: rollouts with rewards, advantages and log-probs; what is logged of rewards.

examples -> TRL's rollouts and rewards -> selected groups -> advantages, log-probs, metrics
"""

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from trl import GRPOTrainer

from perl.algorithms.advantages import (
    left_out,
    nan_std,
    normalized_sum_advantages,
    partly_scored,
    penalised_returns,
    weighted_rewards,
    whitened,
)
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import off_reward
from perl.algorithms.registry import function_at
from perl.errors import RecipeError, RewardError, warn
from perl.packing.micro_batches import SAMPLED_STEP, STEPS_BEHIND
from perl.trainer.arguments import shown_to_trl
from perl.trainer.live import mode_of
from perl.trainer.overrides import is_replaced, received
from perl.trainer.prompts.refill import Examples, Rollouts
from perl.trainer.sampling.generation import generates_by_itself
from perl.trainer.sampling.given_rewards import checked_reward
from perl.trainer.sampling.greedy_baseline import greedy_rewards
from perl.trainer.step.token_selection import select_tokens


class GroupRewards:
    """Makes advantages of rewards: exactly 0 in a group whose rewards agree, which TRL's are not.

    Attributes:
        estimator: The row of what compares rewards.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        estimator: str = "group",
        scale: Literal["group", "batch", "none"],
        aggregation: str,
        warns: bool,
    ) -> None:
        """Takes the reward functions' names, the estimator's, TRL's two arguments, and whether this process warns."""
        self._scored: dict[str, int] = {}
        self._names, self._scale, self._aggregation = names, scale, aggregation
        self.estimator, self._warns = ADVANTAGES[estimator], warns

    def before_kl(
        self,
        rewards_PGK: torch.Tensor,
        weights_K: torch.Tensor,
        advantages_N: torch.Tensor,
        greedy_PGK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(N,) what a KL penalty of tokens is taken off, of all processes; NaN without a reward, or a baseline's."""
        weights_K = weights_K.to(rewards_PGK.device)
        rewards_PG = weighted_rewards(rewards_PGK, weights_K)
        if self.estimator.before_kl:
            differences_PG: torch.Tensor = function_at(self.estimator.before_kl)(rewards_PG)
            return differences_PG.flatten()
        missing_PG = rewards_PG.isnan()
        if greedy_PGK is not None:
            missing_PG = missing_PG | weighted_rewards(greedy_PGK, weights_K).isnan()
        return advantages_N.masked_fill(missing_PG.flatten(), torch.nan)

    def advantages(
        self,
        rewards_PGK: torch.Tensor,
        weights_K: torch.Tensor,
        metrics: dict[str, list[float]],
        logged: deque[float],
        lengths_PG: torch.Tensor | None = None,
        greedy_PGK: torch.Tensor | None = None,
        penalties_PG: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(N,) advantages over all processes, from rewards of P prompts, G completions each, by K functions.

        Args:
            rewards_PGK: NaN where a function gave None.
            weights_K: Of the functions.
            metrics: Gets the share of zero-advantage groups, and how many completions have no reward.
            logged: TRL's table of advantages, whose latest are replaced.
            lengths_PG: Tokens of each completion that are in the loss, where the estimator reads them.
            greedy_PGK: Rewards of the greedy completion of each completion's prompt, where it reads them.
            penalties_PG: What is taken off the reward of each completion before rewards are compared; not logged.

        Raises:
            RewardError: A reward is infinite; or negative, and the estimator has no meaning for that.
        """
        weights_K = weights_K.to(rewards_PGK.device)
        self._check_finite(rewards_PGK)
        if self._aggregation == "normalize_then_sum":
            of_rewards_N = advantages_N = normalized_sum_advantages(rewards_PGK, weights_K).flatten()
        else:
            rewards_PG = weighted_rewards(rewards_PGK, weights_K)
            self._check_signs(rewards_PG, rewards_PGK * weights_K)
            greedy_PG = None if greedy_PGK is None else weighted_rewards(greedy_PGK, weights_K)
            facts = {"scale": self._scale, "lengths_PG": lengths_PG, "greedy_PG": greedy_PG}
            read = {name: facts[name] for name in self.estimator.reads}
            of_rewards_N = advantages_N = function_at(self.estimator.function)(rewards_PG, **read).flatten()
            if penalties_PG is not None:
                advantages_N = function_at(self.estimator.function)(rewards_PG - penalties_PG, **read).flatten()
        self._log_unscored(rewards_PGK, weights_K, metrics)
        # TRL's takes equal rewards that are not dyadic, and groups without a reward, for different ones.
        flat_P = (of_rewards_N.view(rewards_PGK.shape[:2]) == 0).all(dim=1)
        metrics["frac_reward_zero_std"][-1] = flat_P.float().mean().item()
        for _ in range(min(len(advantages_N), len(logged))):
            logged.pop()
        logged.extend(advantages_N.tolist())
        return advantages_N

    def _check_finite(self, rewards_PGK: torch.Tensor) -> None:
        """Refuses an infinite reward, of which no advantage can be made; every process sees the same."""
        infinite_K = rewards_PGK.isinf().flatten(end_dim=1).any(dim=0)
        if bool(infinite_K.any()):
            named = ", ".join(name for name, wrong in zip(self._names, infinite_K, strict=True) if wrong)
            raise RewardError("returned inf, which is not finite", f"reward {named}", "a number, or None: no reward")

    def _check_signs(self, rewards_PG: torch.Tensor, weighted_PGK: torch.Tensor) -> None:
        """Refuses negative rewards where the estimator divides by their mean; every process sees the same."""
        negative_PG = rewards_PG < 0
        if not self.estimator.not_negative or not bool(negative_PG.any()):
            return
        to_blame_K = ((weighted_PGK < 0) & negative_PG.unsqueeze(2)).flatten(end_dim=1).any(dim=0)
        named = ", ".join(name for name, blamed in zip(self._names, to_blame_K, strict=True) if blamed)
        what = f"gave a completion a reward of {rewards_PG[negative_PG].min().item():g} after weighting, and "
        what += f"{self.estimator.name} divides by the mean of a group's rewards"
        raise RewardError(what, f"reward {named}", "rewards that are not negative, or advantage_estimator: rloo")

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
        rewards_PG = weighted_rewards(rewards_PGK, weights_K)
        metrics["rows/unscored"].append(float(rewards_PG.isnan().sum()))
        counts_K = (~rewards_PGK.isnan()).sum(dim=(0, 1)).tolist()
        by_name = [("reward", int((~rewards_PG.isnan()).sum()))]
        by_name += [(f"rewards/{name}/mean", count) for name, count in zip(self._names, counts_K, strict=True)]
        self._scored = dict(by_name)
        if rewards_PG.isnan().any():
            metrics["reward"][-1] = rewards_PG.nanmean().item()
            metrics["reward_std"][-1] = nan_std(rewards_PG.view(1, -1)).item()
        partly_PGK = partly_scored(rewards_PGK)
        if not self._warns or not partly_PGK.any():
            return
        self._warns = False
        partly_K = partly_PGK.flatten(end_dim=1).any(dim=0)
        warn(
            "PRL335",
            "%s gave None for some completions of a group: they have no reward and are not trained on, %d of %d "
            "(logged as rows/unscored)",
            ", ".join(name for name, partly in zip(self._names, partly_K, strict=True) if partly),
            int(partly_PGK.any(dim=2).sum()),
            rewards_PG.numel(),
        )


def complete(
    trainer: GRPOTrainer, group_rewards: GroupRewards, output: dict[str, Any], rewards_NK: torch.Tensor, rows: int
) -> None:
    """Gives rollouts our advantages and log-probabilities, in the order in which one needs the other.

    Advantages say which rows need log-probabilities; a KL penalty in the rewards needs those of every row first. Tokens
    are selected by both.

    Args:
        trainer: Whose rollouts.
        group_rewards: Makes advantages.
        output: Rollouts of this process as TRL makes them.
        rewards_NK: Of all processes.
        rows: Of this process.
    """
    needs_log_probs = off_reward(vars(trainer.args))
    if needs_log_probs:
        trainer.add_log_probs(output)
    put_advantages(trainer, group_rewards, output, rewards_NK, rows)
    if not needs_log_probs:
        trainer.add_log_probs(output)
    select_tokens(trainer, output)
    if trainer.model.training:
        trainer.optimizer_step.gaps.begin(output, trainer.num_generations)


def put_advantages(
    trainer: GRPOTrainer, group_rewards: GroupRewards, output: dict[str, Any], rewards_NK: torch.Tensor, rows: int
) -> None:
    """Puts our advantages in the place of TRL's: into rollouts, of so many rows, and into the log."""
    generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    rewards_PGK, metrics = (
        rewards_NK.view(-1, generations, rewards_NK.size(1)),
        trainer._metrics[mode_of(trainer.model)],
    )
    lengths_PG = None
    if "lengths_PG" in group_rewards.estimator.reads:  # of all processes, as the rewards are
        lengths_n = _mask(output).sum(dim=1)
        lengths_PG = trainer.accelerator.gather(lengths_n).view(-1, generations)
    greedy_PGK = None
    if group_rewards.estimator.writes_greedy:
        source = trainer.rollout_source
        greedy_PGK = greedy_rewards(trainer, source, source.inputs).view_as(rewards_PGK)
        greedy_PG = weighted_rewards(greedy_PGK, trainer.reward_weights)
        metrics["reward/greedy"].append(greedy_PG.nanmean().item())
        metrics["rows/without_baseline"].append(greedy_PG.isnan().float().mean().item())
    penalised, critic = off_reward(vars(trainer.args)), group_rewards.estimator.critic
    divergences_NT, penalties_PG = torch.zeros(()), None
    if penalised:
        divergences_NT = _divergences(trainer, output, metrics)
        if group_rewards.estimator.penalty == "completion":
            sums_n = trainer.beta * (divergences_NT * _mask(output)).sum(dim=1)
            penalties_PG = trainer.accelerator.gather(sums_n).view(-1, generations)
    advantages_N = group_rewards.advantages(
        rewards_PGK, trainer.reward_weights, metrics, trainer._logs["advantages"], lengths_PG, greedy_PGK, penalties_PG
    )
    first = trainer.accelerator.process_index * rows
    output["advantages"] = advantages_N[first : first + rows]
    if critic or (penalised and penalties_PG is None):
        rewards_N = group_rewards.before_kl(rewards_PGK, trainer.reward_weights, advantages_N, greedy_PGK)
        rewards_N = rewards_N[first : first + rows]
        if critic:
            trainer.critic_training.complete(output, rewards_N, trainer.beta * divergences_NT)
        else:
            output["advantages"] = _less_divergence(trainer, group_rewards, output, rewards_N, divergences_NT)
    elif not is_replaced(trainer, "_generate_and_score_completions"):  # a subclass may change advantages yet
        output["largest_advantage"] = advantages_N.abs().max()


def _divergences(trainer: GRPOTrainer, output: Mapping[str, Any], metrics: dict[str, list[float]]) -> torch.Tensor:
    """(N, T) log p_old - log p_ref of this process's tokens; logs their mean as ``kl``."""
    mask_NT = _mask(output)
    divergences_NT: torch.Tensor = output["old_per_token_logps"] - output["ref_per_token_logps"]
    sums = torch.stack([(divergences_NT * mask_NT).sum(), mask_NT.sum().float()])
    added, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    metrics["kl"].append(added / max(count, 1.0))
    return divergences_NT


def _less_divergence(
    trainer: GRPOTrainer,
    group_rewards: GroupRewards,
    output: Mapping[str, Any],
    rewards_N: torch.Tensor,
    divergences_NT: torch.Tensor,
) -> torch.Tensor:
    """(N, T) advantages of this process's tokens, with the KL divergence taken off token by token."""

    def total(sums: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = trainer.accelerator.reduce(sums, reduction="sum")
        return added

    mask_NT = _mask(output)
    returns_NT = penalised_returns(rewards_N, divergences_NT, mask_NT, trainer.beta)
    if group_rewards.estimator.penalty == "whitened":
        return whitened(returns_NT, mask_NT, total)
    return left_out(returns_NT, mask_NT)


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
    complete(trainer, trainer._group_rewards, rollouts, rewards_NK, len(inputs))
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
    with (
        shown_to_trl.for_rollouts(trainer, checked, ours=trainer.step_is_ours),
        received(trainer, "_calculate_rewards") as rewards,
    ):
        made = trainer._rollout_check.judged(lambda: theirs(inputs)) if compared else theirs(inputs)
    if trainer.model.training and trainer.rollout_source.is_served:
        made[SAMPLED_STEP] = trainer.rollout_source.token_steps.column(
            made["completion_ids"], trainer.state.global_step
        )
    return made, rewards[-1]
