"""A training step in bfloat16 by one trainer: tokens/s, MFU, peak memory.

model, tokens, trainer -> numbers

Three trainers take the same rollouts, LoRA of rank 16 on all linear layers, AdamW, activations recomputed by all:
ours, TRL's GRPOTrainer, and TRL's AsyncGRPOTrainer (``async_grpo.py`` says what stands in for its servers).

* 16k: two rows of exactly 16,384 tokens, each a micro-batch: what prime-rl publishes for one H100.
* 2k: 32 completions of four prompts, lognormal with a mean of 600 and at most 2,048 tokens with their prompts, one of
  the four groups without a signal. GRPOTrainer pads eight rows a micro-batch; AsyncGRPOTrainer packs all into one row.

Two steps of short rows warm up, then the step is taken twice; the faster one counts, from the first micro-batch to the
end of the optimizer's step. Tokens are all of all rows, whatever a trainer leaves out, so tokens/s compare. MFU: the
FLOPs that the gradient needs at least (``step_flops.py``) over seconds and the GPU's stated peak; prime-rl's MFU counts
as that project does. "planned" is what ``perl plan`` predicts for our trainer.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from step_cases import Case, Rollout, Scale, draw_rollouts, make_base
from step_flops import ideal_flops, model_size
from step_turns import RANK, how_it_ran, make_trainer, tokens_of

from gpu_rows.async_grpo import make_async_trainer
from gpu_rows.machine import Attentions
from gpu_rows.models import TINY_VOCABULARY, VOCABULARY, flops_per_token_of_prime_rl, scale_of, stated_peak
from gpu_rows.setting import GIB, Numbers, Setting
from perl.packing.attention import KERNEL_CALL
from perl.training.decoder import Types, decoder_of
from perl.training.memory_estimate import Attention, GpuWork, estimate_memory

LONG = 16_384
LAST = 3  # of the steps: two warm up, two are measured
# One H100, RL with LoRA of rank 16, FlashAttention 3, recomputation; benchmarks of prime-rl, February 2026.
PUBLISHED = {
    ("0.6B", LONG): "prime-rl on an H100: 13,340 tokens/s, 5.1 GiB reserved",
    ("4B", LONG): "prime-rl on an H100: 6,230 tokens/s, MFU 21.7 %, 23.3 GiB reserved",
}


@dataclass(frozen=True)
class Work:
    """A step to take: the lengths, the model, the rollouts of the step and of those that warm up."""

    case: Case
    scale: Scale
    rollouts: list[Rollout]
    warm: list[Rollout]


def step(setting: Setting, model: str, tokens: int, trainer: str) -> Numbers:
    """A row: of which model, rows of how many tokens, by which trainer (perl, GRPO, AsyncGRPO)."""
    work = work_of(setting, model, tokens, trainer)
    size = model_size(make_base(work.case, work.scale, empty=True), RANK)
    groups = [rollout.lengths for rollout in work.rollouts]
    taken = train(setting, work, trainer)
    seconds = taken["step_seconds"]
    speed = tokens_of(groups, len(groups), with_reference=False)["real"] / seconds
    peak = stated_peak(torch.cuda.get_device_name()) if setting.on_cuda else None
    numbers = {"tokens_per_second": speed, **taken}
    says = f"{speed:,.0f} tokens/s, {seconds:.2f} s"
    if peak:
        numbers["mfu"] = ideal_flops(size, groups, with_reference=False) / seconds / peak
        says += f", MFU {numbers['mfu']:.1%}"
    if peak and tokens == LONG:
        layers, width = work.scale.shape["num_hidden_layers"], work.scale.width
        count = flops_per_token_of_prime_rl(size, layers=layers, width=width, tokens=tokens)
        numbers["mfu_prime_rl"] = count * speed / peak
        says += f" ({numbers['mfu_prime_rl']:.1%} by prime-rl's count)"
    says += f", peak {taken['peak_gib']:.2f} GiB, {taken['reserved_gib']:.2f} reserved"
    if trainer == "perl" and tokens == LONG:
        numbers["planned_gib"] = planned(setting, work, Types()) / GIB
        says += f", planned {numbers['planned_gib']:.2f}"
    says += "" if taken.get("ok", True) else f"; not packed: {taken['why_not']}"
    published = PUBLISHED.get((model, tokens)) if trainer == "perl" else None
    return {**numbers, "says": f"{says}; {published}" if published else says}


def work_of(setting: Setting, model: str, tokens: int, trainer: str) -> Work:
    """The rollouts, and the model with what the trainer is told of micro-batches."""
    vocabulary = TINY_VOCABULARY if setting.tiny else VOCABULARY
    if tokens == LONG:
        length = 48 if setting.tiny else tokens
        case = Case("16k", (1, 1), (length - 1, length - 1), vocabulary=vocabulary, generations=2)
        groups, rows = 1, {"perl": 2}.get(trainer, 1)
    else:
        case = Case("2k", (160, 240), (32, 1808), lognormal=(600.0, 0.8), dead=0.25, vocabulary=vocabulary)
        case = replace(case.shorter(32), vocabulary=vocabulary) if setting.tiny else case
        groups, rows = 4, {"AsyncGRPO": 32}.get(trainer, 8)
    options = {"gradient_checkpointing": True, "optim": "adamw_torch_fused", "learning_rate": 1e-5}
    if trainer == "perl" and tokens == LONG:
        options["train_tokens_per_microbatch"] = case.completions[1] + 1
    scale = scale_of(model, tiny=setting.tiny, device=setting.device, **options)
    scale = replace(scale, groups=groups, rows=rows)
    # LoRA's A moves in the second step only, and until then a run of ours watches each tensor.
    short = replace(case, completions=(8, 16), lognormal=None, dead=0.0)
    return Work(case, scale, draw_rollouts(case, groups), draw_rollouts(short, 2 * groups))


def train(setting: Setting, work: Work, trainer: str, watch: Any = None, base: Any = None) -> Numbers:  # noqa: ANN401
    """Seconds and memory of the step.

    Args:
        setting: Where.
        work: What is trained on.
        trainer: By whom.
        watch: A context that the last step is taken in, if any; the step before it counts then.
        base: Instead of a random one.
    """
    # In the process that loaded a base it is of the peak; what earlier rows have left is not.
    held = torch.cuda.memory_allocated() if setting.on_cuda and base is None else 0
    rollouts, folder = work.warm + 2 * work.rollouts, str(setting.folder)
    if trainer == "AsyncGRPO":
        made, meter = make_async_trainer(work.case, work.scale, rollouts, folder)
    else:
        name = {"GRPO": "TRL"}.get(trainer, trainer)
        made, meter = make_trainer(name, work.case, work.scale, rollouts, folder, base)
    operators = Attentions()
    meter.watch, meter.watched = (operators, 0) if watch is None else (watch, LAST)
    made.train()
    steps = [LAST - 1] if watch is not None else [LAST - 1, LAST]
    best = min(steps, key=lambda place: meter.seconds[place])
    numbers = {
        "step_seconds": meter.seconds[best],
        "peak_gib": (max(meter.totals[place] for place in steps) - held) / GIB,
        "reserved_gib": max(meter.reserved[place] for place in steps) / GIB,
        "attention": list(operators.names),
    }
    if trainer == "perl":
        numbers |= {"tokens_in_a_pass": made.log_prob_passes.tokens, "passes": meter.passes[best], **how_it_ran(made)}
    return numbers


def planned(setting: Setting, work: Work, types: Types) -> float:
    """Bytes that ``perl plan`` predicts for the step's peak, without the context of CUDA, which no allocator sees.

    Args:
        setting: Where.
        work: What is trained on.
        types: Of the base's numbers.
    """
    decoder = decoder_of(make_base(work.case, work.scale, empty=True).config)
    if decoder is None:
        raise RuntimeError("perl plan does not know this model")
    tokens = work.case.completions[1] + 1
    attention = Attention(kernel=setting.on_cuda, grouped=KERNEL_CALL is not None and KERNEL_CALL.grouped)
    available = torch.cuda.mem_get_info()[1] if setting.on_cuda else 8 * GIB
    asked = GpuWork(longest_row=tokens, attention=attention, fixed_tokens=tokens)
    estimate = estimate_memory(decoder, types, RANK, asked, available)
    return estimate.weights + estimate.trained.total + estimate.of_pass(recompute=True)
