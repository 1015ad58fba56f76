"""Policies that are no longer the base, and the base as an engine answers with it once an update is loaded."""

import copy
import json
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.recipe.sections import PeftSection
from tests.oracles.sampling import plain_log_probs
from tests.saved_adapters import published

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
RANK = 4
# Methods that PEFT runs on NF4; the others fail in PEFT itself, or start on weights that a quantised base has not.
ON_NF4 = [
    "lora", "rslora", "dora", "lora_plus", "lora_fa", "adalora", "vera", "miss", "ln_tuning", "ia3", "randlora", "oft",
    "boft", "fourierft", "shira", "gralora", "road",
]  # fmt: skip


def base(dtype=torch.float32):
    return copy.deepcopy(published()).to(dtype)


def perturbed(model, size=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape)
    return model.eval()


def fresh(method, model=None, **settings) -> PeftModel:
    chosen = {"rank": RANK} if "rank" in METHODS[method].settings else {}
    section = PeftSection(method=method, **{**chosen, **settings})
    return attach_adapter(base() if model is None else model, adaptation(section)).eval()


def policy_of(method, model=None, **settings) -> PeftModel:
    """A policy that is no longer the base."""
    return perturbed(fresh(method, model, **settings))


def log_probs(model):
    """(2, 7), each row by a plain forward pass."""
    return torch.stack([plain_log_probs(model.eval(), row.tolist()) for row in PROBE])


def engine_of(update, clean):
    """What answers an engine's requests: the clean base with the update, loaded by plain PEFT or torch."""
    if update.form == "merged":
        if update.tensors.keys() <= dict(clean.named_parameters()).keys():
            clean.load_state_dict(dict(update.tensors), strict=False)
            return clean
        clean.save_pretrained("published")  # as a checkpoint has it
        weights = Path("published") / "model.safetensors"
        held = load_file(weights)
        assert update.tensors.keys() <= held.keys()
        save_file(held | dict(update.tensors), weights, metadata={"format": "pt"})
        loaded = type(clean).from_pretrained("published", dtype=clean.dtype)
        loaded.set_experts_implementation(clean.config._experts_implementation)
        return loaded
    folder = Path("served")
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(update.config))
    save_file(dict(update.tensors), folder / "adapter_model.safetensors")
    return PeftModel.from_pretrained(clean, str(folder))


def log_prob_difference(one, other) -> float:
    """The largest, in nats; computed in float64, so that nothing but the numbers of the two models counts."""
    return (log_probs(copy.deepcopy(one).double()) - log_probs(copy.deepcopy(other).double())).abs().max().item()


def seeded_policy(seed: int, method: str = "lora", **settings) -> PeftModel:
    """A policy with an adapter of random numbers, far from the base and from that of another seed."""
    torch.manual_seed(seed)
    return perturbed(attach_adapter(base(), adaptation(PeftSection(method=method, **settings))))


def completion_log_probs(policy, prompt, completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token of a completion; of the base, if there is no policy."""
    whole = plain_log_probs(policy or published().eval(), [*prompt, *completion], temperature)
    return whole[len(prompt) - 1 :]
