"""PeftGRPOTrainer: TRL's GRPOTrainer, whose hooks hand over to parts.

TRL's hooks -> OptimizerStep, RolloutSource, LogProbPasses, ResumeState

Each override names the method it replaces or extends, and why; ``docs/trainer.md`` lists all of them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, TrainOutput, has_length
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.importance import SamplingCorrection
from perl.errors import ModelError, warn
from perl.hub.push.requests import retry
from perl.packing.head import EntropyKind
from perl.packing.micro_batches import MicroBatch
from perl.policy.attach import check_trainable
from perl.policy.checkpoint import load_policy
from perl.policy.guards import check_enough_prompts
from perl.policy.sharding import check_taken
from perl.rewards.answers import completion_text
from perl.run.files import named
from perl.run.products import quickened
from perl.run.shards import is_sharded
from perl.trainer import publishing
from perl.trainer.arguments import shown_to_trl
from perl.trainer.arguments.argument_checks import check_arguments, check_sets, check_step, unknown_to_trl
from perl.trainer.arguments.config import own_setting
from perl.trainer.assembly import add_callbacks, askable, guarded_tools, made_optimizer, make_parts
from perl.trainer.callbacks.run_callback import bind_callbacks
from perl.trainer.group_rewards import latest_group, means_of, reads_old, scored_rollouts, selects
from perl.trainer.live import mode_of
from perl.trainer.overrides import (
    LOSS,
    OF_A_LOSS,
    SCORES,
    check_overrides,
    is_replaced,
    reasons_for_trls_loss,
)
from perl.trainer.policy_setup import AdaptedPolicy, default_arguments, given_policy
from perl.trainer.prompts.selection import sampler_of
from perl.trainer.sampling.generation import generated
from perl.trainer.sampling.given_rewards import given_rewards, unique_names
from perl.trainer.step.gradient_exchange import unwrapped
from perl.trainer.step.log_prob_passes import images_of, scored_as_trl


class PeftGRPOTrainer(GRPOTrainer):
    """Trains an adapter with GRPO and its relatives.

    Takes the arguments of TRL's ``GRPOTrainer``, all of them with TRL's meaning. What it adds:

    * ``args`` may be a :class:`perl.PeftRLConfig`; then, without a ``peft_config``, the adapter is built from its
      ``peft_*`` fields, or continued from its ``adapter``, and ``reference`` says what the KL divergence is from.
    * ``model`` may be ``"sandbox:base"``.
    * The base's weights are never written, the reference is exact for every method, and what is saved is what was
      trained, on the published base. Methods with an optimizer or a schedule of their own run as published.
    * Rollouts may come from vLLM, in this process or on servers, which is given the adapter and never the model.
    * A step runs no padding and no zero-advantage sample, gives TRL's gradient, and resumes as if uninterrupted.

    Attributes:
        adaptation: The method and the config of the adapter.
        reference: What the KL divergence is measured against; None if the loss has no such term.
        base_fingerprint: Of the base's weights, once it is known; goes into saved adapters.
        log_prob_passes: How rows go through the policy.
        rollout_source: What samples.
        optimizer_step: Makes the gradient of an optimizer step.
        prompt_selection: Which prompts are sampled; None: they come in TRL's order.
        resume_state: What a checkpoint holds beside transformers' files.
        critic_training: PPO's critic; None: no critic is trained.

    Raises:
        perl.errors.ModelError: The adapter would touch no module, nothing would be trained, the adapter to continue was
            made for another base, or a PeftModel's initialisation has changed its base.
        perl.errors.RecipeError: The adapter's method cannot be trained; says why.
        perl.errors.BrokenPromiseError: A tensor does not move, the start is not the reference, or the base changes.
    """

    beta: float
    reward_func_names: list[str]
    optimizer: torch.optim.Optimizer
    base_fingerprint: str | None = None
    scores_rollouts = True
    _warned_of_pushes = False

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
        """Extends TRL's constructor: the adapter is made here, the reference without a second model, then the parts."""
        args = default_arguments(model) if args is None else args
        check_overrides(self)
        check_arguments(args, own_loss=is_replaced(self, *LOSS))
        check_sets(args, train_dataset, eval_dataset, asks=environment_factory is not None)
        rewards, reward_classes, weights = given_rewards(self, reward_funcs, reward_processing_classes, args)
        given = given_policy(model, args, processing_class, peft_config, quantization_config)
        self.adaptation, self._last_logged = given.adaptation, dict[str, Any]()
        with shown_to_trl.for_construction(args, weights, given.model, loaded=given.loaded):
            super().__init__(
                model=given.model,
                reward_funcs=rewards,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=given.processing_class,
                reward_processing_classes=reward_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config if isinstance(given.model, str) else None,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=guarded_tools(tools, environment_factory, args, given.processing_class),
            )
        check_step(self)
        self.reward_func_names, self.beta = unique_names(self.reward_func_names), args.beta
        given.restore_precision()
        check_trainable(self.model)
        self._adapted = AdaptedPolicy(self, given.adaptation, continued=given.continued)
        self.reference, self.strategy = self._adapted.reference, self._adapted.strategy
        check_taken(own_setting(args, "strategy"), self.strategy)
        add_callbacks(self)
        make_parts(self)

    @property
    def policy(self) -> torch.nn.Module:
        """The model with its adapter, without the wrappers of distributed training."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def whole_tensors(self) -> bool:
        """Whether this process holds the whole of each tensor; under FSDP2 it has a part of the base."""
        return not is_sharded(self.model)

    @property
    def step_is_ours(self) -> bool:
        """Whether rows are re-binned and left out; if not, micro-batches are TRL's and only their rows are packed."""
        return not (reasons_for_trls_loss(self) or is_replaced(self, *OF_A_LOSS))

    @property
    def loss_is_ours(self) -> bool:
        """Whether the loss is ours: in our step, and where a loss of a subclass may call it with settings TRL lacks."""
        return self.step_is_ours or bool(not reasons_for_trls_loss(self) and unknown_to_trl(self.args, ""))

    @property
    def correction(self) -> SamplingCorrection | None:
        """The correction for an engine that samples from other numbers, if there is one."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        return SamplingCorrection(self.vllm_importance_sampling_mode, *bounds)

    def policy_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The policy's log-probabilities at temperature 1, in float32, without dropout and without gradient.

        Args:
            input_ids: (B, T) int64.
            attention_mask: (B, T) 1 for tokens, 0 for padding. Where the base is in shards every process must ask.

        Returns:
            (B, T-1) float32, log p(token t+1 | tokens up to t).
        """
        return self._adapted.log_probs(input_ids, attention_mask)

    def reference_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The reference policy's log-probabilities; shapes and meaning as in :meth:`policy_log_probs`.

        Raises:
            ModelError: A model without an adapter is trained and the loss needs no reference, so none is kept.
        """
        return self._adapted.reference_log_probs(input_ids, attention_mask)

    def save_adapter(self, path: str | Path) -> None:
        """Saves the adapter alone; plain PEFT loads it on the pristine base. Without an adapter, the model.

        Args:
            path: Folder to write, replaced if it exists.
        """
        self._adapted.save(Path(path), self.processing_class, self.base_fingerprint)

    def save_critic(self, path: str | Path) -> None:
        """Saves PPO's critic alone, for ``critic_adapter`` to start from; every process must ask.

        Args:
            path: Folder to write, replaced if it exists.

        Raises:
            ModelError: No critic is trained.
        """
        if self.critic_training is None:
            hint = "algorithm: ppo, or an advantage_estimator that trains one"
            raise ModelError("no critic is trained, so there is none to save", "advantage_estimator", hint)
        self.critic_training.export(Path(path), self.base_fingerprint)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Puts metrics of this step into its log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def latest_group(self) -> list[dict[str, Any]]:
        """The newest logged completions of one prompt: prompt, completion, rewards, advantage, verdicts, token gaps."""
        return latest_group(self._logs, self.num_generations, self.optimizer_step.gaps.rows(self.processing_class))

    def latest_completions(self) -> list[str]:
        """The newest logged completions, of several prompts."""
        return [completion_text(completion) for completion in self._logs["completion"]]

    # Rollouts.

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:  # noqa: ANN401
        """Extends ``Trainer.get_batch_samples``, with which each optimizer step begins: looks further ahead."""
        self._position.begin_step()
        batches = self.rollout_source.look_ahead(epoch_iterator, num_batches)
        return super().get_batch_samples(batches, num_batches, device)

    def _get_train_sampler(self, dataset: Any = None) -> "torch.utils.data.Sampler[int]":  # noqa: ANN401
        """Replaces TRL's sampler by one that can start in any epoch: with the same order, or with chosen prompts."""
        return sampler_of(self, super()._get_train_sampler(dataset))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Extends TRL's rollouts: advantages are ours; log-probabilities come once it is known which rows need them."""
        return scored_rollouts(self, inputs, super()._generate_and_score_completions)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:  # noqa: ANN401 (TRL's)
        """Extends TRL's tokens of prompts: a conversation that no answer can follow is refused."""
        return super()._tokenize_prompts(askable(self, prompts))

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Replaces TRL's generation by the engine's; with transformers by a loop that draws the same in less time."""
        if self.rollout_source.is_served:
            return self.rollout_source.complete(prompt_ids)
        by_trl = partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
        with self.rollout_source.timed():
            return generated(self, prompt_ids, args, by_trl)

    def _tool_call_loop(self, prompts: Any, *args: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Replaces TRL's conversations, but for those that may hold images: calls have limits, and turns stay exact."""
        return self.conversations.hold(partial(super()._tool_call_loop, prompts), *args)

    # Log-probabilities and the loss.

    def run_micro_batch(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Transformers' forward and backward pass of one micro-batch of ours; TRL's also counts and times it."""
        return Trainer.training_step(self, model, batch)

    def add_log_probs(self, rollouts: dict[str, Any]) -> None:
        """Gives rollouts the log-probabilities of the old policy and the reference, where a row's loss needs them.

        The old policy's only where something reads them (:func:`reads_old`), or tokens are selected by them.
        """
        skips = self.step_is_ours and self.model.training and self.optimizer_step.skips
        padded = images_of(rollouts) or is_replaced(self, SCORES)
        self.log_prob_passes.add(
            rollouts,
            self._metrics[mode_of(self.model)],
            old=reads_old(self) or selects(self),
            reference=self.reference if self.beta != 0.0 else None,
            skips=skips and not selects(self),
            score=partial(scored_as_trl, self) if padded else None,
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Replaces TRL's pass over a padded batch: packed, or padded to its own longest row."""
        if not self.scores_rollouts:  # while they are made it is not known yet which rows need it
            return None, None, None
        padded = (model, input_ids, attention_mask, logits_to_keep)
        if compute_aux_loss or any(value is not None for value in images.values()):
            theirs = super()._get_per_token_logps_and_entropies
            return theirs(*padded, batch_size, compute_entropy, compute_aux_loss, **images)
        with_gradient = compute_entropy and self._entropy_bonus_enabled
        entropy: EntropyKind = "gradient" if with_gradient else "value" if compute_entropy else "none"
        return *self.log_prob_passes.of_padded(*padded, entropy), None

    def _prepare_inputs(self, generation_batch: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Extends TRL's preparation: one of ours is prepared already; with others rollouts ahead may begin."""
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        if self.model.training and self._position.at_step_begin:
            self.rollout_source.begin_step()
        return super()._prepare_inputs(generation_batch)

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Extends TRL's loss: of a micro-batch of ours."""
        if isinstance(inputs, MicroBatch):
            return self.optimizer_step.loss_of(model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Replaces TRL's loss where it lacks a setting; adds what a method adds, once for each optimizer step."""
        theirs = super()._compute_loss
        loss: torch.Tensor = (self.optimizer_step.loss_of_batch if self.loss_is_ours else theirs)(model, inputs)
        if not model.training:
            return loss
        return loss + self.optimizer_step.regulariser() / self.current_gradient_accumulation_steps

    # The optimizer step.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:  # noqa: ANN401
        """Extends ``Trainer.train``: resumes bit for bit, from complete checkpoints only.

        What TRL forgets is restored, and without rollouts the last whole step is kept.
        """
        check_step(self)  # a script may have patched it
        self._adapted.check_unchanged()
        bind_callbacks(self)  # those that were added since it was made
        self.optimizer_step.begin_training()
        save = partial(self._save_checkpoint, self.model, trial=None)
        with quickened(self.policy), self.rollout_source.serving(partial(self.resume_state.keep_last_step, save)):
            checkpoint = self.resume_state.chosen(resume_from_checkpoint)
            self.resume_state.restore(checkpoint)
            return super().train(checkpoint, *args, **kwargs)

    def set_initial_training_values(self, args: GRPOConfig, dataloader: Any) -> Any:  # noqa: ANN401 (transformers')
        """Extends ``Trainer.set_initial_training_values``: data that hold no step are refused."""
        check_enough_prompts(args, enough=not has_length(dataloader) or len(dataloader) > 0)
        return super().set_initial_training_values(args, dataloader)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (transformers')
        """Extends ``Trainer._run_epoch``, which takes a step though none is left after the last checkpoint."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (TRL's)
        """Replaces TRL's step of a micro-batch: collects, and runs all of an optimizer step's rows at the last one."""
        if not self.step_is_ours:
            return super().training_step(model, inputs, *args, **kwargs)
        model.train()
        if callable(set_training := getattr(self.optimizer, "train", None)):
            set_training()
        return self.optimizer_step.take(model, inputs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (transformers')
        """Extends ``Trainer._prepare_for_training``: DDP wraps nothing whose gradients our step averages."""
        with unwrapped(self, ours=self.step_is_ours and not is_replaced(self, "training_step")):
            return super()._prepare_for_training(*args, **kwargs)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Extends ``Trainer.create_optimizer``: the method's own optimizer, which must hold all that trains."""
        return made_optimizer(self, partial(super().create_optimizer, model), self.model if model is None else model)

    # Checkpoints.

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:  # noqa: ANN401
        """Extends Trainer's checkpoint: adds what TRL forgets, seals it, and only then deletes older ones."""
        folder = Path(self._get_output_dir(trial=trial))
        with named(folder), self.resume_state.completing(folder), shown_to_trl.for_checkpoint(self.args):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Replaces ``Trainer._save`` for adapters: what plain PEFT loads on the pristine base, and no pickles."""
        folder = Path(output_dir or self.args.output_dir)
        if not isinstance(self.policy, PeftModel):
            super()._save(output_dir, state_dict)
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle
        elif self.args.should_save:
            self._adapted.write_files(folder, self.processing_class, self.base_fingerprint)
        if self.args.should_save:
            publishing.write_card(self, folder)  # in the place of PEFT's, where it has written one

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Replaces ``Trainer._load_from_checkpoint`` for adapters: every tensor as it was, and the reference."""
        checkpoint = Path(resume_from_checkpoint)
        snapshot = load_policy(checkpoint, self.policy)
        if snapshot is None or not isinstance(self.policy, PeftModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.resume_state.load_roles(checkpoint, snapshot or {})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Replaces ``Trainer._save_optimizer_and_scheduler``, which writes pickles: by the parameters' names."""
        self.resume_state.save_optimizer(Path(output_dir), self.optimizer, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Replaces ``Trainer._load_optimizer_and_scheduler``, which reads pickles."""
        if checkpoint:
            self.resume_state.load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Replaces ``Trainer._save_rng_state``, which writes pickles."""
        self.resume_state.save_random(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Replaces ``Trainer._load_rng_state``, which reads pickles."""
        if checkpoint:
            self.resume_state.load_random(Path(checkpoint))

    def _save_scaler(self, output_dir: str) -> None:
        """Replaces ``Trainer._save_scaler``, which writes pickles."""
        self.resume_state.save_scaler(Path(output_dir))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Replaces ``Trainer._load_scaler``, which reads pickles."""
        if checkpoint:
            self.resume_state.load_scaler(Path(checkpoint))

    def _load_best_model(self) -> None:
        """Replaces ``Trainer._load_best_model`` for adapters; the engine no longer has the policy."""
        best = Path(self.state.best_model_checkpoint)
        if not isinstance(self.policy, PeftModel) or load_policy(best, self.policy) is None:
            super()._load_best_model()
        self.rollout_source.policy_changed()

    def prediction_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Extends TRL's step of an evaluation: each of its metrics counts by rows, however many a batch has."""
        with self._group_rewards.counting_rows(self._metrics["eval"], len(inputs)):
            return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:  # noqa: ANN401
        """Extends ``Trainer.evaluation_loop``: what TRL logs has the name of the set that was evaluated."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update(means_of(self._metrics["eval"], metric_key_prefix))
        return output

    # What is logged and published.

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Extends TRL's log: where no step is left for the entry that closes a training, it has the last one's."""
        metrics = list(self._metrics["train"]) if self.model.training else []
        if "train_runtime" in logs:
            logs.update({name: value for name, value in self._last_logged.items() if name not in metrics})
        super().log(logs, start_time)
        self._last_logged |= {name: logs[name] for name in metrics}

    def _send_telemetry(self) -> None:
        """Replaces TRL's usage statistics: nothing is sent."""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Replaces TRL's card, which calls an adapter a model and a local base "None", by ours."""
        if self.accelerator.is_main_process:
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            publishing.write_card(self, folder, model_name, dataset_name, publishing.tags_of(tags))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Extends what the constructor calls where ``push_to_hub`` is set: what the Hub refuses is one line."""
        retry(partial(super().init_hf_repo, token, private), "push_to_hub", attempts=1)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,  # noqa: ANN401 (transformers' signature)
    ) -> Any:  # noqa: ANN401
        """Replaces ``Trainer.push_to_hub``, which sends pickles and the tokenizer too, in as many commits as it likes.

        One commit of the adapter, its card and its metrics, once the saved adapter was found to be the trained
        one and no path or token is in any file. Arguments and result are transformers', but for ``token``, which must
        be None: it comes from the Hub's own login. ``kwargs`` are :meth:`create_model_card`'s.

        Raises:
            PerlError: The files or the repository are not fit for it, or the Hub refuses or cannot be reached.
        """
        if not isinstance(self.policy, PeftModel):
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        return publishing.push(self, commit_message, blocking, token, revision, private, kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Replaces ``Trainer._push_from_checkpoint``, which sends pickles too; ``hub.push: every_save`` publishes."""
        if not isinstance(self.policy, PeftModel):
            super()._push_from_checkpoint(checkpoint_folder)
        elif self.args.hub_strategy != HubStrategy.END and not self._warned_of_pushes:
            self._warned_of_pushes = True
            warn("PRL310", "checkpoints are not pushed while a script trains; trainer.push_to_hub() pushes")
