"""CriticTraining: PPO's critic beside a policy, on the same base.

rollouts, rewards -> values, advantages, returns; accumulation window -> gradient of the value loss -> the critic's step

Values are computed once for each generation batch and stay with it as the old policy's log-probs do, so that every
epoch and minibatch trains on the advantages and returns of the rollouts.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perl.algorithms.advantages import whitened
from perl.algorithms.critic_settings import critic_rate
from perl.algorithms.gae import explained_variance, generalised_advantages, moments, token_rewards, value_loss
from perl.errors import ModelError
from perl.methods.registry import Method
from perl.packing.forward import score
from perl.packing.micro_batches import MicroBatch, Window
from perl.policy.critic import WEIGHTS, Critic, facts_of_base, find_critic
from perl.run.devices import threads_for
from perl.trainer.arguments.config import own_setting
from perl.trainer.live import LiveTrainer, mode_of
from perl.trainer.step.gradient_exchange import average_gradients
from perl.trainer.step.log_prob_passes import LogProbPasses
from perl.trainer.step.optimizer_state import read_state, write_state

_TENSORS, _OPTIMIZER = WEIGHTS, "critic-optimizer.safetensors"


class CriticTraining:
    """Owns the critic and its optimizer.

    Attributes:
        critic: The adapter and value head.
        learning_rate: Of its AdamW, constant.
        warmup_steps: Initial steps that train only the critic.
    """

    def __init__(self, live: LiveTrainer, method: Method, passes: LogProbPasses) -> None:
        """Makes a critic for a policy that is complete.

        Args:
            live: The training.
            method: Of the policy.
            passes: How rows go through the policy.

        Raises:
            ModelError: The policy has no adapter, or the critic to start from does not fit its base.
        """
        self._live, self._passes = live, passes
        args, adapter = live.args, own_setting(live.args, "critic_adapter")
        self.learning_rate = critic_rate(own_setting(args, "critic_learning_rate"), args.learning_rate, method.rate)
        self.warmup_steps: int = own_setting(args, "critic_warmup_steps")
        self._decay = {"gamma": own_setting(args, "gae_gamma"), "lambda_": own_setting(args, "gae_lambda")}
        self._clip: float | None = own_setting(args, "value_clip")
        self.critic = Critic(live.policy, rank=own_setting(args, "critic_rank"), seed=args.seed)
        if adapter is not None:
            self.critic.load(find_critic(adapter).file)
        self._optimizer = torch.optim.AdamW(
            self.critic.parameters,
            lr=self.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=0.0,
        )
        self._sums = torch.zeros(3)
        passes.critic = self.critic

    @property
    def policy_waits(self) -> bool:
        """Whether the policy takes no gradient in the current optimizer step, while the critic warms up."""
        return self._live.state.global_step < self.warmup_steps

    def complete(self, rollouts: dict[str, Any], rewards_N: torch.Tensor, penalties_NT: torch.Tensor) -> None:
        """Gives rollouts their ``advantages``, ``old_values`` and ``returns``, (N, T); logs what the values explain.

        Args:
            rollouts: TRL's padded tensors of this process; changed.
            rewards_N: Of completions; NaN where one is missing: no advantage, no return.
            penalties_NT: Taken off the rewards of tokens; or a single number.
        """
        mask_NT = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        values_NT = self._passes.values(rollouts, self.critic)
        rewards_NT = token_rewards(rewards_N, penalties_NT, mask_NT)
        advantages_NT = generalised_advantages(rewards_NT, values_NT, mask_NT, **self._decay)
        rollouts["advantages"] = whitened(advantages_NT, mask_NT, self._total)
        rollouts["old_values"], rollouts["returns"] = values_NT, advantages_NT + values_NT
        sums_6 = self._total(moments(values_NT, rollouts["returns"], mask_NT))
        metrics = self._live._metrics[mode_of(self._live.model)]
        explained = explained_variance(sums_6)
        if math.isfinite(explained):  # else there is nothing to explain
            metrics["critic/explained_variance"].append(explained)
        metrics["critic/value_mean"].append((sums_6[5] / sums_6[0].clamp(min=1)).item())

    def rows_with_value(self, window: Window) -> list[int]:
        """Indices of the rows of a window that the critic learns from, whatever their advantage."""
        known_NT = window.mask_NT.bool() & ~window.values["returns"].isnan()
        return known_NT.any(dim=1).nonzero().flatten().tolist()

    def accumulate(self, plan: Sequence[MicroBatch]) -> bool:
        """The gradient of the value loss, added up over the tokens of these micro-batches of this process.

        Returns:
            Whether memory sufficed; if not, the gradient is not whole and has to be dropped.
        """
        self._sums = torch.zeros(3, dtype=torch.float64)
        self.drop_gradients()  # of a step that an exception ended
        policy, in_step = self._live.policy, self._passes.in_step
        with threads_for(policy), self.critic.in_place_of(policy):
            if in_step is not None:
                return in_step.run("critic", [partial(self._pass, policy, batch) for batch in plan]) is not None
            try:
                for batch in plan:
                    if batch.counts:
                        self._pass(policy, batch)
            except torch.OutOfMemoryError:
                return False
        return True

    def rehearse(self, window: Window) -> None:
        """Where the base is in shards: learns in what order a pass of the critic gathers them, which adds no gradient.

        Args:
            window: Of whose rows one is run.
        """
        if self._passes.in_step is not None:
            policy, idle = self._live.policy, self._passes.idle(window)
            with self.critic.in_place_of(policy):
                self._passes.in_step.rehearse("critic", lambda: self._pass(policy, idle))

    def drop_gradients(self) -> None:
        """Forgets what was accumulated."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Moves the critic by the mean gradient over all tokens of all processes, and logs its loss."""
        live, parameters = self._live, self.critic.parameters
        loss, clipped, tokens = self._total(self._sums.to(live.accelerator.device)).tolist()
        average_gradients(parameters)
        for parameter in parameters:
            if parameter.grad is not None:  # the mean of sums over tokens -> the mean over tokens
                parameter.grad *= live.accelerator.num_processes / max(tokens, 1.0)
        if live.args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, live.args.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        metrics = self._live._metrics["train"]
        metrics["critic/loss"].append(loss / max(tokens, 1.0))
        metrics["critic/clip_fraction"].append(clipped / max(tokens, 1.0))

    def save(self, checkpoint: Path) -> None:
        """Writes the critic and its optimizer's state into a checkpoint."""
        self.critic.save(checkpoint / _TENSORS)
        write_state(checkpoint / _OPTIMIZER, self._optimizer.state_dict())

    def load(self, checkpoint: Path) -> None:
        """Puts back what :meth:`save` wrote.

        The rate is that of the arguments now, as it is constant.

        Raises:
            ModelError: It is of a critic of another shape, or there is none.
        """
        self.check(checkpoint)
        self.critic.load(checkpoint / _TENSORS)
        self._optimizer.load_state_dict(read_state(checkpoint / _OPTIMIZER))
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate

    def check(self, checkpoint: Path) -> None:
        """Refuses a checkpoint whose critic this one cannot go on from, by the header of its file.

        Raises:
            ModelError: It is of a critic of another shape, or there is none.
        """
        if not (checkpoint / _TENSORS).is_file():
            what, hint = f"{checkpoint} was written without a critic", "start anew, or continue its adapter"
            raise ModelError(what, "resume_from_checkpoint", hint)
        self.critic.check(checkpoint / _TENSORS)

    def export(self, folder: Path, fingerprint: str | None = None) -> None:
        """Writes the critic into a folder of its own, never into the adapter's; every process must ask.

        Args:
            folder: Replaced if it is there.
            fingerprint: Of the base's weights; None: it is taken now.
        """
        facts = facts_of_base(self._live.policy, fingerprint)
        if self._live.accelerator.is_main_process:
            self.critic.export(folder, facts, {"gamma": self._decay["gamma"], "lambda": self._decay["lambda_"]})

    def _pass(self, policy: torch.nn.Module, batch: MicroBatch) -> None:
        """One micro-batch, forward and backward."""
        mask_NT, values = batch.mask_NT.bool(), batch.values
        with self._live.accelerator.autocast():
            found_NT, _ = score(
                policy,
                batch.rows,
                batch.groups,
                packed=batch.packed,
                columns=mask_NT.size(1),
                entropy="none",
                read=self.critic.values,
            )
        if not batch.counts:  # the other processes' shards need this one
            (found_NT * 0.0).sum().backward()
            return
        loss = value_loss(found_NT, values["old_values"], values["returns"], clip=self._clip)
        counts_NT = mask_NT & ~values["returns"].isnan()
        total = loss.per_token.masked_fill(~counts_NT, 0.0).sum()
        total.backward()
        sums = (total.detach(), (loss.clipped & counts_NT).sum(), counts_NT.sum())
        self._sums += torch.stack([part.double().cpu() for part in sums])

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over all processes."""
        added: torch.Tensor = self._live.accelerator.reduce(sums, reduction="sum")
        return added
