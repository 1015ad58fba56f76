"""Packed passes of a policy with LoRA beside padded ones: log-probabilities and gradients.

type of weights, autocast, recomputation, shared prompts, fused head, compiled layers -> differences from plain
transformers in float32

What the packed pass in half precision may differ by is what the padded one does.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from peft import LoraConfig, PeftModel
from torch._dynamo.utils import counters

from gpu_stages.random_models import compiling_quickly, make_ready, random_qwen3, random_rows, recompute_activations
from gpu_stages.setting import Row as Result
from gpu_stages.setting import Setting
from perl.packing.forward import score
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter

TYPES = ("float32", "bfloat16", "float32 autocast", "bfloat16 autocast")
# Compiled once for each type, which takes a while: type -> whether activations are recomputed and the head is fused,
# whose tiles are compiled then too.
COMPILED = {"float32": False, "bfloat16 autocast": True}
# In float32: the largest difference of a log-probability in nats, and of the gradient relative to its norm.
LOG_PROB_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 1e-4
# In half precision: times the padded pass's own mean difference, and a spacing of bfloat16.
TIMES_PADDED, FLOOR = 1.5, 2**-7


@dataclass(frozen=True)
class Numbers:
    """What a pass gives.

    Attributes:
        log_probs: Of the scored tokens, row by row.
        gradient: Of a weighted sum of them, by the adapter's tensors, end to end.
    """

    log_probs: torch.Tensor
    gradient: torch.Tensor


def pass_cases(setting: Setting) -> dict[str, Callable[[], Result]]:
    """Every type with and without recomputed activations and shared prompts; then what is off unless asked for."""
    cases: dict[str, Callable[[], Result]] = {}
    for kind, recompute, shared in itertools.product(TYPES, (False, True), (False, True)):
        name = " ".join(["pass", kind, *["recomputed"] * recompute, *["shared"] * shared])
        cases[name] = partial(compare, setting.device, setting.tiny, kind, recompute=recompute, shared=shared)
    for kind in TYPES:
        cases[f"pass {kind} fused head"] = partial(compare, setting.device, setting.tiny, kind, shared=True, fused=True)
    for kind, both in COMPILED.items():
        name = " ".join(["pass", kind, *["recomputed fused head"] * both, "compiled"])
        options = {"recompute": both, "shared": True, "fused": both, "compiled": True}
        cases[name] = partial(compare, setting.device, setting.tiny, kind, **options)
    return cases


def compare(
    device: torch.device,
    tiny: bool,
    kind: str,
    *,
    recompute: bool = False,
    shared: bool = False,
    fused: bool | None = None,
    compiled: bool = False,
) -> Result:
    """The row of a case.

    Args:
        device: Where it runs.
        tiny: Whether the model is a toy.
        kind: One of ``TYPES``.
        recompute: Whether activations are computed again in the backward pass.
        shared: Whether prompts are run once.
        fused: As in :func:`make_ready`.
        compiled: As in :func:`make_ready`.
    """
    dtype, autocast = getattr(torch, kind.split()[0]), kind.endswith("autocast")
    expected = plain(device, tiny, dtype)
    model = policy(device, tiny, dtype)
    if recompute:
        recompute_activations(model)
    rows, groups = random_rows(model.config.vocab_size, device, tiny=tiny)
    alone = [[index] for index in range(len(rows))]
    if compiled:
        torch.compiler.reset()  # at a limit of graphs torch runs a layer as it was written
    graphs = counters["stats"]["unique_graphs"]
    with compiling_quickly(tiny), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        make_ready(model, fused=fused, compiled=compiled)
        packed = numbers(model, rows, partial(_scored, groups=groups if shared else alone, packed=True))
        padded = numbers(model, rows, partial(_scored, groups=alone, packed=False))
    if compiled and counters["stats"]["unique_graphs"] == graphs:
        raise RuntimeError("nothing was compiled")
    return judged(packed, padded, expected, half=kind != "float32")


def judged(packed: Numbers, padded: Numbers, expected: Numbers, *, half: bool) -> Result:
    """How far both are from what is expected, and whether the packed pass is as near as it has to be."""
    log_probs, gradient = _differences(packed, expected, half=half)
    padded_log_probs, padded_gradient = _differences(padded, expected, half=half)
    if half:
        tolerances = (TIMES_PADDED * padded_log_probs + FLOOR, TIMES_PADDED * padded_gradient + FLOOR)
    else:
        tolerances = (LOG_PROB_TOLERANCE, GRADIENT_TOLERANCE)
    return {
        "difference": log_probs,
        "padded": padded_log_probs,
        "tolerance": tolerances[0],
        "gradient": gradient,
        "padded_gradient": padded_gradient,
        "gradient_tolerance": tolerances[1],
        # A yardstick that is infinite would let anything pass.
        "ok": log_probs <= tolerances[0] < math.inf and gradient <= tolerances[1] < math.inf,
    }


def _differences(found: Numbers, expected: Numbers, *, half: bool) -> tuple[float, float]:
    """Of the log-probabilities the mean in half precision, else the largest; of the gradient the norm, relative."""
    apart = (found.log_probs - expected.log_probs).abs()
    gradient = (found.gradient - expected.gradient).norm() / expected.gradient.norm()
    return float(apart.mean() if half else apart.max()), float(gradient)


def policy(device: torch.device, tiny: bool, dtype: torch.dtype) -> PeftModel:
    """The random model with LoRA off its start, in training mode."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = attach_adapter(random_qwen3(tiny=tiny, dtype=dtype), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(device).train()


@cache
def plain(device: torch.device, tiny: bool, dtype: torch.dtype) -> Numbers:
    """What transformers and PEFT give in float32 with weights of this type, a row at a time."""
    model = policy(device, tiny, dtype).float()
    rows, _ = random_rows(model.config.vocab_size, device, tiny=tiny)
    return numbers(model, rows, _row_by_row)


def numbers(model: PeftModel, rows: Sequence[Row], log_probs_of: Callable[..., torch.Tensor]) -> Numbers:
    """Log-probabilities and the gradient of a sum of them with weights that are fixed."""
    model.zero_grad()
    log_probs_S = log_probs_of(model, rows).float()
    weights_S = torch.randn(log_probs_S.shape, generator=torch.Generator().manual_seed(3)).to(log_probs_S.device)
    (log_probs_S * weights_S).sum().backward()
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return Numbers(log_probs_S.detach().double(), torch.cat(gradients))


def _scored(model: PeftModel, rows: Sequence[Row], *, groups: list[list[int]], packed: bool) -> torch.Tensor:
    """(S,) by one pass of ours."""
    columns = max(row.completion.numel() for row in rows)
    log_probs_NT, _ = score(model, rows, groups, packed=packed, columns=columns, entropy="none")
    return torch.cat([line[: row.completion.numel()][row.scored] for line, row in zip(log_probs_NT, rows, strict=True)])


def _row_by_row(model: PeftModel, rows: Sequence[Row]) -> torch.Tensor:
    """(S,) by the model's own forward, a row at a time: no padding, no packing, all logits."""
    found = []
    for row in rows:
        logits_TV = model(input_ids=torch.cat([row.prompt, row.completion])[None]).logits[0].float()
        predicted_CV = logits_TV[row.prompt.numel() - 1 : -1].log_softmax(dim=-1)
        found.append(predicted_CV.gather(1, row.completion[:, None])[:, 0][row.scored])
    return torch.cat(found)
