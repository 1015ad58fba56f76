"""Whether the numbers are right on this device: packed passes, a step beside TRL's, a step that runs out of memory.

Setting -> how far off, how far it may be, "ok"

Packed passes are held to plain transformers in float32, a row at a time. What they may differ by in half precision is
what padded rows do.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from step_cases import Case, cpu_scale, draw_rollouts
from step_turns import adapter_of, difference, make_trainer, take_turn

from gpu_rows.machine import Attentions
from gpu_rows.models import make_ready, random_qwen3, scale_of
from gpu_rows.setting import GIB, Numbers, Setting
from perl.packing.forward import score
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter
from perl.policy.model import base_of

# Length of a prompt: those of its completions.
LENGTHS: dict[int, tuple[int, ...]] = {70: (300, 1, 161, 40), 1: (9, 2), 257: (129, 64), 33: (5,)}
SHORT_LENGTHS: dict[int, tuple[int, ...]] = {7: (3, 1, 16), 1: (9, 2), 20: (5,)}
# In float32: the largest difference of a log-probability in nats, and of the gradient relative to its norm.
LOG_PROB_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 1e-4
# In half precision: times the padded pass's own mean difference, and a spacing of bfloat16.
TIMES_PADDED, FLOOR = 1.5, 2**-7
STEP = Case("check", (4, 60), (1, 400), lognormal=(80.0, 0.9), dead=0.25, vocabulary=4096)
SHORT_STEP = Case("check", (2, 8), (1, 24), lognormal=(8.0, 0.9), dead=0.25, vocabulary=64)
STEP_TOLERANCE = 1e-4  # of the update's norm, in float32
# Of what a step needs, what it is left with when memory is made scarce.
SCARCE = 0.6
# Relative, of updates in passes that were cut otherwise.
SAME = {"cuda": 5e-2, "cpu": 1e-5}


@dataclass(frozen=True)
class Pass:
    """What a pass gives: log-probs of the scored tokens, row by row; the adapter's gradient, end to end."""

    log_probs: torch.Tensor
    gradient: torch.Tensor


def passes(setting: Setting, kind: str, path: str) -> Numbers:
    """Packed rows, with and without recomputation, with prompts shared and alone: the worst of the four.

    Args:
        setting: Where.
        kind: Of the weights: ``float32``, or ``bfloat16`` under autocast.
        path: Of attention: ``kernel``, or ``segment``. Where there is no GPU, rows are run by segment.
    """
    dtype, half = getattr(torch, kind), kind == "bfloat16"
    rows, groups = random_rows(setting)
    alone = [[index] for index in range(len(rows))]
    expected = taken(policy_of(setting, dtype).float(), rows, row_by_row)
    found: list[Numbers] = []
    with (
        Attentions() as operators,
        attention_by(path),
        torch.autocast(setting.device.type, torch.bfloat16, enabled=half),
    ):
        for recompute, shared in itertools.product((False, True), (False, True)):
            policy = policy_of(setting, dtype)
            if recompute:
                base_of(policy).activation_checkpointing_enable({"use_reentrant": False})
                base_of(policy).enable_input_require_grads()
            make_ready(policy)
            packed = taken(policy, rows, partial(scored, groups=groups if shared else alone, packed=True))
            ran = [name for name in operators.names if name.startswith("_varlen_attn")]
            padded = taken(policy, rows, partial(scored, groups=alone, packed=False))
            found.append(judged(packed, padded, expected, half=half))
    worst = max(found, key=lambda one: (not one["ok"], one["gradient"]))
    right_path = not setting.on_cuda or bool(ran) == (path == "kernel")
    ran_by = " + ".join(operators.names) or "math"
    says = f"log-probs off by {worst['log_probs']:.1e} (at most {worst['log_probs_tolerance']:.1e}), gradient by "
    says += f"{worst['gradient']:.1e} ({worst['gradient_tolerance']:.1e}); attention {ran_by}"
    return {**worst, "ok": worst["ok"] and right_path, "operators": list(operators.names), "says": says}


@contextlib.contextmanager
def attention_by(path: str) -> Iterator[None]:
    """Switches FlashAttention off for ``segment``: packed rows then run segment by segment."""
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(path == "kernel")
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def judged(packed: Pass, padded: Pass, expected: Pass, *, half: bool) -> Numbers:
    """How far the packed pass is from what is expected, and whether that is as near as it has to be."""
    log_probs, gradient = differences(packed, expected, half=half)
    tolerances = (LOG_PROB_TOLERANCE, GRADIENT_TOLERANCE)
    if half:
        tolerances = tuple(TIMES_PADDED * own + FLOOR for own in differences(padded, expected, half=half))
    # A yardstick that is infinite would let anything pass, and so would a NaN the other way round.
    ok = log_probs <= tolerances[0] < math.inf and gradient <= tolerances[1] < math.inf
    numbers = {"log_probs": log_probs, "gradient": gradient, "ok": ok}
    return {**numbers, "log_probs_tolerance": tolerances[0], "gradient_tolerance": tolerances[1]}


def differences(found: Pass, expected: Pass, *, half: bool) -> tuple[float, float]:
    """Of the log-probabilities the mean in half precision, else the largest; of the gradient the norm, relative."""
    apart = (found.log_probs - expected.log_probs).abs()
    gradient = (found.gradient - expected.gradient).norm() / expected.gradient.norm()
    return float(apart.mean() if half else apart.max()), float(gradient)


def random_rows(setting: Setting) -> tuple[list[Row], list[list[int]]]:
    """Rows of unequal lengths, some completions of one token, and which of them have their prompt in common."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(2, 128, (count,), generator=generator).to(setting.device)

    rows: list[Row] = []
    groups: list[list[int]] = []
    for prompt_length, completions in (SHORT_LENGTHS if setting.tiny else LENGTHS).items():
        prompt = tokens(prompt_length)
        groups.append(list(range(len(rows), len(rows) + len(completions))))
        for count in completions:
            counts = torch.rand(count, generator=generator) < 0.9
            counts[0] = True
            rows.append(Row(prompt, tokens(count), counts))
    return rows, groups


def policy_of(setting: Setting, dtype: torch.dtype) -> PeftModel:
    """The random model with LoRA off its start, in training mode."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = attach_adapter(random_qwen3(tiny=setting.tiny, dtype=dtype), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(setting.device).train()


def taken(model: PeftModel, rows: Sequence[Row], log_probs_of: Callable[..., torch.Tensor]) -> Pass:
    """Log-probabilities and the gradient of a sum of them with weights that are fixed."""
    model.zero_grad()
    log_probs_S = log_probs_of(model, rows).float()
    weights_S = torch.randn(log_probs_S.shape, generator=torch.Generator().manual_seed(3)).to(log_probs_S.device)
    (log_probs_S * weights_S).sum().backward()
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return Pass(log_probs_S.detach().double(), torch.cat(gradients))


def scored(model: PeftModel, rows: Sequence[Row], *, groups: list[list[int]], packed: bool) -> torch.Tensor:
    """(S,) by one pass of ours."""
    columns = max(row.completion.numel() for row in rows)
    log_probs_NT, _ = score(model, rows, groups, packed=packed, columns=columns, entropy="none")
    return torch.cat([line[: row.completion.numel()][row.scored] for line, row in zip(log_probs_NT, rows, strict=True)])


def row_by_row(model: PeftModel, rows: Sequence[Row]) -> torch.Tensor:
    """(S,) by the model's own forward, a row at a time: no padding, no packing, all logits."""
    found = []
    for row in rows:
        logits_TV = model(input_ids=torch.cat([row.prompt, row.completion])[None]).logits[0].float()
        predicted_CV = logits_TV[row.prompt.numel() - 1 : -1].log_softmax(dim=-1)
        found.append(predicted_CV.gather(1, row.completion[:, None])[:, 0][row.scored])
    return torch.cat(found)


def step_beside_trl(setting: Setting) -> Numbers:
    """How far our update of the adapter is from that of TRL's GRPOTrainer, in float32."""
    case = SHORT_STEP if setting.tiny else STEP
    scale = replace(cpu_scale(64 if setting.tiny else 512, quick=setting.tiny), groups=4)
    scale = replace(scale, arguments={"use_cpu": not setting.on_cuda, "bf16": False})
    rollouts = draw_rollouts(case, scale.groups)
    updates, start = {}, None
    for name in ("TRL", "perl"):
        trainer, meter = make_trainer(name, case, scale, rollouts, str(setting.folder))
        start = start or {key: value.detach().clone() for key, value in adapter_of(trainer).items()}
        updates[name] = take_turn(trainer, meter, start)
    off = difference(updates["perl"], updates["TRL"])
    says = f"updates differ by {off:.1e} (at most {STEP_TOLERANCE:.1e})"
    return {"difference": off, "ok": off <= STEP_TOLERANCE, "says": says}


def out_of_memory(setting: Setting) -> Numbers:
    """Three turns of one step: with enough memory, with too little, with enough again.

    The update must be the same, passes shorter after the second turn, and memory back to where it was. On a CPU the
    missing memory is an exception at the place where it would come.
    """
    case = Case("scarce", (100, 200), (32, 2048), lognormal=(600.0, 0.8), vocabulary=32_768)
    case = case.shorter(32) if setting.tiny else case
    scale = replace(scale_of("0.6B", tiny=setting.tiny, device=setting.device), groups=2, rows=case.generations)
    if not setting.on_cuda:  # exact
        scale = replace(scale, bf16=False, arguments={**scale.arguments, "bf16": False})
    trainer, meter = make_trainer("perl", case, scale, draw_rollouts(case, scale.groups), str(setting.folder))
    start = {name: parameter.detach().clone() for name, parameter in adapter_of(trainer).items()}
    turns = []
    for scarce in (False, True, False):
        with too_little(trainer, meter.peaks[-1] or 0) if scarce else contextlib.nullcontext():
            update = {name: tensor.cpu() for name, tensor in take_turn(trainer, meter, start).items()}
        held = torch.cuda.memory_allocated() if setting.on_cuda else 0
        turns.append((update, meter.peaks[-1] or 0, held, trainer.log_prob_passes.tokens))
    (first, peak, held, tokens), (second, _, _, fewer), (_, later, left, _) = turns
    off, tolerance = difference(second, first), SAME[setting.device.type]
    back = not setting.on_cuda or (later <= 1.05 * peak and left <= held + 2**21)
    says = f"passes of {tokens} tokens, then {fewer}; updates differ by {off:.1e} (at most {tolerance:.1e}); "
    says += f"peak {peak / GIB:.3f} GiB, later {later / GIB:.3f}"
    return {
        "difference": off,
        "tokens": [tokens, fewer],
        "ok": fewer < tokens and off <= tolerance and back,
        "says": says,
    }


@contextlib.contextmanager
def too_little(trainer: Any, needed: int) -> Iterator[None]:  # noqa: ANN401 (a trainer)
    """The device filled but for a part of what a step needs; on a CPU passes that are too long raise."""
    if trainer.args.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        ballast = torch.empty(max(free - int(SCARCE * needed), 0), dtype=torch.uint8, device=trainer.args.device)
        try:
            yield
        finally:
            del ballast
            torch.cuda.empty_cache()
        return
    logged = trainer.state.log_history[-1]
    loss_of, limit = trainer.optimizer_step.loss_of, SCARCE * logged["tokens/run"] / logged["tokens/passes"]

    def failing(model: Any, batch: Any) -> torch.Tensor:  # noqa: ANN401
        if batch.tokens > limit:
            raise torch.OutOfMemoryError(f"{batch.tokens} tokens")
        loss: torch.Tensor = loss_of(model, batch)
        return loss

    trainer.optimizer_step.loss_of = failing
    try:
        yield
    finally:
        del trainer.optimizer_step.loss_of
