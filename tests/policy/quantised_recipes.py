"""A short run on a quantised base, as values of a recipe; where a policy on one begins."""

import torch

from perl.methods.base_parameters import base_weight
from perl.policy.precision import in_float32
from perl.policy.reference import reference_log_probs, token_log_probs


def begins_at_its_base(policy):
    """The new adapter changes nothing, whatever the type, as the trainer asks before its first step."""
    ids = torch.arange(48).reshape(2, 24) % 96
    with in_float32(policy.eval()):
        ours, base = (
            log_probs(policy, ids, torch.ones_like(ids)) for log_probs in (token_log_probs, reference_log_probs)
        )
    torch.testing.assert_close(ours, base, rtol=0, atol=5e-5)  # the trainer allows 1e-4


def lengths_of_rows(policy):
    """Of each layer with a DoRA: its magnitudes, and the lengths of the rows of W by the numbers of its codes."""
    for layer in policy.modules():
        for dora in getattr(layer, "lora_magnitude_vector", {}).values():
            numbers_OI = base_weight(layer.get_base_layer(), torch.float32).double()
            yield dora.weight.double(), numbers_OI.square().sum(dim=1).sqrt()


def recipe(*, quantization="nf4", peft=None, **sections):
    return {
        "model": {"name": "sandbox:base", "quantization": quantization},
        "peft": {"rank": 2} if peft is None else peft,
        "data": {"train": "sandbox:addition"},
        "rewards": {"accuracy": 1.0},
        "rollout": {"max_completion_length": 24},
        "train": {"max_steps": 4, "prompts_per_step": 2, "num_generations": 4, "learning_rate": 2e-3, "save_steps": 2},
        "eval": {"k": 2, "limit": 8, "max_completion_length": 24},
        "engine": {"device": "cpu", "threads": 1},
    } | sections
