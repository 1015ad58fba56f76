"""PackedGRPOTrainer: TRL's trainer whose passes over rows are packed, and as long as memory allows.

padded batch -> rows -> packed passes -> log-probabilities as TRL wants them

With resumable.py, step.py and trainer.py the only module that knows TRL's and transformers' private methods; each
override says which method it replaces and why. Knows nothing of losses or optimizer steps.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from perl.batching import rows_of
from perl.config import PeftRLConfig
from perl.head import EntropyKind, add_scored_forward, logit_settings
from perl.memory import CPU_TOKENS, MemoryPlan, measure, plan_memory
from perl.methods.fused_lora import fuse_lora
from perl.methods.settings import Adaptation, dropout_of
from perl.model import trainable_parameters
from perl.packing import Row
from perl.resumable import ResumableGRPOTrainer
from perl.scoring import Passes, choose_passes, score, score_all

logger = logging.getLogger("perl")

# A pass without gradient keeps no activations, so it may be longer.
_FORWARD_ONLY = 2


class PackedGRPOTrainer(ResumableGRPOTrainer):
    """GRPOTrainer that runs rows without padding, wherever the model allows it."""

    adaptation: Adaptation
    _scores_rollouts = True

    def prepare_passes(self) -> None:
        """Teaches the model the passes; called once it is complete."""
        self._budget: int | None = self._switch("train_tokens_per_microbatch")
        policy = self.policy
        if self._switch("fused_lora") and self.whole_tensors:
            fuse_lora(policy)
        model: PreTrainedModel = policy.get_base_model() if isinstance(policy, PeftModel) else policy
        float32 = self.args.cast_lm_head_to_fp32
        add_scored_forward(model, logit_settings(model.config, temperature=self.temperature, float32=float32))

    @cached_property
    def passes(self) -> Passes:
        """How rows go through this model; found out, and said if it is not as asked for, when first needed."""
        dropout = dropout_of(self.adaptation.config)
        how = choose_passes(
            self.policy if self.whole_tensors else self.model,
            self.policy,
            padding_free=self._switch("padding_free"),
            share=self._switch("share_prompts") and not dropout,  # a shared prompt would draw one mask for all
        )
        if how.why:
            what = "prompts are not shared" if how.packed else "rows are padded to the longest of each pass"
            logger.warning("%s: %s", what, how.why)
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
        rows = rows_of(dict(zip(names, [*ids, *masks], strict=True)), masks[1])
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
                packed=self.passes.packs(rows),
                columns=logits_to_keep,
                entropy=kind,
            )
        return log_probs_NT, entropies_NT, None

    def _score_all(self, model: torch.nn.Module, rows: Sequence[Row], columns: int) -> torch.Tensor:
        """(N, T) log-probabilities without gradient."""
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing, self.accelerator.autocast():
            return score_all(
                model, rows, budget=self._tokens_without_gradient(rows), columns=columns, **self._grouping(rows)
            )

    def _grouping(self, rows: Sequence[Row]) -> dict[str, bool]:
        """How rows are put into passes."""
        packed = self.passes.packs(rows)
        return {"packed": packed, "share": packed and self.passes.shared}

    def _tokens_in_a_pass(self, rows: Sequence[Row]) -> int:
        """The budget of a pass with gradient; measured when first needed, if it is not given."""
        if self._budget is None:
            plan = self._memory_plan(max(row.tokens for row in rows))
            self._budget = plan.tokens
            model = self.policy.get_base_model() if isinstance(self.policy, PeftModel) else self.policy
            asked = getattr(self.args, "recompute_asked", True)
            if model.is_gradient_checkpointing and not asked and not plan.recompute:
                model.activation_checkpointing_disable()  # type: ignore[operator]
                logger.info("passes of %d tokens fit without recomputing activations", plan.tokens)
        return self._budget

    def _tokens_without_gradient(self, rows: Sequence[Row]) -> int:
        return _FORWARD_ONLY * (self._tokens_in_a_pass(rows) or CPU_TOKENS)

    def _memory_plan(self, longest_row: int) -> MemoryPlan:
        if self.accelerator.device.type != "cuda":
            return MemoryPlan(CPU_TOKENS, recompute=False)
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        with self.accelerator.autocast(), disable_gradient_checkpointing(self.model, None):
            per_token = measure(self.policy if self.whole_tensors else self.model, packed=self.passes.packed)
        return plan_memory(free, trainable_parameters(self.policy), per_token, longest_row=longest_row)

    def _switch(self, name: str) -> Any:  # noqa: ANN401
        """A setting of ours; its default under TRL's own arguments."""
        return getattr(self.args, name, PeftRLConfig.__dataclass_fields__[name].default)
