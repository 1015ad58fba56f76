"""PeftGRPOTrainer: TRL's GRPOTrainer with our stages wired into its hooks.

The only module that knows TRL's and transformers' private methods. Each override says which method it replaces and
why; everything else is TRL's.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, nanmax, nanmin

from perl.advantages import group_advantages, normalized_sum_advantages, weighted_rewards
from perl.checkpoint import latest_checkpoint, load_trainer_state, save_trainer_state, seal, unseal, write_adapter
from perl.config import PeftRLConfig
from perl.guards import check_optimizer
from perl.hub.card import CardFacts, render_card
from perl.logprobs import token_log_probs
from perl.losses import LossInputs, LossSettings, Objective, objective, token_weights
from perl.methods.registry import build_config
from perl.model import base_identity, check_targets, check_trainable, resolve_model, trainable_parameters
from perl.reference import reference_log_probs
from perl.rollouts.hf_engine import fill_with_neutral
from perl.run import write_text

# Inputs of multimodal models, handed through to the forward pass as TRL does.
_FORWARD_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class PeftGRPOTrainer(GRPOTrainer):
    """Trains an adapter with GRPO and its relatives.

    Takes the arguments of TRL's ``GRPOTrainer``, all of them with TRL's meaning. What it adds:

    * ``args`` may be a :class:`perl.PeftRLConfig`; then, without a ``peft_config``, the adapter is built from its
      ``peft_*`` fields.
    * ``model`` may be ``"sandbox:base"``.
    * Checkpoints are complete or do not count, and a resumed run ends like one that was never interrupted.
    * Nothing is sent anywhere (TRL sends usage statistics).

    Raises:
        perl.errors.ModelError: The adapter would touch no module, or nothing would be trained.
    """

    def __init__(  # noqa: PLR0913 (TRL's signature)
        self,
        model: Any,  # noqa: ANN401 (TRL's signature)
        reward_funcs: Any = None,  # noqa: ANN401
        args: GRPOConfig | None = None,
        train_dataset: Any = None,  # noqa: ANN401
        eval_dataset: Any = None,  # noqa: ANN401
        processing_class: Any = None,  # noqa: ANN401
        reward_processing_classes: Any = None,  # noqa: ANN401
        callbacks: Any = None,  # noqa: ANN401
        optimizers: Any = (None, None),  # noqa: ANN401
        quantization_config: Any = None,  # noqa: ANN401
        peft_config: Any = None,  # noqa: ANN401
        tools: Any = None,  # noqa: ANN401
        rollout_func: Any = None,  # noqa: ANN401
        environment_factory: Any = None,  # noqa: ANN401
    ) -> None:
        """Takes what TRL's ``GRPOTrainer`` takes."""
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = PeftRLConfig(f"{name.rstrip('/').split('/')[-1].replace(':', '-')}-GRPO")
        if isinstance(model, str):
            model = resolve_model(model)
        if isinstance(model, PeftModel):
            check_trainable(model)
        elif peft_config is None and isinstance(args, PeftRLConfig):
            peft_config = build_config(args.peft)
        if isinstance(model, PreTrainedModel) and peft_config is not None:
            check_targets(model, peft_config)
        self._rewards_NK: torch.Tensor | None = None
        self._step: int
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        check_trainable(self.model)
        if not self.use_vllm:
            fill_with_neutral(self.generation_config)
        self._loss_settings = LossSettings(
            loss_type=args.loss_type,
            ratio_level=args.importance_sampling_level,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=args.delta,
            beta=args.beta,
            correct_kl=args.use_bias_correction_kl,
            max_completion_length=args.max_completion_length,
            sapo_temperature_pos=args.sapo_temperature_pos,
            sapo_temperature_neg=args.sapo_temperature_neg,
            vespo_k_pos=args.vespo_k_pos,
            vespo_lambda_pos=args.vespo_lambda_pos,
            vespo_k_neg=args.vespo_k_neg,
            vespo_lambda_neg=args.vespo_lambda_neg,
        )

    @property
    def policy(self) -> torch.nn.Module:
        """The model with its adapter, without the wrappers of distributed training."""
        return self.accelerator.unwrap_model(self.model)

    def policy_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The policy's log-probabilities at temperature 1, without dropout and without gradient.

        Args:
            input_ids: (B, T) int64.
            attention_mask: (B, T) 1 for tokens, 0 for padding.

        Returns:
            (B, T-1) float32, log p(token t+1 | tokens up to t).
        """
        return self._without_dropout(token_log_probs, input_ids, attention_mask)

    def reference_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The reference policy's log-probabilities; shapes and meaning as in :meth:`policy_log_probs`."""
        return self._without_dropout(reference_log_probs, input_ids, attention_mask)

    def save_adapter(self, path: str | Path) -> None:
        """Saves the adapter alone; plain PEFT loads it on the base.

        Args:
            path: Folder to write, replaced if it exists.
        """
        if self.accelerator.is_main_process:
            write_adapter(self.policy, Path(path), *base_identity(self.policy))

    def latest_group(self) -> list[dict[str, Any]]:
        """The newest logged completions of one prompt: prompt, completion, rewards by name, advantage."""
        rows = min(self.num_generations, len(self._logs["prompt"]))
        return [
            {
                "prompt": self._logs["prompt"][i],
                "completion": self._logs["completion"][i],
                "rewards": {name: values[i] for name, values in self._logs["rewards"].items()},
                "advantage": self._logs["advantages"][i],
            }
            for i in range(rows)
        ]

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
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Replaces ``Trainer.create_optimizer`` to prove that every trainable parameter is in the optimizer."""
        optimizer = super().create_optimizer(model)
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # those hold shards under other identities
            check_optimizer(self.model if model is None else model, optimizer)
        return optimizer

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,  # noqa: ARG002 (TRL's signature)
    ) -> None:
        """Replaces TRL's card, which calls an adapter a model and a local base "None", by ours."""
        if not self.accelerator.is_main_process:
            return
        base, revision = base_identity(self.policy)
        facts = CardFacts(
            base=base,
            revision=revision,
            name=model_name,
            method=self.args.peft_method if isinstance(self.args, PeftRLConfig) else None,
            dataset=dataset_name,
            trainable_parameters=trainable_parameters(self.policy),
            steps=self.state.global_step,
            seed=self.args.seed,
        )
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "README.md", render_card(facts))

    def _send_telemetry(self) -> None:
        """Replaces TRL's usage statistics: nothing is sent."""

    def _get_train_sampler(self, dataset: Any = None) -> "torch.utils.data.Sampler[int]":  # noqa: ANN401
        """Replaces TRL's sampler by one with the same order that can start in any epoch."""
        sampler = super()._get_train_sampler(dataset)
        if type(sampler) is RepeatSampler:
            return _ResumableRepeatSampler(sampler, epoch_of=lambda: int(self.state.epoch or 0))
        return sampler

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Extends TRL's rewards: keeps them, (N, K) over all processes, to form the advantages from."""
        self._rewards_NK = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_NK

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Extends TRL's rollouts: the advantages are ours, exactly 0 in a group whose rewards agree."""
        generations = self.num_generations if self.model.training else self.num_generations_eval
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        advantages_N = self._advantages(generations)
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages_N), len(logged))):
            logged.pop()
        logged.extend(advantages_N.tolist())
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = advantages_N[first : first + len(inputs)]
        return output

    def _advantages(self, generations: int) -> torch.Tensor:
        """(N,) advantages over all processes, from the rewards of the last rollouts."""
        rewards_NK = self._rewards_NK
        if rewards_NK is None:
            raise RuntimeError("no rewards were calculated")
        weights_K = self.reward_weights.to(rewards_NK.device)
        if self.multi_objective_aggregation == "normalize_then_sum":
            rewards_PGK = rewards_NK.view(-1, generations, rewards_NK.size(1))
            return normalized_sum_advantages(rewards_PGK, weights_K).flatten()
        rewards_PG = weighted_rewards(rewards_NK, weights_K).view(-1, generations)
        return group_advantages(rewards_PG, scale=self.scale_rewards).flatten()

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Replaces TRL's loss by ``losses.py``; the same number, from functions that stand alone.

        Options that weigh tokens by their entropy, and auxiliary losses, are left to TRL.
        """
        if (
            self.top_entropy_quantile < 1.0
            or self._entropy_bonus_enabled
            or self.aux_loss_enabled
            or self.off_policy_mask_threshold is not None
        ):
            return super()._compute_loss(model, inputs)
        mask_NT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        policy_log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            **{name: inputs.get(name) for name in _FORWARD_INPUTS},
        )
        advantages = inputs["advantages"]
        old_log_probs = inputs.get("old_per_token_logps")
        loss_inputs = LossInputs(
            policy_log_probs=policy_log_probs,
            old_log_probs=policy_log_probs.detach() if old_log_probs is None else old_log_probs,
            advantages=advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
            mask=mask_NT,
            reference_log_probs=inputs.get("ref_per_token_logps"),
            sampling_ratio=inputs.get("importance_sampling_ratio"),
        )
        result = objective(loss_inputs, self._loss_settings)
        self._log_loss_metrics(result, loss_inputs, entropies)
        return (result.per_token * self._weights(mask_NT, inputs)).sum()

    def _weights(self, mask_NT: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """(N, T) weights of a micro-batch's tokens in the loss of its optimizer step."""
        micro_batches, generation_batches = 1.0, 1.0  # evaluation neither accumulates nor splits
        if self.model.training:
            micro_batches = self.current_gradient_accumulation_steps
            generation_batches = self.args.steps_per_generation
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return token_weights(
            mask_NT,
            self.loss_type,
            micro_batches=micro_batches,
            window_tokens=tokens * micro_batches / generation_batches,
            max_completion_length=self.max_completion_length,
        )

    def _log_loss_metrics(self, result: Objective, inputs: LossInputs, entropies: torch.Tensor) -> None:
        """Logs what TRL logs, under its names, as means over the tokens of all processes."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        mask = inputs.mask

        def mean(values: torch.Tensor) -> float:
            on_rows = values.size(1) == 1
            total = values.sum() if on_rows else (values * mask).sum()
            count = mask.new_tensor(values.size(0)) if on_rows else mask.sum()
            totals = self.accelerator.reduce(torch.stack([total.float(), count.float()]), reduction="sum")
            return (totals[0] / totals[1].clamp(min=1.0)).item()

        def row_means(values: torch.Tensor) -> torch.Tensor:
            rows = values.squeeze(1) if values.size(1) == 1 else (values * mask).sum(-1) / mask.sum(-1)
            return self.accelerator.gather(rows)

        if result.kl is not None:
            metrics["kl"].append(mean(result.kl))
        metrics["entropy"].append(mean(entropies))
        settings = self._loss_settings
        if settings.loss_type in _CLIPPED_LOSSES:
            low = ((result.ratio < 1 - settings.epsilon_low) & (inputs.advantages < 0)).float()
            high = ((result.ratio > 1 + settings.epsilon_high) & (inputs.advantages > 0)).float()
            metrics["clip_ratio/low_mean"].append(mean(low))
            metrics["clip_ratio/high_mean"].append(mean(high))
            metrics["clip_ratio/region_mean"].append(mean(torch.maximum(low, high)))
            metrics["clip_ratio/low_min"].append(nanmin(row_means(low)).item())
            metrics["clip_ratio/high_max"].append(nanmax(row_means(high)).item())
        elif settings.loss_type == "cispo":
            clipped = (result.ratio > settings.epsilon_high) & (inputs.advantages > 0)
            metrics["cispo_clip_ratio"].append(mean(clipped.float()))
        elif result.vespo_weight is not None:
            metrics["vespo/phi_seq_mean"].append(mean(result.vespo_weight))

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
        self.state = state
        return TrainOutput(state.global_step, math.nan, {})

    def _without_dropout(self, log_probs: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        policy = self.policy
        was_training = policy.training
        policy.eval()
        try:
            with torch.no_grad():
                return log_probs(policy, input_ids.to(self.args.device), attention_mask.to(self.args.device))
        finally:
            policy.train(was_training)


class _ResumableRepeatSampler(RepeatSampler):
    """TRL's order of prompts, the same in every epoch whether or not the epochs before it were walked through.

    TRL draws one permutation an epoch from one generator; a resumed run would begin with the first again.
    """

    def __init__(self, sampler: RepeatSampler, epoch_of: Any) -> None:  # noqa: ANN401 (a callable)
        super().__init__(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        self.epoch_of = epoch_of

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch_of()):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()
