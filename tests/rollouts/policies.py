"""Policies for tests of engines, and what they make of tokens, computed by a plain forward pass of transformers."""

import copy
import functools

import torch
from peft import PeftModel

from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.recipe.sections import ModelSection, PeftSection
from tests.oracles.sampling import plain_log_probs


@functools.cache
def _base():
    return load_base(ModelSection(), torch.device("cpu")).eval()


def policy_of(seed: int, method: str = "lora", **settings) -> PeftModel:
    """A policy with an adapter of random numbers, far from the base and from that of another seed."""
    torch.manual_seed(seed)
    policy = attach_adapter(copy.deepcopy(_base()), adaptation(PeftSection(method=method, **settings)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    return policy.eval()


def log_probs_of(policy, tokens, temperature: float = 1.0) -> torch.Tensor:
    """(T-1) log p(token t+1 | tokens up to t); of the base, if there is no policy."""
    return plain_log_probs(policy or _base(), tokens, temperature)


def completion_log_probs(policy, prompt, completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token of a completion."""
    return log_probs_of(policy, [*prompt, *completion], temperature)[len(prompt) - 1 :]
