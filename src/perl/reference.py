"""The reference policy: the base, found again by switching the adapter off.

policy -> reference log-probabilities

Costs no second model. Right for every method whose adapter is the identity at the start and leaves the base's weights
alone, which is what ``methods/registry.py`` lists.
"""

import torch
from peft import PeftModel
from trl.trainer.utils import use_adapter

from perl.logprobs import token_log_probs


def reference_log_probs(policy: PeftModel, input_ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the reference at temperature 1, without gradient.

    A policy that continues from an adapter has the reference that TRL keeps for it: a frozen copy named ``ref``.

    Args:
        policy: The model with its adapter, which is active again afterwards.
        input_ids_BT: (B, T) int64.
        attention_mask_BT: (B, T) 1 for tokens, 0 for padding.

    Returns:
        (B, T-1) float32, log p(token t+1 | tokens up to t).
    """
    with torch.no_grad(), use_adapter(policy, "ref" if "ref" in policy.peft_config else None):
        return token_log_probs(policy, input_ids_BT, attention_mask_BT)
