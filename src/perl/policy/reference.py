"""Log-probs of tokens that are there, of the policy and of its reference: the base, its start, or one that moves along.

model, input_ids, attention_mask -> log p(token t+1 | tokens up to t); policy, spec -> Reference

Costs an adapter, never a model. The base is the policy with its adapter switched off, which is exact for every method
because no adapter here writes to the base (``attach.py``). Any other reference is a copy of the trained tensors that
takes their place during a forward pass; whatever the method, its config and its initialisation are not run again.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from peft import PeftModel
from torch import nn

# Rows whose logits (rows x T x V, float32) stay below this many numbers go through the model together.
_LARGEST_LOGITS = 2**27
_PROBE_TOKENS = 192


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


def random_tokens(model: nn.Module) -> torch.Tensor:
    """(2, T) int64 on the model's device, always the same, to compare two models on.

    They are long enough for what acts on long rows only (a window of attention, a hook), as far as the model goes.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _PROBE_TOKENS  # type: ignore[union-attr,operator]
    size = 2, min(_PROBE_TOKENS, longest)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(0)).to(
        next(model.parameters()).device
    )


@contextlib.contextmanager
def base_only(policy: PeftModel) -> Iterator[None]:
    """The policy as its base: adapter off, and afterwards on again.

    PEFT's own context manager switches the adapter on by making all of it trainable, parts that a method freezes
    included; here what was frozen stays frozen.
    """
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    try:
        with policy.disable_adapter():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class Reference:
    """Which policy the KL divergence is measured against.

    Attributes:
        spec: As it was asked for.
        every: For ``rolling:N``, N; else None.
        is_the_base: Whether it is the base, which a new start of the same run finds again by itself.
        snapshot: Name -> copy of a trained tensor; empty if the base is found by switching the adapter off.
    """

    def __init__(self, policy: nn.Module, spec: str = "base") -> None:
        """Takes the policy as it is now.

        Args:
            policy: With its adapter, before the first step.
            spec: ``base``, ``initial`` or ``rolling:N``. A policy without an adapter has no other base than itself
                before the first step, which is copied.
        """
        self.spec = spec
        kind, _, steps = spec.partition(":")
        self.every = int(steps) if kind == "rolling" else None
        self.is_the_base = kind == "base"
        self.snapshot: dict[str, torch.Tensor] = {}
        if kind != "base" or not isinstance(policy, PeftModel):
            self.renew(policy)

    def renew(self, policy: nn.Module) -> None:
        """Makes the policy as it is now the reference."""
        self.snapshot = {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Renews a rolling reference every N optimizer steps."""
        if self.every is not None and step % self.every == 0:
            self.renew(policy)

    def load(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Puts back the snapshot of a checkpoint; an empty one leaves the reference as it is."""
        for name, tensor in snapshot.items():
            self.snapshot[name].copy_(tensor)

    @contextlib.contextmanager
    def in_place_of(self, policy: nn.Module) -> Iterator[None]:
        """The policy as the reference; afterwards it is itself again, bit for bit.

        Args:
            policy: The model, without the wrappers of distributed training.
        """
        if not self.snapshot:
            with base_only(policy):
                yield
            return
        parameters = {name: p for name, p in policy.named_parameters() if name in self.snapshot}
        trained = {name: p.data for name, p in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self.snapshot[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = trained[name]


def reference_log_probs(
    policy: nn.Module, input_ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor, reference: Reference | None = None
) -> torch.Tensor:
    """Log-probabilities of the reference at temperature 1, without gradient.

    Args:
        policy: The model with its adapter, which is active again afterwards.
        input_ids_BT: (B, T) int64.
        attention_mask_BT: (B, T) 1 for tokens, 0 for padding.
        reference: None: the base of the policy's adapter.

    Returns:
        (B, T-1) float32, log p(token t+1 | tokens up to t).
    """
    with torch.no_grad(), base_only(policy) if reference is None else reference.in_place_of(policy):
        return token_log_probs(policy, input_ids_BT, attention_mask_BT)
