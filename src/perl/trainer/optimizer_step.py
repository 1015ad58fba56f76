"""StepGRPOTrainer: one optimizer step of GRPO without the passes and the padding that add nothing to its gradient.

micro-batches as TRL prepares them -> Window -> passes of the model -> loss, gradient, metrics

TRL calls for a forward and backward pass a micro-batch. Here the micro-batches of an optimizer step are collected, and
at the last one all of their rows run together: packed, by a budget of tokens, without the rows that have no gradient.
One of the six modules that know TRL's and transformers' private methods; each override says which method it replaces
and why.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer
from transformers.integrations.fsdp import is_fsdp_managed_module

from perl.algorithms.importance import on_policy_rows, sampling_ratio
from perl.algorithms.losses import LossInputs, LossSettings, objective, token_weights
from perl.algorithms.metrics import CORRECTED, MUCH_CORRECTED, LossMetrics, SamplingMetrics
from perl.methods import adalora
from perl.packing.forward import score
from perl.packing.micro_batches import MicroBatch, Window, idle_micro_batch, join, live_rows, micro_batches
from perl.run.processes import as_copies, average_gradients
from perl.run.threads import fitting_threads, threads_for
from perl.trainer.rollout_check import CheckedGRPOTrainer

logger = logging.getLogger("perl")

_STEPS_BETWEEN_WARNINGS = 50


class StepGRPOTrainer(CheckedGRPOTrainer):
    """GRPOTrainer whose optimizer step runs no token that its gradient does not need."""

    _current_train_step_time: float
    _loss_settings: LossSettings
    _window: list[dict[str, Any]]
    _asked: list[Any]
    _window_metrics: tuple[LossMetrics, SamplingMetrics]
    _next_warning = 0

    def prepare_step(self) -> None:
        """Takes over the optimizer step; called once the model and the arguments are complete."""
        args = self.args
        self._window, self._asked = [], []
        self.prepare_passes()
        self._loss_settings = LossSettings.of(args)

    def train(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (transformers')
        """Extends ``train``: nothing is left of a step that an exception ended."""
        self._window, self._asked = [], []
        count, fitting = torch.get_num_threads(), fitting_threads(self.policy)
        if fitting < count and self.accelerator.is_main_process:
            logger.warning(
                "rollouts and passes use %d of %d CPU threads, enough for a model of this size; OMP_NUM_THREADS, or "
                "engine.threads of a recipe, chooses another number",
                fitting,
                count,
            )
        return super().train(*args, **kwargs)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: Any,  # noqa: ANN401 (TRL's)
        num_items_in_batch: Any = None,  # noqa: ANN401
    ) -> torch.Tensor:
        """Replaces TRL's step of a micro-batch: collects, and runs all of an optimizer step's rows at the last one.

        The loss returned is the whole step's at the last micro-batch and 0 before, so that what is logged is the same.
        """
        if not self.step_is_ours:
            return super().training_step(model, inputs, num_items_in_batch)
        started = time.perf_counter()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if not self._window:
            self.begin_window()
        self._window.append(self._prepare_inputs(inputs))
        self._asked.append(inputs)
        loss = torch.zeros((), device=self.args.device)
        if self.accelerator.sync_gradients:
            batches, self._window = self._window, []
            asked, self._asked = self._asked, []
            trained = None
            while trained is None:
                with threads_for(model):
                    trained = self._run_window(model, batches)
                if trained is None:
                    batches = self.make_again(asked)
            loss = trained
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Extends TRL's preparation: a pass of ours is prepared already."""
        return (
            generation_batch if isinstance(generation_batch, MicroBatch) else super()._prepare_inputs(generation_batch)
        )

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Any,  # noqa: ANN401 (TRL's)
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ANN401
    ) -> torch.Tensor:
        """Extends TRL's loss: of a pass of ours, or of an evaluation batch by passes of ours."""
        if isinstance(inputs, MicroBatch):
            return self._loss_of(model, inputs)
        if self.step_is_ours and not self.model.training:
            return self._evaluation_loss(model, inputs)
        loss: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Extends TRL's loss by AdaLoRA's regulariser, once for each optimizer step."""
        loss = super()._compute_loss(model, inputs)
        if model.training and adalora.allocates(self.policy):
            loss = loss + self._regulariser() / self.current_gradient_accumulation_steps
        return loss

    def _run_window(self, model: torch.nn.Module, batches: list[dict[str, Any]]) -> torch.Tensor | None:
        """The gradient of an optimizer step; on too little memory once more with half the tokens in a pass.

        None: its rollouts turned out to be another policy's, and there is no gradient.
        """
        window = join(batches, [self._weights(batch) for batch in batches], self._width_of)
        largest = max((float(b.get("largest_advantage", b["advantages"].abs().max())) for b in batches), default=0.0)
        live = live_rows(window, largest_advantage=largest, skip=self.skips_dead_rows)
        while True:
            plan = self._plan(window, live, self._tokens_in_a_pass())
            loss = self._backward(model, plan, len(batches))
            if loss is not None:
                if not self.rollouts_stand(self._window_metrics[1].mean_difference(self.accelerator)):
                    model.zero_grad()
                    return None
                self._log_step(window, live, plan)
                return loss
            model.zero_grad()
            self._save_memory(plan)
            torch.cuda.empty_cache()

    def _save_memory(self, plan: Sequence[MicroBatch]) -> None:
        """After too little memory on some process: shorter passes, or activations computed again, on all of them.

        Raises:
            OutOfMemoryError: A single row does not fit either way.
        """
        longest = self._most(max(batch.tokens for batch in plan))  # one budget, whatever rows a process has now
        if self._any(any(len(batch.rows) > 1 for batch in plan)):
            self._budget = max(min(self._budget or longest, longest) // 2, 1)
            logger.warning("out of memory: the step runs again with %d tokens in a pass", self._budget)
        elif self.recompute_activations():
            self._budget = longest
            logger.warning("out of memory: the step runs again with activations computed again in backward passes")
        else:
            raise torch.OutOfMemoryError("a single row does not fit: shorten train.max_completion_length")

    def _plan(self, window: Window, live: Sequence[int], budget: int) -> list[MicroBatch]:
        """The passes of a step, as many on every process; at least one, so that every gradient is there."""
        how = self._grouping(window.rows)
        plan = micro_batches(window, live, budget=budget, **how)
        idle = self._most(max(len(plan), 1)) - len(plan)
        return plan + [idle_micro_batch(window, packed=how["packed"]) for _ in range(idle)]

    def _backward(self, model: torch.nn.Module, plan: list[MicroBatch], micro_batch_count: int) -> torch.Tensor | None:
        """Runs the passes, then exchanges gradients. None if memory did not suffice on some process.

        Processes that hold whole tensors exchange once all of them have come through; in shards it is done by the
        backward pass of the last one, in which the others wait for each other's tensors anyway.
        """
        self._start_metrics(micro_batch_count)
        self._regulariser_due = adalora.allocates(self.policy)
        loss, failed = torch.zeros((), device=self.args.device), False
        copies = as_copies(model)
        retried = copies is not None or (self.whole_tensors and self.accelerator.num_processes == 1)
        for batch in plan:
            exchanged = batch is plan[-1] and not retried
            try:
                with contextlib.nullcontext() if exchanged else self._without_exchange(model):
                    loss += Trainer.training_step(self, model, batch)  # TRL's also counts and times micro-batches
            except torch.OutOfMemoryError:
                if not retried:
                    raise  # other processes wait for this one's shards
                failed = True
                break
        if retried and self._any(failed):
            return None
        if copies is not None:
            average_gradients(copies)
        return loss

    @contextlib.contextmanager
    def _without_exchange(self, model: torch.nn.Module) -> Iterator[None]:
        """For a pass after which gradients are added up on this process only."""
        state = self.accelerator.gradient_state
        state._set_sync_gradients(False)
        try:
            if self.is_distributed_loading_by_transformers and is_fsdp_managed_module(self.model):
                with self._defer_fsdp_gradient_reduction():
                    yield
            elif self.is_deepspeed_enabled:
                yield
            else:
                with self.accelerator.no_sync(model=model):
                    yield
        finally:
            state._set_sync_gradients(True)

    def _any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        return bool(self._most(int(flag)))

    def _loss_of(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """The part of a step's loss that a pass computes."""
        mask_NT, values = batch.mask_NT, batch.values
        with self.accelerator.autocast():
            policy_log_probs, entropies = score(
                model, batch.rows, batch.families, packed=batch.packed, columns=mask_NT.size(1)
            )
        if not batch.counts:
            return (policy_log_probs * 0.0).sum() + self._regulariser_if_due()
        old_log_probs = values.get("old_per_token_logps", policy_log_probs.detach())
        sampling_log_probs = values.get("sampling_per_token_logps")
        ratio = keep = None
        if self.correction is not None and sampling_log_probs is not None:
            ratio = sampling_ratio(old_log_probs, sampling_log_probs, mask_NT, self.correction)
        if self.off_policy_mask_threshold is not None:
            sampled = old_log_probs if sampling_log_probs is None else sampling_log_probs
            keep = on_policy_rows(policy_log_probs, sampled, batch.advantages, mask_NT, self.off_policy_mask_threshold)
        inputs = LossInputs(
            policy_log_probs=policy_log_probs,
            old_log_probs=old_log_probs,
            advantages=batch.advantages,
            mask=mask_NT,
            reference_log_probs=values.get("ref_per_token_logps"),
            sampling_ratio=ratio,
            keep=keep,
        )
        result = objective(inputs, self._loss_settings)
        of_loss, of_sampling = self._window_metrics
        if entropies is not None:
            of_loss.add(result, inputs, entropies, batch.micro_batch_N)
        if ratio is not None and sampling_log_probs is not None:
            of_sampling.add(old_log_probs, sampling_log_probs, ratio, mask_NT)
        return (result.per_token * batch.weights_NT).sum() + self._regulariser_if_due()

    def _evaluation_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of an evaluation batch, over all of its rows."""
        window = join([inputs], [self._weights(inputs)], self._width_of)
        live = live_rows(window, largest_advantage=0.0, skip=False)
        self._start_metrics(1)
        self._regulariser_due = False
        loss = torch.zeros((), device=self.args.device)
        for batch in self._plan(window, live, self._tokens_without_gradient()):
            loss += self._loss_of(model, batch)
        self._log_metrics("eval")
        return loss

    def _weights(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """(N, T) weights of a micro-batch's tokens in the loss of its optimizer step."""
        steps, generation_batches = 1.0, 1.0  # evaluation neither accumulates nor splits
        if self.model.training:
            steps = self.current_gradient_accumulation_steps
            generation_batches = self.args.steps_per_generation
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return token_weights(
            batch["completion_mask"] * batch.get("tool_mask", 1),
            self.loss_type,
            micro_batches=steps,
            window_tokens=tokens * steps / generation_batches,
            max_completion_length=self.max_completion_length,
        )

    def _regulariser_if_due(self) -> torch.Tensor | float:
        """AdaLoRA's term, in one pass of each step."""
        due, self._regulariser_due = self._regulariser_due, False
        return self._regulariser() if due else 0.0

    def _regulariser(self) -> torch.Tensor:
        """AdaLoRA's, and its ranks to the log."""
        ranks = adalora.ranks(self.policy)
        for name, value in (("mean", sum(ranks) / len(ranks)), ("min", min(ranks)), ("max", max(ranks))):
            self._metrics["train"][f"rank/{name}"].append(float(value))
        return adalora.regulariser(self.policy)

    def _log_step(self, window: Window, live: Sequence[int], plan: Sequence[MicroBatch]) -> None:
        """The metrics of an optimizer step, and how much of it was run."""
        self._log_metrics("train")
        counts = torch.tensor(
            [[len(live), len(window.rows), sum(b.tokens for b in plan), len(plan)]],
            device=self.accelerator.device,
            dtype=torch.float32,
        )
        trained, rows, tokens, passes = self.accelerator.gather(counts).sum(dim=0).tolist()
        metrics = self._metrics["train"]
        metrics["rows/trained_fraction"].append(trained / rows)
        metrics["tokens/run"].append(tokens)
        metrics["tokens/passes"].append(passes / self.accelerator.num_processes)

    def _start_metrics(self, count: int) -> None:
        """Empty sums for a window of so many micro-batches."""
        device = self.accelerator.device
        self._window_metrics = (
            LossMetrics(count, self._loss_settings, device),
            SamplingMetrics(device, corrects=self.correction is not None),
        )

    def _log_metrics(self, mode: str) -> None:
        for source in self._window_metrics:
            for name, value in source.values(self.accelerator):
                self._metrics[mode][name].append(value)
                if name == CORRECTED and value > MUCH_CORRECTED:
                    self._warn_of_correction(value)

    def _warn_of_correction(self, share: float) -> None:
        """Says that much of what was sampled is not from the policy, the first time and every so many steps."""
        if self.state.global_step >= self._next_warning and self.accelerator.is_main_process:
            self._next_warning = self.state.global_step + _STEPS_BETWEEN_WARNINGS
            logger.warning(
                "the importance correction bounds %.0f %% of what was sampled: the engine's policy is far from the "
                "trainer's (sampling/sampling_logp_difference says how far, in nats)",
                100 * share,
            )
