"""AdaLoRA's hooks: the budget's schedule, its moves, the regulariser, the state; its update as factors.

policy, step -> ranks; a trained policy -> the one that is loaded

PEFT has the allocator but nothing calls it outside its own training loop, and its regulariser hangs on a loss that the
model itself computes, which GRPO's does not. Where these functions say nothing, the allocation is PEFT's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from peft import AdaLoraConfig, PeftModel
from peft.tuners.adalora import AdaLoraModel
from peft.tuners.adalora.layer import AdaLoraLayer

from perl.errors import RecipeError
from perl.methods.hooks import Hooks
from perl.methods.registry import METHODS

# Shares of training before the first rank is taken away and after the last one was (the paper: 5 to 20 % and 20 to
# 50 %, depending on the task), and the steps between two allocations.
_WARM_UP, _FINAL = 0.1, 0.3
_ALLOCATIONS = 100
_FEWEST_STEPS = METHODS["adalora"].fewest_steps
_FACTORS = ("lora_A", "lora_B", "lora_E")
_SMOOTHED = ("ipt", "exp_avg_ipt", "exp_avg_unc")
LAYER = AdaLoraLayer
"""What its layers are; one of PEFT's LoRA layers."""


def hooks(policy: PeftModel) -> Hooks:
    """All of them; of the finished adapter of an earlier run only those that its files need."""
    files = Hooks("adalora", after_training=finish, as_loaded=as_loaded)
    if not allocates(policy):
        return files
    return replace(
        files,
        before_training=set_schedule,
        after_step=allocate,
        regulariser=regulariser,
        log=rank_metrics,
        state=allocator_state,
        load_state=load_allocator_state,
    )


def allocates(policy: torch.nn.Module) -> bool:
    """Whether ranks are still to be allocated: an AdaLoRA that is not the finished one of an earlier run."""
    if not (isinstance(policy, PeftModel) and isinstance(policy.base_model, AdaLoraModel)):
        return False
    # One that was loaded with its ranks pruned has factors of these ranks, and nothing to mask.
    ranks = {len(layer.lora_E[policy.active_adapter]) for layer in _layers(policy)}
    return not _config(policy).rank_pattern or ranks <= {_config(policy).init_r}


def set_schedule(policy: PeftModel, steps: int) -> None:
    """Fits the schedule to the true number of optimizer steps; what the user set stays.

    Args:
        policy: An AdaLoRA policy.
        steps: Optimizer steps of the whole training.

    Raises:
        RecipeError: The training is too short for it.
    """
    config = _config(policy)
    if steps < _FEWEST_STEPS:
        raise RecipeError(f"adalora needs {_FEWEST_STEPS} optimizer steps to move ranks in", "train.max_steps")
    config.total_step = steps
    # An importance must have been measured before the last allocation, hence a step before it.
    config.tfinal = config.tfinal or min(round(_FINAL * steps), steps - _FEWEST_STEPS)
    config.tinit = config.tinit or max(0, min(round(_WARM_UP * steps), steps - config.tfinal - _FEWEST_STEPS))
    if config.deltaT == 1:
        config.deltaT = max(1, steps // _ALLOCATIONS)
    if config.tinit > steps - config.tfinal - _FEWEST_STEPS:
        raise RecipeError(
            f"of {steps} steps, tinit {config.tinit} and tfinal {config.tfinal} leave none to move ranks in",
            "peft.kwargs.tinit",
            "leave both out, or train longer",
        )


def allocate(policy: PeftModel, step: int) -> None:
    """Moves the budget after an optimizer step, while its gradients are still there.

    Args:
        policy: The policy.
        step: Number of the optimizer step that was just taken, from 1.
    """
    policy.base_model.update_and_allocate(step)


def regulariser(policy: PeftModel) -> torch.Tensor:
    """Weight x mean of ||P^T P - I||_F and ||Q Q^T - I||_F over the layers (Zhang et al. 2023, eq. 4)."""
    adapter = policy.active_adapter
    distances = []
    for layer in _layers(policy):
        for factor in (layer.lora_A[adapter], layer.lora_B[adapter].T):  # both (rank, features)
            if len(factor):
                distances.append(torch.linalg.matrix_norm(factor @ factor.T - torch.eye(len(factor)).to(factor)))
    return float(_config(policy).orth_reg_weight) * torch.stack(distances).mean()


def ranks(policy: PeftModel) -> list[int]:
    """Rank of each adapted matrix: triples whose singular value is not masked."""
    pattern = _config(policy).rank_pattern
    if pattern:
        return [int(sum(kept)) for kept in pattern.values()]
    return [len(layer.lora_E[policy.active_adapter]) for layer in _layers(policy)]


def rank_metrics(policy: PeftModel) -> dict[str, float]:
    """Mean, least and largest rank of the adapted matrices, to be logged."""
    found = ranks(policy)
    return {"rank/mean": sum(found) / len(found), "rank/min": float(min(found)), "rank/max": float(max(found))}


def allocator_state(policy: PeftModel) -> dict[str, torch.Tensor]:
    """What a checkpoint needs beyond the adapter's tensors: smoothed importances and the ranks."""
    allocator = policy.base_model.rankallocator
    state = {f"{part}/{name}": t for part in _SMOOTHED for name, t in getattr(allocator, part).items()}
    pattern = _config(policy).rank_pattern or {}
    return state | {f"rank_pattern/{name}": torch.tensor(kept) for name, kept in pattern.items()}


def load_allocator_state(policy: PeftModel, state: Mapping[str, torch.Tensor]) -> None:
    """Puts back what :func:`allocator_state` returned, on the policy's device."""
    device = next(policy.parameters()).device
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in (*_SMOOTHED, "rank_pattern")}
    for key, tensor in state.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor.to(device)
    pattern = {name: kept.tolist() for name, kept in parts.pop("rank_pattern").items()}
    _config(policy).rank_pattern = pattern or None
    for part, tensors in parts.items():
        setattr(policy.base_model.rankallocator, part, tensors)


def as_loaded(policy: PeftModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a file with the numbers that they have once plain PEFT has loaded them.

    Where ranks were taken away PEFT makes the factors anew as it loads, in the type of the weight beside them, and
    rounds the file's numbers to it. Rounded before, they are the same on any base; their own type stays.

    Args:
        policy: A policy of any method; only of an AdaLoRA with a pattern of ranks something is rounded.
        tensors: By their names in the adapter's file.
    """
    rounded = dict(tensors)
    for name, layer in _rounded_layers(policy):
        for part in _FACTORS:
            values = tensors[f"{name}.{part}"]
            rounded[f"{name}.{part}"] = values.to(layer.get_base_layer().weight.dtype).to(values.dtype)
    return rounded


def finish(policy: torch.nn.Module) -> None:
    """Makes a trained policy the one that others load: see :func:`as_loaded`.

    Args:
        policy: Whose training is over. Resumed steps go on from the unrounded numbers, which a checkpoint has.
    """
    if not isinstance(policy, PeftModel):
        return
    with torch.no_grad():
        for _, layer in _rounded_layers(policy):
            for part in _FACTORS:
                factor = getattr(layer, part)[policy.active_adapter]
                factor.copy_(factor.to(layer.get_base_layer().weight.dtype))


def factors(layer: AdaLoraLayer, adapter: str, *, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's update P diag(E) Q as two factors (Zhang et al. 2023, eq. 3; the scale is PEFT's).

    Args:
        layer: An adapted layer.
        adapter: Name of the adapter.
        masked: With masked triples, as zeros; otherwise without them. One triple stays: a LoRA cannot have rank 0.

    Returns:
        (rank, in) and (out, rank) float32.
    """
    A_RI, B_OR, E_R1 = (part[adapter].detach().float() for part in (layer.lora_A, layer.lora_B, layer.lora_E))
    kept_R = E_R1.flatten() != 0
    if not len(E_R1) or not (masked or kept_R.any()):
        return A_RI.new_zeros(1, A_RI.shape[1]), B_OR.new_zeros(len(B_OR), 1)
    scale = layer.scaling[adapter] / (layer.ranknum[adapter].detach().float() + 1e-5)
    A_RI, B_OR = E_R1 * A_RI, B_OR * scale
    return (A_RI, B_OR) if masked else (A_RI[kept_R], B_OR[:, kept_R])


def _rounded_layers(policy: PeftModel) -> Iterator[tuple[str, AdaLoraLayer]]:
    """Layers whose factors PEFT rounds as it loads; beside packed weights it keeps float32."""
    if isinstance(policy.base_model, AdaLoraModel) and _config(policy).rank_pattern:
        for name, layer in _named_layers(policy):
            if layer.get_base_layer().weight.is_floating_point():
                yield name, layer


def _config(policy: PeftModel) -> AdaLoraConfig:
    return policy.peft_config[policy.active_adapter]


def _layers(policy: PeftModel) -> list[AdaLoraLayer]:
    return [layer for _, layer in _named_layers(policy)]


def _named_layers(policy: PeftModel) -> Iterator[tuple[str, AdaLoraLayer]]:
    for name, module in policy.named_modules():
        if isinstance(module, AdaLoraLayer) and policy.active_adapter in module.lora_A:
            yield name, module
