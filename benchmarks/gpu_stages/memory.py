"""Whether passes take the memory that is planned for them, and what is left after too little of it.

Setting -> rows: a plan and its true peak, a recovery, or how much the allocator holds in vain

* ``plan``: for a GPU of so many GiB and rows of one length, the pass that :mod:`perl.packing.memory` plans is run, and
  its peak is taken; it must be near what was predicted, and within what the plan had. ``pass``: passes of one size,
  with and without recomputation.
* ``recovery``: a step is taken; then the device is filled until what is left does not suffice, and the step is taken
  again, then a third time with the device free again. The update must be the same, to the rounding of bfloat16 where
  rows are packed otherwise, and memory back to where it was. ``one row``: where halving passes does not help.
* ``fragmentation``: passes of many lengths, then what the allocator has reserved over what was in use at most, with
  and without expandable segments.

On a CPU peaks are counted storage by storage (``live_bytes.py``), and the missing memory is an exception at the place
where it would come.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from live_bytes import LiveBytes
from peft import LoraConfig, PeftModel, get_peft_model
from step_cases import draw_rollouts, make_base
from step_turns import RANK, adapter_of, difference, make_trainer, take_turn

from gpu_stages.random_models import make_ready, recompute_activations
from gpu_stages.setting import Row, Setting
from gpu_stages.shapes import one_row, reasoning, scale_of
from perl.packing.forward import score
from perl.packing.memory import free_bytes, plan_memory
from perl.packing.memory import measure as bytes_of
from perl.packing.rows import Row as TokenRow
from perl.policy.model import trainable_parameters

GIB = 2**30
# Of what a step needs, what it is left with.
_LEFT = 0.6
# True peak over what was predicted. A plan leaves three tenths of the memory unused, so that a pass of 1.4 times
# these bytes still fits: room alone is no check.
_NEAR = (0.8, 1.2)
# Relative, of updates: other passes, other roundings.
_SAME = {"cuda": 5e-2, "cpu": 1e-5}


def measure(setting: Setting) -> Iterator[Row]:
    """Plans first; then what changes the device's state."""
    if setting.tiny:
        names, budgets, rows, sizes = ["Qwen3-0.6B"], [4 / 1024, 24 / 1024], [48, 256], [512]
    else:
        names, budgets, rows, sizes = ["Qwen3-0.6B", "Qwen2.5-1.5B"], [16, 24, 78], [2048, 16_384], [8192]
    cases = {}
    for name in names:
        for tokens, recompute in itertools.product(sizes, (False, True)):
            how = "recomputed" if recompute else "kept"
            cases[f"{name} pass {tokens} {how}"] = partial(of_pass, setting, name, tokens, recompute=recompute)
        for gib, row in itertools.product(budgets, rows):
            cases[f"{name} plan {gib:.3g} GiB rows {row}"] = partial(of_plan, setting, name, gib, row)
    cases["recovery"] = partial(of_recovery, setting, one=False)
    cases["recovery one row"] = partial(of_recovery, setting, one=True)
    cases["fragmentation"] = partial(of_fragments, setting, expandable=False)
    cases["fragmentation expandable"] = partial(of_fragments, setting, expandable=True)
    yield from setting.each(cases)


def of_pass(setting: Setting, name: str, tokens: int, *, recompute: bool) -> Row:
    """A pass of one row."""
    policy = policy_of(setting, name, tokens)
    with autocast(setting):
        predicted = bytes_of(policy, packed=True).of_pass(tokens, tokens, recompute=recompute)
    peak = peak_of_pass(setting, policy, [tokens], recompute=recompute)
    return {"kind": "pass", "tokens": tokens, "recompute": recompute, **_beside(predicted, peak)}


def of_plan(setting: Setting, name: str, gib: float, row: int) -> Row:
    """The pass that is planned for a GPU of so many GiB, filled with rows of one length."""
    policy = policy_of(setting, name, row)
    trained = trainable_parameters(policy)
    free = gib * GIB - sum(parameter.nbytes for parameter in policy.parameters())
    with autocast(setting):
        per_token = bytes_of(policy, packed=True)
    plan = plan_memory(free, trained, per_token, longest_row=row)
    there = free_bytes() if setting.device.type == "cuda" else free
    facts = {"kind": "plan", "gib": gib, "row": row, "tokens": plan.tokens, "recompute": plan.recompute}
    predicted = per_token.of_pass(plan.tokens // row * row, row, recompute=plan.recompute)
    if predicted > free - 12 * trained:
        return {**facts, "fits": False, **_beside(predicted, None)}  # a single row is too long: nothing to prove
    if free > there + GIB / 16:
        return {"skipped": f"a GPU of {gib} GiB would have {free / GIB:.1f} GiB left, this one has {there / GIB:.1f}"}
    peak = peak_of_pass(setting, policy, [row] * (plan.tokens // row), recompute=plan.recompute)
    room = free - 12 * trained
    near = _NEAR[0] <= peak / predicted <= _NEAR[1]
    return {**facts, "fits": True, **_beside(predicted, peak), "room_gib": room / GIB, "ok": near and peak <= room}


def _beside(predicted: float, peak: float | None) -> Row:
    return {
        "predicted_gib": predicted / GIB,
        "peak_gib": None if peak is None else peak / GIB,
        "ratio": None if peak is None else peak / predicted,
    }


def policy_of(setting: Setting, name: str, longest: int) -> PeftModel:
    """A random base of that shape with LoRA on all linear layers, ready for packed rows."""
    scale = scale_of(name, tiny=setting.tiny, device=setting.device)
    base = make_base(one_row(longest, tiny=setting.tiny), scale)
    target = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(base, target)
    make_ready(policy)
    return policy.train()


def autocast(setting: Setting) -> torch.autocast:
    """As in training."""
    return torch.autocast(setting.device.type, torch.bfloat16)


def peak_of_pass(setting: Setting, policy: PeftModel, lengths: list[int], *, recompute: bool) -> int:
    """Bytes above the weights that a forward and backward pass holds at most, the adapter's gradients left out."""
    if recompute:
        recompute_activations(policy)
    counted: Any = _Allocator() if setting.device.type == "cuda" else LiveBytes()
    with counted:
        forward_and_backward(setting, policy, lengths)
    trained = [parameter for parameter in policy.parameters() if parameter.grad is not None]
    gradients = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    policy.zero_grad(set_to_none=True)
    # With recomputation the peak comes late, when gradients are there; else it comes first.
    return int(counted.peak) - (gradients if recompute else 0)


def forward_and_backward(setting: Setting, policy: PeftModel, lengths: list[int]) -> None:
    """Rows of random tokens, end to end, a prompt of one token each."""
    vocabulary = policy.config.vocab_size
    rows = []
    for length in lengths:
        ids = torch.randint(vocabulary, (length + 1,), device=setting.device)
        rows.append(TokenRow(ids[:1], ids[1:], torch.ones(length, dtype=torch.bool)))
    groups = [[index] for index in range(len(rows))]
    with autocast(setting):
        log_probs_NT, _ = score(policy, rows, groups, packed=True, columns=max(lengths))
    log_probs_NT.sum().backward()


class _Allocator:
    """The peak of what CUDA's allocator has given out, above what it had before."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - self._before


def of_recovery(setting: Setting, *, one: bool) -> Row:
    """Three turns of one step: with enough memory, with too little, with enough again.

    Args:
        setting: The stage's.
        one: Whether each pass is one row already, so that only computing activations again helps.
    """
    on_cpu = setting.device.type == "cpu"
    if one:
        case = one_row(96 if setting.tiny else 16_384, tiny=setting.tiny)
        options = {"train_tokens_per_microbatch": case.completions[1] + 1, "gradient_checkpointing": False}
    else:
        case = replace(reasoning(tiny=setting.tiny), dead=0.0)
        options = {}
    scale = scale_of("Qwen3-0.6B", tiny=setting.tiny, device=setting.device, **options)
    groups = 1 if one else 2
    scale = replace(scale, groups=groups, rows=case.generations)
    if on_cpu:  # exact
        scale = replace(scale, bf16=False, arguments={**scale.arguments, "bf16": False})
    trainer, meter = make_trainer("perl", case, scale, draw_rollouts(case, groups), str(setting.folder))
    start = {name: parameter.detach().clone() for name, parameter in adapter_of(trainer).items()}
    turns = []
    for cramped in (False, True, False):
        needed = meter.peaks[-1] if meter.peaks else 0
        with _too_little(trainer, needed or 0, one=one) if cramped else contextlib.nullcontext():
            update = take_turn(trainer, meter, start)
        update = {name: tensor.cpu() for name, tensor in update.items()}  # not in what is held afterwards
        tokens = trainer.log_prob_passes.tokens
        turns.append((update, meter.peaks[-1] or 0, _allocated(setting), tokens, _again(trainer)))
    (first, peak, held, tokens, again), (second, _, _, fewer, now), (_, later, left, _, _) = turns
    apart = difference(second, first)
    recovered = now and not again if one else fewer < tokens
    back = later <= 1.05 * peak and left <= held + 2**21
    return {
        "kind": "recovery",
        "tokens_before": tokens,
        "tokens_after": fewer,
        "recompute_after": now,
        "difference": apart,
        "peak_gib": peak / GIB,
        "peak_later_gib": later / GIB,
        "allocated_gib": held / GIB,
        "allocated_later_gib": left / GIB,
        "recovered": recovered,
        "ok": recovered and apart <= _SAME[setting.device.type] and (on_cpu or back),
    }


def _again(trainer: Any) -> bool:  # noqa: ANN401 (a trainer)
    """Whether activations are computed again."""
    return bool(trainer.policy.get_base_model().is_activation_checkpointing)


def _allocated(setting: Setting) -> int:
    return torch.cuda.memory_allocated() if setting.device.type == "cuda" else 0


@contextlib.contextmanager
def _too_little(trainer: Any, needed: int, *, one: bool) -> Iterator[None]:  # noqa: ANN401 (a trainer)
    """The device filled but for a part of what a step needs; on a CPU passes that are too long raise."""
    if trainer.args.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        ballast = torch.empty(max(free - int(_LEFT * needed), 0), dtype=torch.uint8, device=trainer.args.device)
        try:
            yield
        finally:
            del ballast
            torch.cuda.empty_cache()
        return
    logged = trainer.state.log_history[-1]
    loss_of, limit = trainer.optimizer_step.loss_of, _LEFT * logged["tokens/run"] / logged["tokens/passes"]

    def failing(model: Any, batch: Any) -> torch.Tensor:  # noqa: ANN401
        if (one and not _again(trainer)) or (not one and batch.tokens > limit):
            raise torch.OutOfMemoryError(f"{batch.tokens} tokens")
        loss: torch.Tensor = loss_of(model, batch)
        return loss

    trainer.optimizer_step.loss_of = failing
    try:
        yield
    finally:
        del trainer.optimizer_step.loss_of


def of_fragments(setting: Setting, *, expandable: bool) -> Row:
    """Passes of many lengths, one after the other."""
    if setting.device.type != "cuda":
        return {"skipped": "memory of a CPU is not held by PyTorch's allocator"}
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    lengths = [16_384, 3000, 9000, 700, 12_345, 5000, 15_000, 2222, 8191, 16_000, 450, 6001]
    policy = policy_of(setting, "Qwen3-0.6B", max(lengths))
    recompute_activations(policy)
    torch.cuda.reset_peak_memory_stats()
    for length in lengths * 2:
        forward_and_backward(setting, policy, [length // 3, length // 2, length])
        policy.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    used, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    facts = {"kind": "fragmentation", "expandable": expandable}
    return {**facts, "peak_gib": used / GIB, "reserved_gib": reserved / GIB, "in_vain": 1 - used / reserved}


def table(rows: list[Row]) -> str:
    """A line a row, in three parts."""
    lines = [f"{'case':38} {'tokens':>7} {'again':>5} {'planned GiB':>11} {'peak':>8} {'ratio':>6}"]
    for row in rows:
        if row["kind"] in ("plan", "pass"):
            peak = "does not fit" if row["peak_gib"] is None else f"{row['peak_gib']:>8.3f} {row['ratio']:>6.2f}"
            again = "yes" if row["recompute"] else "no"
            lines.append(f"{row['case']:38} {row['tokens']:>7} {again:>5} {row['predicted_gib']:>11.3f} {peak}")
        elif row["kind"] == "recovery":
            lines.append(
                f"{row['case']}: passes of {row['tokens_before']} tokens, then {row['tokens_after']}"
                f"{', activations computed again' if row['recompute_after'] else ''}; updates differ by "
                f"{row['difference']:.1e}; peak {row['peak_gib']:.3f} GiB, later {row['peak_later_gib']:.3f}"
            )
        else:
            held = f"{row['reserved_gib']:.2f} GiB reserved for {row['peak_gib']:.2f}"
            lines.append(f"{row['case']}: {held}, {row['in_vain']:.0%} in vain")
    return "\n".join(lines)
