"""AdaptedPolicy: the policy that is trained, beside its reference: its log-probabilities, and its adapter on disk.

policy, reference -> log-probabilities at temperature 1; -> a saved adapter
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from trl import GRPOConfig

from perl.errors import ModelError
from perl.methods.settings import Adaptation, starts_as_base
from perl.policy.model import base_identity, evaluating
from perl.policy.precision import in_float32
from perl.policy.reference import Reference, reference_log_probs, token_log_probs
from perl.policy.save_adapter import write_adapter, write_adapter_files, write_model
from perl.policy.sharding import strategy_of
from perl.trainer.config import PeftRLConfig
from perl.trainer.live import LiveTrainer


class AdaptedPolicy:
    """A policy and what its KL divergence is measured against.

    Attributes:
        strategy: How the processes share the work, as it is; None: there is one.
        reference: None if the loss has no such term and there is no adapter.
    """

    def __init__(self, live: LiveTrainer, how: Adaptation, *, continued: bool) -> None:
        """Takes a policy before its first step.

        Args:
            live: Has the policy, which may be prepared for several processes later on.
            how: It is adapted.
            continued: Whether its adapter was trained before.
        """
        self._live, self._how, self.continued = live, how, continued
        args, policy = live.args, live.policy
        self.strategy = strategy_of(live.accelerator, policy)
        needed = isinstance(policy, PeftModel) or args.beta != 0.0
        self.reference = Reference(policy, _reference_spec(args, continued=continued)) if needed else None

    @property
    def starts_as_reference(self) -> bool:
        """Whether the policy must equal its reference before the first step."""
        if self.reference is not None and not self.reference.is_the_base:
            return True
        return self.starts_as_base

    @property
    def starts_as_base(self) -> bool:
        """Whether the policy equals its base before the first step."""
        return not self.continued and starts_as_base(self._how)

    def needed_reference(self) -> Reference:
        """The reference.

        Raises:
            ModelError: A model without an adapter is trained and the loss needs no reference, so none is kept.
        """
        if self.reference is None:
            raise ModelError("without an adapter a reference is kept only where beta is above 0", "train.beta")
        return self.reference

    def log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The policy's, (B, T-1); see :meth:`perl.PeftGRPOTrainer.policy_log_probs`."""
        policy, device = self._live.policy, self._live.args.device
        with evaluating(policy), in_float32(policy):
            return token_log_probs(policy, input_ids.to(device), attention_mask.to(device))

    def reference_log_probs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The reference's, (B, T-1); see :meth:`needed_reference` for what it raises."""
        reference = self.needed_reference()
        policy, device = self._live.policy, self._live.args.device
        with evaluating(policy), in_float32(policy):
            return reference_log_probs(policy, input_ids.to(device), attention_mask.to(device), reference)

    def save(self, path: Path, processing_class: Any, fingerprint: str | None) -> None:  # noqa: ANN401 (TRL's)
        """Writes the adapter alone, or without one the model; on the main process.

        Args:
            path: Folder to write, replaced if it exists.
            processing_class: Goes beside a model.
            fingerprint: Of the base's weights, if it is known.
        """
        policy = self._live.policy
        if not self._live.accelerator.is_main_process:
            return
        if isinstance(policy, PeftModel):
            write_adapter(policy, path, *base_identity(policy), fingerprint)
        else:
            write_model(policy, processing_class, path)

    def write_files(self, folder: Path, processing_class: Any, fingerprint: str | None) -> None:  # noqa: ANN401
        """Writes the adapter's files into a checkpoint, as plain PEFT loads them on the pristine base."""
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter_files(self._live.policy, folder, *base_identity(self._live.policy), fingerprint)
        if processing_class is not None:
            processing_class.save_pretrained(folder)


def _reference_spec(args: GRPOConfig, *, continued: bool) -> str:
    """What the arguments ask for, or the base for a new adapter and the policy at the start for a continued one."""
    asked = args.reference if isinstance(args, PeftRLConfig) else None
    return asked or ("initial" if continued else "base")
