"""PackedGRPOTrainer: TRL's trainer whose passes over rows are packed, as few as needed and as long as memory allows.

padded batch -> rows -> packed passes -> log-probabilities of policy, old policy and reference as TRL wants them

One of the six modules that know TRL's and transformers' private methods; each override says which method it replaces
and why. Knows nothing of losses or optimizer steps.
"""

import contextlib
import heapq
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from trl.models.utils import disable_gradient_checkpointing

from perl.algorithms.importance import SamplingCorrection
from perl.errors import ModelError
from perl.methods.settings import Adaptation
from perl.packing.compiled import check_compiler, compile_layers
from perl.packing.forward import Passes, choose_passes, score, score_all
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import EntropyKind, add_scored_forward, logit_settings
from perl.packing.memory import CPU_TOKENS, free_bytes, measure, plan_memory
from perl.packing.micro_batches import have_advantage, rows_of
from perl.packing.rope import rope_width
from perl.packing.rows import Row
from perl.policy.model import base_of, trainable_parameters
from perl.policy.reference import Reference
from perl.run.threads import threads_for
from perl.trainer.config import PeftRLConfig
from perl.trainer.overrides import is_replaced
from perl.trainer.resume_state import ResumableGRPOTrainer

logger = logging.getLogger("perl")

# What a subclass may have replaced; then every micro-batch goes through its methods, as in TRL.
_SCORES = "_get_per_token_logps_and_entropies"
_REPLACEABLE = (
    "compute_loss",
    "_compute_loss",
    _SCORES,
    "_prepare_inputs",
    "get_off_policy_mask",
    "get_gamma_weights",
)
MASKED = "rows/masked_fraction"
"""Share of the rows of which no token is in the loss, as of truncated ones with ``mask_truncated_completions``."""
# Inputs of multimodal models, handed through to the forward pass as TRL does.
_IMAGES = (
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
# Prompts whose tokens are counted to know the longest: its text is one of the longest.
_LONGEST_TEXTS = 64
# A pass without gradient keeps no activations, so it may be longer.
_FORWARD_ONLY = 2


class PackedGRPOTrainer(ResumableGRPOTrainer):
    """GRPOTrainer that runs rows without padding, wherever the model allows it."""

    adaptation: Adaptation
    beta: float
    vllm_importance_sampling_correction: bool
    _scores_rollouts = True
    _scored_tokens: int | None = None
    _copy_cost = 0.0

    def prepare_passes(self) -> None:
        """Teaches the model the passes; called once it is complete."""
        self._budget: int | None = self._switch("train_tokens_per_microbatch")
        if self._switch("fused_lora") and self.whole_tensors:
            fuse_lora(self.policy)
        model = base_of(self.policy)
        float32 = self.args.cast_lm_head_to_fp32
        self._width_of = rope_width(model)
        compiles = self._switch("compile_layers")
        if compiles:
            check_compiler(self.accelerator.device)
        settings = logit_settings(model.config, temperature=self.temperature, float32=float32)
        add_scored_forward(model, settings, fused=self._switch("fused_head"), compiled=compiles)

    @cached_property
    def step_is_ours(self) -> bool:
        """Whether rows are re-binned and left out; if not, micro-batches are TRL's and only their passes are packed.

        TRL weighs tokens by the entropies of a whole micro-batch, adds a router's loss or an entropy term of one, and
        sends images along; a subclass may have a loss of its own.
        """
        return not (
            self.top_entropy_quantile < 1.0
            or self._entropy_bonus_enabled
            or self.aux_loss_enabled
            or self._is_vlm
            or is_replaced(self, *_REPLACEABLE)
        )

    @property
    def correction(self) -> SamplingCorrection | None:
        """The correction for an engine that samples from other numbers, if there is one."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        return SamplingCorrection(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )

    @property
    def skips_dead_rows(self) -> bool:
        """Whether a row without an advantage adds exactly nothing."""
        return bool(self._switch("skip_zero_advantage")) and self.beta == 0.0

    def needed_reference(self) -> Reference:
        """The reference.

        Raises:
            ModelError: A model without an adapter is trained and the loss needs no reference, so none is kept.
        """
        if self.reference is None:
            raise ModelError("without an adapter a reference is kept only where beta is above 0", "train.beta")
        return self.reference

    @contextlib.contextmanager
    def without_log_probs(self) -> Iterator[None]:
        """Keeps TRL from passes over the rollouts; those of :meth:`add_log_probs` take their place.

        Where the loss is TRL's, so are the old policy's passes.
        """
        beta, self.beta = self.beta, 0.0
        corrects = self.vllm_importance_sampling_correction
        if self.step_is_ours:
            self._scores_rollouts = self.vllm_importance_sampling_correction = False
        try:
            yield
        finally:
            self.beta, self.vllm_importance_sampling_correction, self._scores_rollouts = beta, corrects, True

    @cached_property
    def passes(self) -> Passes:
        """How rows go through this model; found out, and said if it is not as asked for, when first needed."""
        dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in self.policy.modules())
        with self.accelerator.autocast():  # whoever asks: the types decide what difference is rounding
            how = choose_passes(
                self.policy if self.whole_tensors else self.model,
                self.policy,
                padding_free=self._switch("padding_free"),
                share=self._switch("share_prompts") and not dropout,  # a shared prompt would draw one mask for all
            )
        if how.why:
            what = "prompts are not shared" if how.packed else "rows are padded to the longest of each pass"
            logger.warning("%s: %s", what, how.why)
        if self._switch("compile_layers"):
            why = compile_layers(base_of(self.policy), packed=how.packed, whole=self.whole_tensors)
            if why:
                logger.warning("layers are not compiled: %s", why)
        return how

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
        """Replaces TRL's pass over a padded batch: packed, or padded to its own longest row.

        While rollouts are made for a step of ours nothing is computed: which rows need it is not known yet.
        """
        if not self._scores_rollouts:
            return None, None, None
        if compute_aux_loss or any(value is not None for value in images.values()):
            result: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
            result = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **images,
            )
            return result
        parts = (slice(None, -logits_to_keep), slice(-logits_to_keep, None))
        ids, masks = [input_ids[:, part] for part in parts], [attention_mask[:, part] for part in parts]
        names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
        rows = rows_of(dict(zip(names, [*ids, *masks], strict=True)), masks[1], self._width_of)
        if not torch.is_grad_enabled() and not compute_entropy:
            return self._score_all(model, rows, logits_to_keep), None, None
        kind: EntropyKind = "none"
        if compute_entropy:
            kind = "gradient" if self._entropy_bonus_enabled else "value"
        with self.accelerator.autocast():
            log_probs_NT, entropies_NT = score(
                model,
                rows,
                [[index] for index in range(len(rows))],
                # Equal tokens of a group have equal entropies in a rectangle only, and a quantile must not divide them.
                packed=self.passes.packs(rows) and self.top_entropy_quantile >= 1.0,
                columns=logits_to_keep,
                entropy=kind,
            )
        return log_probs_NT, entropies_NT, None

    def _score_all(self, model: torch.nn.Module, rows: Sequence[Row], columns: int) -> torch.Tensor:
        """(N, T) log-probabilities without gradient; on too little memory once more with half the tokens in a pass."""
        longest = max(row.tokens for row in rows)
        while True:
            try:
                return self._score_in_passes(model, rows, columns)
            except torch.OutOfMemoryError:
                # In shards others wait for this one's; a single row cannot be divided.
                if not self.whole_tensors or self._tokens_without_gradient() <= longest:
                    raise
            self._scored_tokens = max(self._tokens_without_gradient() // 2, longest)
            torch.cuda.empty_cache()
            logger.warning("out of memory: rollouts are scored again with %d tokens in a pass", self._scored_tokens)

    def _score_in_passes(self, model: torch.nn.Module, rows: Sequence[Row], columns: int) -> torch.Tensor:
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing, self.accelerator.autocast(), threads_for(model):
            return score_all(
                model,
                rows,
                budget=self._tokens_without_gradient(),
                columns=columns,
                agree=int if self.whole_tensors else self._most,
                **self._grouping(rows),
            )

    def _most(self, count: int) -> int:
        """The largest of all processes' numbers."""
        if self.accelerator.num_processes == 1:
            return count
        return int(self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).max())

    def add_log_probs(self, rollouts: dict[str, Any]) -> None:
        """Gives rollouts the log-probabilities of the old policy and the reference, where a row's loss needs them.

        The old policy's only if an update lies between the rollout and the loss, or by request; else the training
        pass has them.
        """
        self._plan_memory(rollouts["prompt_ids"].size(1))
        mask_NT = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        needed_N = mask_NT.any(dim=1)
        masked_N = self.accelerator.gather(~needed_N)
        self._metrics["train" if self.model.training else "eval"][MASKED].append(masked_N.float().mean().item())
        own = self.step_is_ours and self.model.training
        if own and self.skips_dead_rows and "largest_advantage" in rollouts:
            needed_N &= have_advantage(rollouts["advantages"], rollouts["largest_advantage"])
        indices = needed_N.nonzero().flatten()
        every = self.args.steps_per_generation * self.num_iterations
        aligned = self.args.gradient_accumulation_steps % every == 0
        asked = self.correction is not None and not self._switch("reuse_old_log_probs")
        if own and (not aligned or asked):
            rollouts["old_per_token_logps"] = self._scattered(rollouts, mask_NT, indices)
        if self.beta != 0.0:
            with self.needed_reference().in_place_of(self.policy):
                rollouts["ref_per_token_logps"] = self._scattered(rollouts, mask_NT, indices)

    def _scattered(self, rollouts: dict[str, Any], mask_NT: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(N, T) log-probabilities of some rows, zeros for the others; of all rows where a whole batch is wanted."""
        images = {name: rollouts[name] for name in _IMAGES if rollouts.get(name) is not None}
        if images or is_replaced(self, _SCORES):
            return self._score_as_trl(rollouts, images)
        rows = rows_of(rollouts, mask_NT, self._width_of)
        result_NT = torch.zeros(mask_NT.shape, device=mask_NT.device)
        if len(indices) == 0 and not self.whole_tensors:  # the others' passes need this process
            self._score_all(self.model, rows[:1], mask_NT.size(1))
        elif len(indices):
            chosen = [rows[index] for index in indices.tolist()]
            result_NT[indices] = self._score_all(self.model, chosen, mask_NT.size(1)).to(result_NT)
        return result_NT

    def _score_as_trl(self, rollouts: dict[str, Any], images: dict[str, Any]) -> torch.Tensor:
        """(N, T) log-probabilities without gradient, padded as TRL has them: of images, or by a subclass's method."""
        args = self.args
        checkpointing = disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing:
            log_probs_NT, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([rollouts["prompt_ids"], rollouts["completion_ids"]], dim=1),
                torch.cat([rollouts["prompt_mask"], rollouts["completion_mask"]], dim=1),
                rollouts["completion_ids"].size(1),
                args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size,
                **images,
            )
        return log_probs_NT  # type: ignore[return-value]  # none only while TRL makes rollouts

    def _grouping(self, rows: Sequence[Row]) -> dict[str, Any]:
        """How rows are put into passes."""
        packed = self.passes.packs(rows)
        return {"packed": packed, "share": packed and self.passes.shared, "copy_cost": self._copy_cost}

    def _tokens_in_a_pass(self) -> int:
        """The budget of a pass with gradient; 0: rows as TRL cuts them."""
        return CPU_TOKENS if self._budget is None else self._budget

    def _tokens_without_gradient(self) -> int:
        """The budget of a pass without gradient; less where that was too much before."""
        usual = _FORWARD_ONLY * (self._tokens_in_a_pass() or CPU_TOKENS)
        return usual if self._scored_tokens is None else min(usual, self._scored_tokens)

    def _plan_memory(self, longest_prompt: int) -> None:
        """Measures what fits, once, if it is not given; every process must ask, since they go by the least of them."""
        if self._budget is not None:
            return
        self._budget = CPU_TOKENS
        if self.accelerator.device.type != "cuda":
            return
        with (
            self.accelerator.autocast(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            per_token = measure(
                self.policy if self.whole_tensors else self.model,
                packed=self.passes.packed,
                shared=self.passes.shared,
                fused_head=self._switch("fused_head"),
            )
        longest = self._longest_prompt(longest_prompt) + (self.max_completion_length or 0)
        free = free_bytes(self.asleep_bytes())
        plan = plan_memory(free, trainable_parameters(self.policy), per_token, longest_row=longest)
        found = torch.tensor([[plan.tokens, int(not plan.recompute)]], device=self.accelerator.device)
        tokens, fits = self.accelerator.gather(found).amin(dim=0).tolist()
        self._budget, self._copy_cost = int(tokens), plan.copy_cost
        model = base_of(self.policy)
        if fits and model.is_gradient_checkpointing and not getattr(self.args, "recompute_asked", True):
            model.activation_checkpointing_disable()
        logger.info("%d tokens in a pass, activations %s", tokens, "kept" if fits else "computed again")

    def asleep_bytes(self) -> int:
        """Bytes of the device that are free now and taken again before the next rollouts."""
        return 0

    def _longest_prompt(self, seen: int) -> int:
        """Tokens of the longest prompt that may come: of those with the longest texts in the data set.

        Args:
            seen: Of the rollouts at hand, for data that can be read only once and prompts that are changed on the way.
        """
        data, changed = self.train_dataset, self.rollout_func is not None or self.environment_factories is not None
        if changed or self._is_vlm or not isinstance(data, Dataset) or not len(data):
            return seen
        sizes = enumerate(len(str(prompt)) for prompt in data["prompt"])
        longest = heapq.nlargest(_LONGEST_TEXTS, sizes, key=lambda found: found[1])
        prompt_ids, *_ = self._tokenize_prompts([data[index]["prompt"] for index, _ in longest])
        return max(seen, *map(len, prompt_ids))

    def recompute_activations(self) -> bool:
        """Has activations computed again in backward passes from now on; False: they are already, or cannot be."""
        model = base_of(self.policy)
        if model.is_gradient_checkpointing or not model.supports_gradient_checkpointing:
            return False
        options = dict(self.args.activation_checkpointing_kwargs or {"use_reentrant": False})
        every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        model.activation_checkpointing_enable(options, every_n_layers=every, offload=offload)
        model.enable_input_require_grads()  # without it reentrant recomputation of a frozen base has no gradient
        return True

    def _switch(self, name: str) -> Any:  # noqa: ANN401
        """A setting of ours; its default under TRL's own arguments."""
        return getattr(self.args, name, PeftRLConfig.__dataclass_fields__[name].default)
