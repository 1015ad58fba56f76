"""Adapters of the sandbox's base on disk, filled with random numbers.

seed, size -> adapter folder
"""

import copy
import functools
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_base
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import ModelSection, PeftSection

BASE = "sandbox:base"


@functools.cache
def published() -> PreTrainedModel:
    return load_base(ModelSection(), torch.device("cpu"))


def clean_base() -> PreTrainedModel:
    """The sandbox's base in float32."""
    return copy.deepcopy(published())


def policy_of(seed: int = 0, size: float = 0.015, base: PreTrainedModel | None = None) -> PeftModel:
    """The base with a LoRA that changes some of its answers; of a seed always the same."""
    torch.manual_seed(seed)
    policy = attach_adapter(base or clean_base(), adaptation(PeftSection(rank=4)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape)
    return policy.eval()


def save_adapter(folder: str | Path, seed: int = 0, size: float = 0.015, base: str = BASE) -> PeftModel:
    """Writes such a LoRA as a run does; the same seed gives the same file.

    Returns:
        The policy.
    """
    policy = policy_of(seed, size)
    write_adapter(policy, Path(folder), base, None, base_fingerprint(policy))
    return policy
