"""Log-probabilities of tokens that are already there.

model, input_ids, attention_mask -> log p(token t+1 | tokens up to t)

One function for policy, old policy and reference: which one it is depends on the adapter that is active.
Shapes: B rows, T tokens, V vocabulary.
"""

import torch
from torch import nn

# Rows whose logits (rows x T x V, float32) stay below this many numbers go through the model together.
_LARGEST_LOGITS = 2**27


def token_log_probs(
    model: nn.Module, input_ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """The model's log-probability of each token given those before it.

    Args:
        model: A causal language model; in evaluation mode if dropout must not act.
        input_ids_BT: (B, T) int64.
        attention_mask_BT: (B, T) 1 for tokens, 0 for padding on either side.
        temperature: What the logits are divided by.

    Returns:
        (B, T-1) float32; entry t belongs to token t+1. Entries of padding mean nothing.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    rows = max(1, _LARGEST_LOGITS // (vocabulary * input_ids_BT.size(1)))
    parts = [
        _rows_log_probs(model, ids, mask, temperature)
        for ids, mask in zip(input_ids_BT.split(rows), attention_mask_BT.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _rows_log_probs(
    model: nn.Module, input_ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    # Positions count tokens, not padding: a row padded on the left gets the numbers it has without padding.
    position_ids_BT = (attention_mask_BT.cumsum(dim=-1) - 1).clamp(min=0)
    logits_BTV = model(
        input_ids=input_ids_BT, attention_mask=attention_mask_BT, position_ids=position_ids_BT, use_cache=False
    ).logits[:, :-1]
    targets_BT1 = input_ids_BT[:, 1:].unsqueeze(-1)
    log_probs_BTV = torch.log_softmax(logits_BTV.float() / temperature, dim=-1)
    return log_probs_BTV.gather(-1, targets_BT1).squeeze(-1)
