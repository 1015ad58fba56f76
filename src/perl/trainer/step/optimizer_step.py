"""OptimizerStep: one optimizer step of GRPO without the tokens and the padding that add nothing to its gradient.

micro-batches as TRL prepares them -> accumulation window -> micro-batches of ours -> loss, gradient, metrics

TRL calls for a forward and backward pass a micro-batch. Here the micro-batches of an optimizer step are collected, and
at the last one all of their rows run together: packed, by a budget of tokens, without zero-advantage samples.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from perl.algorithms.importance import on_policy_rows, sampling_ratio
from perl.algorithms.losses import LossInputs, LossSettings, objective, token_weights
from perl.algorithms.metrics import CORRECTED, MUCH_CORRECTED, LossMetrics, SamplingMetrics
from perl.errors import RecipeError, warn
from perl.methods.hooks import hooks_of
from perl.packing.forward import score_beside
from perl.packing.head import EntropyKind
from perl.packing.in_step import Kind
from perl.packing.micro_batches import SAMPLED_STEP, SELECTED, SHOWN, MicroBatch, Window, rows_with_gradient
from perl.packing.router import balances
from perl.run.devices import fitting_threads, threads_for
from perl.trainer.arguments.config import own_setting
from perl.trainer.group_rewards import acting, selection_of, warn_without_second_update
from perl.trainer.live import LiveTrainer, Mode, Position, mode_of, most
from perl.trainer.sampling.rollout_check import RolloutCheck, TokenGaps
from perl.trainer.step.critic_training import CriticTraining
from perl.trainer.step.gradient_exchange import average_gradients, unexchanged
from perl.trainer.step.log_prob_passes import LogProbPasses
from perl.trainer.step.teaching import Teaching

_STEPS_BETWEEN_WARNINGS = 50


class OptimizerStep:
    """Runs no token that the gradient does not need. Owns the accumulation window and its metrics.

    Attributes:
        skips: Whether zero-advantage samples, which add exactly nothing to the gradient, are left out.
        teaching: Runs the teacher, if there is one.
    """

    def __init__(
        self,
        live: LiveTrainer,
        passes: LogProbPasses,
        check: RolloutCheck,
        position: Position,
        *,
        critic: CriticTraining | None = None,
        teaching: Teaching | None = None,
    ) -> None:
        """Takes over the optimizer step of a training.

        Args:
            live: The training, whose arguments have the loss.
            passes: How rows go through the policy.
            check: Decides whether rollouts may be trained on.
            position: Where the training is among TRL's micro-batches.
            critic: What else learns from the rows of a step, if anything does.
            teaching: Of a teacher, if there is one.
        """
        self._live, self._passes, self._check = live, passes, check
        self._loss = LossSettings.of(live.args)
        # What the loss of a model's routers is multiplied by.
        self._balance: float = live.router_aux_loss_coef if live.aux_loss_enabled and balances(live.policy) else 0.0
        of_loss = live.args.beta != 0.0 or self._loss.entropy_weight != 0.0 or self._balance != 0.0
        self._every_row_acts = of_loss or teaching is not None
        self.skips = bool(own_setting(live.args, "skip_zero_advantage")) and not self._every_row_acts
        self._position, self._critic, self.teaching = position, critic, teaching
        self._selection, self._hooks = selection_of(live.args), hooks_of(live.policy)
        self.gaps = TokenGaps(main=live.accelerator.is_main_process)
        self._window: list[dict[str, Any]] = []
        self._asked: list[Any] = []
        self._seconds = 0.0
        self._next_warning = 0
        self._regulariser_due = False

    @property
    def teaches(self) -> bool:
        """Whether the rows of the current step give the policy a gradient; True where that is not known."""
        batches = self._position.trained_on
        known = bool(batches) and all("advantages" in batch for batch in batches)
        return self._every_row_acts or not known or any(bool(batch["advantages"].any()) for batch in batches)

    def begin_training(self) -> None:
        """Drops what is left of a step that an exception ended; says how many threads are used."""
        self._window, self._asked = [], []
        self._hooks = hooks_of(self._live.policy)  # another training may have finished its adapter
        count, fitting = torch.get_num_threads(), fitting_threads(self._live.policy)
        if fitting < count and self._live.accelerator.is_main_process:
            warn(
                "PRL320",
                "rollouts and passes use %d of %d CPU threads, enough for a model of this size; OMP_NUM_THREADS, or "
                "engine.threads of a recipe, chooses another number",
                fitting,
                count,
            )
        warn_without_second_update(self._live)

    def take(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:  # noqa: ANN401 (TRL's)
        """Takes one of TRL's micro-batches, and runs all of an optimizer step's rows at the last one.

        Args:
            model: The policy, as TRL runs it.
            inputs: What the data loader gives.

        Returns:
            The whole step's loss at the last micro-batch and 0 before, so that their sum is what is logged.
        """
        started = time.perf_counter()
        if not self._window:
            self._check.begin()
        self._window.append(self._live._prepare_inputs(inputs))
        self._asked.append(inputs)
        loss, metrics = torch.zeros((), device=self._live.args.device), self._live._metrics["train"]
        is_last = bool(self._live.accelerator.sync_gradients)
        if is_last:
            batches, asked, begun = self._window, self._asked, time.perf_counter()
            self._window, self._asked = [], []
            while True:
                with threads_for(model):
                    found = self.run_window(model, batches)
                if found is not None:
                    break
                batches, begun = self._check.make_again(asked), time.perf_counter()  # they were another policy's
            loss = found
            metrics["update/seconds"].append(time.perf_counter() - begun)
        self._position.advance()
        self._seconds += time.perf_counter() - started
        if is_last:
            metrics["step_time"].append(self._seconds)
            self._seconds = 0.0
        return loss

    def run_window(self, model: torch.nn.Module, batches: list[dict[str, Any]]) -> torch.Tensor | None:
        """The gradient of an optimizer step; on too little memory once more with half the tokens in a micro-batch.

        None: its rollouts turned out to be another policy's, and there is no gradient.
        """
        batches = acting(batches, self._live.state.global_step)
        window = self._passes.window(batches, [self._weights(batch) for batch in batches])
        largest = max((float(b.get("largest_advantage", b["advantages"].abs().max())) for b in batches), default=0.0)
        selected_act = self._selection is not None and self._selection.acts
        chosen = rows_with_gradient(window, largest_advantage=largest, skip=self.skips, selected_act=selected_act)
        while True:
            if (in_step := self._passes.in_step) is not None:
                # Learns in what order a pass gathers a base in shards, from one that adds no gradient.
                idle, self._regulariser_due = self._passes.idle(window), False
                in_step.rehearse(self._kind, partial(self._unexchanged, model, idle))
            plan = self._passes.plan(window, chosen, self._passes.tokens)
            loss = self._backward(model, plan, len(batches))
            if loss is not None:
                if not self._check.accepts(self._window_metrics[1].mean_difference(self._live.accelerator)):
                    model.zero_grad()
                    return None
                self._log_step(window, chosen, plan)
                self._train_critic(window)
                return loss
            model.zero_grad()
            self._save_memory(plan)
            torch.cuda.empty_cache()

    def _train_critic(self, window: Window) -> None:
        """The critic's step on the rows of the policy's, where there is one; on too little memory as for the policy."""
        critic = self._critic
        if critic is None:
            return
        while True:
            critic.rehearse(window)
            plan = self._passes.plan(window, critic.rows_with_value(window), self._passes.tokens)
            if not self._any(not critic.accumulate(plan)):
                critic.step()
                return
            critic.drop_gradients()
            self._save_memory(plan)
            torch.cuda.empty_cache()

    @property
    def _kind(self) -> Kind:
        """Of the policy's passes in the current step."""
        return "waiting" if self._policy_waits else "training"

    @property
    def _policy_waits(self) -> bool:
        """Whether only a critic moves in the current step."""
        return self._critic is not None and self._critic.policy_waits

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """The part of a step's loss that a micro-batch computes."""
        mask_NT, values = batch.mask_NT, batch.values
        entropy: EntropyKind = "gradient" if self._loss.entropy_weight != 0.0 else "value"
        with self._live.accelerator.autocast():
            beside = self.teaching.beside(batch) if self.teaching is not None and batch.counts else None
            policy_log_probs, entropies, taught, balance = score_beside(
                model,
                batch.rows,
                batch.groups,
                packed=batch.packed,
                columns=mask_NT.size(1),
                entropy=entropy,
                beside=beside,
                balance=self._balance != 0.0,
            )
        if not batch.counts:
            return (policy_log_probs * 0.0).sum() + self._regulariser_if_due()
        of_routers = 0.0 if balance is None else self._of_routers(balance, batch)
        old_log_probs = values.get("old_per_token_logps", policy_log_probs.detach())
        sampling_log_probs = values.get("sampling_per_token_logps")
        correction, threshold = self._live.correction, self._live.args.off_policy_mask_threshold
        ratio = keep = None
        if correction is not None and sampling_log_probs is not None:
            ratio = sampling_ratio(old_log_probs, sampling_log_probs, mask_NT, correction)
        if threshold is not None:
            sampled = old_log_probs if sampling_log_probs is None else sampling_log_probs
            keep = on_policy_rows(policy_log_probs, sampled, batch.advantages, mask_NT, threshold)
        inputs = LossInputs(
            policy_log_probs=policy_log_probs,
            old_log_probs=old_log_probs,
            advantages=batch.advantages,
            mask=mask_NT,
            reference_log_probs=values.get("ref_per_token_logps"),
            sampling_ratio=ratio,
            keep=keep,
            sampling_log_probs=sampling_log_probs,
            entropies=entropies if entropy == "gradient" else None,
            selected=values.get(SELECTED),
        )
        result = objective(inputs, self._loss)
        of_loss, of_sampling = self._window_metrics
        if entropies is not None:
            of_loss.add(result, inputs, entropies, batch.micro_batch_N)
        if sampling_log_probs is not None:
            self.gaps.add(values.get(SHOWN), old_log_probs, sampling_log_probs, mask_NT)
        if ratio is not None and sampling_log_probs is not None:
            of_sampling.add(old_log_probs, sampling_log_probs, ratio, mask_NT)
            sampled_step = values.get(SAMPLED_STEP)
            age = None if sampled_step is None else self._live.state.global_step - sampled_step
            of_sampling.add_ages(policy_log_probs, sampling_log_probs, age, mask_NT)
        of_teacher = 0.0 if self.teaching is None else self.teaching.term(taught, batch)
        of_policy = (result.per_token * batch.weights_NT).sum()
        return of_policy + of_teacher + of_routers + self._regulariser_if_due()

    def _of_routers(self, balance: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """A micro-batch's part of the routers' loss of a step, by its share of the tokens."""
        if torch.is_grad_enabled() and balance and not balance.requires_grad and not self._policy_waits:
            what = "the routers' loss has no gradient with reentrant checkpointing"
            raise RecipeError(what, "gradient_checkpointing_kwargs", "use_reentrant: false, or router_aux_loss_coef: 0")
        share = sum(row.tokens for row in batch.rows) / self._window_tokens
        self._window_balance += balance.detach() * share
        return self._balance * share * balance

    def loss_of_batch(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of an evaluation batch, or of a micro-batch as TRL cuts it, over all of its rows."""
        mode = mode_of(self._live.model)
        (inputs,) = acting([inputs], self._live.state.global_step)
        window = self._passes.window([inputs], [self._weights(inputs)])
        chosen = rows_with_gradient(window, largest_advantage=0.0, skip=False)
        self._regulariser_due = False
        loss = torch.zeros((), device=self._live.args.device)
        plan = self._passes.plan(window, chosen, 0 if mode == "train" else self._passes.tokens_without_gradient)
        self._start_metrics(1, plan)
        if mode == "train":  # one of several of an optimizer step
            self._window_tokens *= self._live.current_gradient_accumulation_steps
        for batch in plan:
            loss += self.loss_of(model, batch)
        self._log_metrics(mode)
        return loss

    def regulariser(self) -> torch.Tensor | float:
        """What the method adds to the loss of an optimizer step, and to its log; else 0."""
        if self._hooks.regulariser is None:
            return 0.0
        policy = self._live.policy
        term = self._hooks.regulariser(policy)
        for name, value in self._hooks.log(policy).items():
            self._live._metrics["train"][name].append(value)
        return term

    def _regulariser_if_due(self) -> torch.Tensor | float:
        """A method's term, in one micro-batch of each step."""
        due, self._regulariser_due = self._regulariser_due, False
        return self.regulariser() if due else 0.0

    def _save_memory(self, plan: Sequence[MicroBatch]) -> None:
        """After too little memory on some process: shorter micro-batches, or activations computed again, on all.

        Raises:
            OutOfMemoryError: A single row does not fit either way.
        """
        # One budget, whatever rows a process has now.
        longest = most(self._live.accelerator, max(int(batch.cost(0.0)) for batch in plan))
        if self._any(any(len(batch.rows) > 1 for batch in plan)):
            self._passes.lower_budget(longest, halve=True)
            warn("PRL321", "out of memory: the step runs again with %d tokens in a pass", self._passes.tokens)
        elif self._passes.recompute_activations():
            self._passes.lower_budget(longest, halve=False)
            warn("PRL321", "out of memory: the step runs again with activations computed again in backward passes")
        else:
            raise torch.OutOfMemoryError("a single row does not fit: shorten train.max_completion_length")

    def _backward(self, model: torch.nn.Module, plan: list[MicroBatch], micro_batch_count: int) -> torch.Tensor | None:
        """Runs the micro-batches, then exchanges gradients. None if memory did not suffice on some process.

        Processes exchange once all of them have come through.
        """
        self._start_metrics(micro_batch_count, plan)
        self._regulariser_due = True
        losses: list[torch.Tensor] | None = None
        if self._passes.in_step is not None:
            losses = self._passes.in_step.run(self._kind, [partial(self._unexchanged, model, batch) for batch in plan])
        else:
            with contextlib.suppress(torch.OutOfMemoryError):
                losses = [self._unexchanged(model, batch) for batch in plan]
        if self._any(losses is None):
            return None
        average_gradients([p for p in self._live.policy.parameters() if p.requires_grad])
        return sum(losses or [], start=torch.zeros((), device=self._live.args.device))

    def _unexchanged(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """A forward and backward pass after which processes do not exchange gradients."""
        with unexchanged(self._live):
            if self._policy_waits:
                with torch.no_grad():  # for its metrics
                    return self.loss_of(model, batch)
            return self._live.run_micro_batch(model, batch)

    def _any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        return bool(most(self._live.accelerator, int(flag)))

    def _weights(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """(N, T) weights of a micro-batch's tokens in the loss of its optimizer step."""
        steps, generation_batches = 1.0, 1.0  # evaluation neither accumulates nor splits
        if self._live.model.training:
            steps, generation_batches = (
                self._live.current_gradient_accumulation_steps,
                self._live.args.steps_per_generation,
            )
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / self._live.accelerator.num_processes
        return token_weights(
            batch["completion_mask"] * batch.get("tool_mask", 1),
            self._loss.loss_type,
            micro_batches=steps,
            window_tokens=tokens * steps / generation_batches,
            max_completion_length=self._loss.max_completion_length,
        )

    def _log_step(self, window: Window, chosen: Sequence[int], plan: Sequence[MicroBatch]) -> None:
        """The metrics of an optimizer step, and how much of it was run."""
        self._log_metrics("train")
        accelerator, metrics = self._live.accelerator, self._live._metrics["train"]
        counts = torch.tensor(
            [[len(chosen), len(window.rows), sum(b.tokens for b in plan), len(plan)]],
            device=accelerator.device,
            dtype=torch.float32,
        )
        trained, rows, tokens, passes = accelerator.gather(counts).sum(dim=0).tolist()
        metrics["rows/trained_fraction"].append(trained / rows)
        metrics["tokens/run"].append(tokens)
        metrics["tokens/passes"].append(passes / accelerator.num_processes)

    def _start_metrics(self, count: int, plan: Sequence[MicroBatch]) -> None:
        """Empty sums for a window of so many micro-batches of TRL's, which are run as these."""
        self._window_tokens = sum(row.tokens for batch in plan if batch.counts for row in batch.rows)
        self._window_balance = torch.zeros((), device=self._live.accelerator.device)
        device = self._live.accelerator.device
        corrects = self._live.correction is not None
        self._window_metrics = LossMetrics(count, self._loss, device), SamplingMetrics(device, corrects=corrects)
        if self.teaching is not None:
            self.teaching.start()

    def _log_metrics(self, mode: Mode) -> None:
        sources = [source.values(self._live.accelerator) for source in self._window_metrics]
        if self._balance:
            mean = self._live.accelerator.reduce(self._window_balance, reduction="mean")
            sources.append(iter([("aux_loss", mean.item())]))
        if self.teaching is not None:
            sources.append(self.teaching.values(trained=mode == "train"))
        for found in sources:
            for name, value in found:
                self._live._metrics[mode][name].append(value)
                step, main = self._live.state.global_step, self._live.accelerator.is_main_process
                if name == CORRECTED and value > MUCH_CORRECTED and step >= self._next_warning and main:
                    self._next_warning = step + _STEPS_BETWEEN_WARNINGS
                    warn(
                        "PRL318",
                        "the importance correction bounds %.0f %% of what was sampled: the engine's policy is far from "
                        "the trainer's (sampling/sampling_logp_difference says how far, in nats)",
                        100 * value,
                    )
