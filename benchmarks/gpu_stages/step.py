"""The training half of a GRPO step in bfloat16: tokens/s, MFU and memory, beside TRL and beside prime-rl's own numbers.

Setting -> rows: one model and one kind of batch each

* ``reasoning``: the shape of Qwen2.5-1.5B, LoRA of rank 16 on all linear layers, 128 completions of 16 prompts; ours
  alone, with the plan that the free memory gives. TRL pads all of them to the longest, which would take minutes, so
  beside TRL (``beside TRL``) only the first groups of the same rollouts are run, by both; the ratio is of that step,
  the first of its length for both, and the seconds of the whole for TRL are those times its padded tokens, a lower
  bound: its attention grows faster.
* ``row``: rows of one length, each a pass of its own, two of them a step with AdamW, activations computed again: what
  prime-rl publishes for one H100. ``kept``: the same without recomputation.

Seconds are from the first micro-batch to the end of the optimizer's step, with the look-up and decoding of completions
in between. MFU: the FLOPs that the gradient needs at least (``step_flops.py``) over seconds and the GPU's stated peak.
"prime-rl's MFU" counts as that project does, see ``shapes.flops_per_token_of_prime_rl``; its peak memory is what
PyTorch's allocator has reserved, so ours is told likewise. A case fails where our trainer padded rows or did not share
prompts. The base's SHA-256 is not taken here (``step_turns.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from step_cases import Case, Rollout, Scale, draw_rollouts, make_base
from step_flops import Group, ModelSize, ideal_flops, model_size
from step_turns import RANK, Meter, adapter_of, difference, how_it_ran, make_trainer, take_turn, tokens_of

from gpu_stages.doctor import Attentions
from gpu_stages.setting import Row, Setting
from gpu_stages.shapes import (
    Roof,
    flops_per_token_of_prime_rl,
    measure_masked_attention,
    measure_roof,
    one_row,
    reasoning,
    scale_of,
    warm_up,
)

GIB = 2**30
GROUPS = 16
# Of a step that both trainers take. How fast TRL's is, nobody knows before: it is assumed that its products, with all
# that runs between them, reach a quarter of what a large one does, and its attention what masked SDPA does here. Where
# that comes to more than this share of the seconds left, fewer groups are run.
_TRL_OF_ROOF = 0.25
_TRL_SHARE = 0.35
# One H100, RL with LoRA of rank 16, FlashAttention 3, recomputation; benchmarks of prime-rl, February 2026.
PUBLISHED = {
    ("Qwen3-0.6B", 16_384): {"tokens_per_second": 13_340, "reserved_gib": 5.1, "mfu_prime_rl": None},
    ("Qwen3-0.6B", 65_536): {"tokens_per_second": 9_970, "reserved_gib": 11.5, "mfu_prime_rl": 0.252},
    ("Qwen3-4B", 16_384): {"tokens_per_second": 6_230, "reserved_gib": 23.3, "mfu_prime_rl": 0.217},
    ("Qwen3-4B", 65_536): {"tokens_per_second": 4_160, "reserved_gib": 42.0, "mfu_prime_rl": 0.374},
}
_TINY_TOKENS = {16_384: 48, 65_536: 96}


@dataclass(frozen=True)
class Work:
    """A step to take.

    Attributes:
        case: The lengths.
        scale: The model.
        rollouts: Of the step.
        warm: Of the steps before it.
    """

    case: Case
    scale: Scale
    rollouts: list[Rollout]
    warm: list[Rollout]

    @property
    def groups(self) -> list[Group]:
        """What FLOPs depend on."""
        return [rollout.lengths for rollout in self.rollouts]

    @property
    def size(self) -> ModelSize:
        """Of the model."""
        return model_size(make_base(self.case, self.scale, empty=True), RANK)


def measure(setting: Setting) -> Iterator[Row]:
    """Rows in the order of what matters most, should time run out."""
    roof = measure_roof(setting.device, tiny=setting.tiny)
    setting.clear()
    row = partial(of_rows, setting, roof)
    cases = {
        "roof": lambda: {**vars(roof), "peak": roof.peak},
        "Qwen3-0.6B row 16384": partial(row, "Qwen3-0.6B", 16_384),
        "Qwen2.5-1.5B reasoning": partial(of_reasoning, setting, roof),
        "Qwen3-4B row 16384": partial(row, "Qwen3-4B", 16_384),
        "Qwen2.5-1.5B beside TRL": partial(beside_trl, setting, roof),
        "Qwen3-0.6B row 16384 kept": partial(row, "Qwen3-0.6B", 16_384, recompute=False),
        "Qwen3-0.6B row 65536": partial(row, "Qwen3-0.6B", 65_536),
        "Qwen3-4B row 65536": partial(row, "Qwen3-4B", 65_536),
    }
    yield from setting.each(cases)


def of_rows(setting: Setting, roof: Roof, name: str, tokens: int, *, recompute: bool = True) -> Row:
    """Two rows of one length, a pass each, and AdamW's step; or why there is no time for it."""
    length = _TINY_TOKENS[tokens] if setting.tiny else tokens
    case = one_row(length, tiny=setting.tiny)
    scale = scale_of(
        name,
        tiny=setting.tiny,
        device=setting.device,
        gradient_checkpointing=recompute,
        train_tokens_per_microbatch=length,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
    )
    scale = replace(scale, rows=case.generations)
    rollouts = draw_rollouts(case, 1)
    work = Work(case, scale, rollouts, warm_up(case, 1) + rollouts)
    count = flops_per_token_of_prime_rl(
        work.size, layers=scale.shape["num_hidden_layers"], width=scale.width, tokens=length
    )
    published = PUBLISHED.get((name, tokens), {}) if recompute and not setting.tiny else {}
    if published and setting.device.type == "cuda":
        # A warm step and a timed one at two thirds of the published speed, and as much again for the set-up.
        needed = 2 * 2 * length / (published["tokens_per_second"] * 2 / 3) + 30
        if needed > setting.left():
            return {"skipped": f"needs about {needed:.0f} s, {setting.left():.0f} s are left"}
    taken, _ = step_of("perl", work, setting)
    speed = case.generations * length / taken["step_seconds"]
    return {
        "kind": "row",
        "model": name,
        "row_tokens": length,
        "tokens_per_second": speed,
        "mfu": ideal_flops(work.size, work.groups, with_reference=False) / taken["step_seconds"] / roof.peak,
        "mfu_prime_rl": count * speed / roof.peak,
        "published": published,
        **taken,
    }


def of_reasoning(setting: Setting, roof: Roof) -> Row:
    """Our trainer alone, on all of the completions, with recomputation only if the plan asks for it."""
    work = reasoning_work(setting, 4 if setting.tiny else GROUPS)
    taken, _ = step_of("perl", work, setting)
    return {"kind": "reasoning", **speeds(work, taken, roof), **taken}


def beside_trl(setting: Setting, roof: Roof) -> Row:
    """Both trainers on the first groups of the same rollouts: as many as TRL has time for."""
    whole = reasoning_work(setting, 4 if setting.tiny else GROUPS)
    attention = measure_masked_attention(setting.device, tiny=setting.tiny)
    setting.clear()
    needed = {n: trl_seconds(whole, n, roof, attention) for n in (5, 3, 2, 1)}
    few = next((n for n, seconds in needed.items() if seconds < _TRL_SHARE * setting.left()), None)
    if setting.tiny:
        few = 2
    if few is None:
        return {"skipped": f"a group by TRL needs about {needed[1]:.0f} s, {setting.left():.0f} s are left"}
    work = Work(whole.case, replace(whole.scale, groups=few), whole.rollouts[:few], warm_up(whole.case, few))
    taken, updates = {}, {}
    taken["perl"], updates["perl"] = step_of("perl", work, setting, twice=False)
    for rows in (4, 1):
        setting.clear()
        try:
            fitting = replace(work, scale=replace(work.scale, rows=rows))
            taken["TRL"], updates["TRL"] = step_of("TRL", fitting, setting, twice=False)
            break
        except torch.OutOfMemoryError:
            continue
    else:
        return {"skipped": "TRL runs out of memory with a single row in a micro-batch"}
    padded = tokens_of(whole.groups, len(whole.groups), with_reference=False)["padded"]
    part = tokens_of(work.groups, few, with_reference=False)["padded"]
    return {
        "kind": "beside TRL",
        "groups": few,
        "of_groups": len(whole.rollouts),
        "rows_of_trl": rows,
        "trl_seconds_estimated": needed[few],
        "masked_attention_flops": attention,
        "ok": taken["perl"].pop("ok"),
        "ratio": taken["TRL"]["step_seconds"] / taken["perl"]["step_seconds"],
        "difference": difference(updates["perl"], updates["TRL"]),
        "trl_seconds_of_all_at_least": taken["TRL"]["step_seconds"] * padded / part,
        "trainers": {name: {**speeds(work, numbers, roof), **numbers} for name, numbers in taken.items()},
    }


def reasoning_work(setting: Setting, groups: int) -> Work:
    """The step of a reasoning model, and short ones of as many rows before it."""
    case = reasoning(tiny=setting.tiny)
    scale = scale_of("Qwen2.5-1.5B", tiny=setting.tiny, device=setting.device)
    scale = replace(scale, groups=groups, rows=case.generations)
    return Work(case, scale, draw_rollouts(case, groups), warm_up(case, groups))


def trl_seconds(whole: Work, groups: int, roof: Roof, attention_flops: float) -> float:
    """About what TRL takes for the first groups: forward, forward again, backward, over the padded rectangle.

    Args:
        whole: Of which the first groups are run.
        groups: How many.
        roof: The device's.
        attention_flops: FLOP/s of its attention, which runs all pairs of a row.
    """
    few = whole.groups[:groups]
    padded = tokens_of(few, groups, with_reference=False)["padded"]
    rows = sum(len(group.completions) for group in few)
    products = 6 * whole.size.block * padded
    attention = 4.5 * 4 * whole.size.attention * padded**2 / rows
    return products / (_TRL_OF_ROOF * roof.flops) + attention / attention_flops + 30


def step_of(
    name: str, work: Work, setting: Setting, *, twice: bool = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Steps that warm up and the step that counts, by one trainer.

    Args:
        name: TRL or perl.
        work: What it trains on.
        setting: The stage's.
        twice: Whether the step is taken once more, if time allows; the faster one counts. Not where trainers are
            compared: the other one has time for a first step only.

    Returns:
        Seconds and memory; the update of the adapter by all of these steps.
    """
    folder = str(setting.folder)
    trainer, meter = make_trainer(name, work.case, work.scale, work.warm + work.rollouts, folder)
    start = {key: parameter.detach().clone() for key, parameter in adapter_of(trainer).items()}
    meter.watch = operators = Attentions()  # of the first step, which warms up
    update = take_turn(trainer, meter, start)
    meter.watch = None
    numbers = _numbers(meter)
    if twice and 3 * numbers["step_seconds"] < setting.left() - 60:
        take_turn(trainer, meter, start)
        again = _numbers(meter)
        numbers = min(numbers, again, key=lambda n: n["step_seconds"])
    if name == "perl":
        numbers["tokens_in_a_pass"] = trainer.log_prob_passes.tokens
        numbers["passes"] = meter.passes[-1]
        numbers |= how_it_ran(trainer)
    numbers["attention"] = list(operators.names) or ["math"]
    numbers["recompute"] = bool(trainer.model.get_base_model().is_activation_checkpointing)
    return numbers, {key: value.cpu() for key, value in update.items()}


def _numbers(meter: Meter) -> dict[str, Any]:
    """Of the last step of a turn."""
    above = meter.peaks[-1]
    return {
        "step_seconds": meter.seconds[-1],
        "peak_gib": meter.totals[-1] / GIB,
        "reserved_gib": meter.reserved[-1] / GIB or None,
        "above_gib": None if above is None else above / GIB,
    }


def speeds(work: Work, taken: dict[str, Any], roof: Roof) -> dict[str, Any]:
    """Tokens a second: of all rows, and of those with a gradient, which ours alone leaves the others for."""
    tokens, seconds = tokens_of(work.groups, len(work.groups), with_reference=False), taken["step_seconds"]
    return {
        "tokens": tokens,
        "tokens_per_second": tokens["real"] / seconds,
        "live_tokens_per_second": tokens["live"] / seconds,
        "mfu": ideal_flops(work.size, work.groups, with_reference=False) / seconds / roof.peak,
    }


def table(rows: list[Row]) -> str:
    """Our numbers, and below each the published ones."""
    lines = [
        f"{'case':34} {'seconds':>8} {'tokens/s':>9} {'MFU':>6} {'prime-rl MFU':>12} {'peak':>6} {'reserved GiB':>12}"
    ]
    for row in rows:
        if row["case"] == "roof":
            stated = f"{row['stated'] / 1e12:.0f}" if row["stated"] else "unknown"
            measured = f"measured {row['flops'] / 1e12:.3g}; copies {row['bandwidth'] / 1e9:.0f} GB/s"
            lines.append(f"peak TFLOP/s: stated {stated}, {measured}")
        elif row["kind"] == "beside TRL":
            for name, numbers in row["trainers"].items():
                lines += [_line(f"  {name}, {row['groups']} groups", numbers), _how(numbers)]
            lines.append(
                f"  TRL's seconds over ours, first steps of both: {row['ratio']:.1f}; updates differ by "
                f"{row['difference']:.1e}; all {row['of_groups']} groups by TRL: "
                f"{row['trl_seconds_of_all_at_least']:.0f} s at least"
            )
        else:
            lines += [_line(row["case"], row), _how(row)]
            if row.get("published"):
                lines.append(_line("  prime-rl, published, H100", row["published"]))
    return "\n".join(lines)


def _how(row: dict[str, Any]) -> str:
    """Whether rows were packed, and what attention ran: numbers of a trainer that pads stand for something else."""
    attention = "attention " + " + ".join(row["attention"])
    if "packed" not in row:
        return f"    padded; {attention}"
    found = "packed" if row["packed"] else "PADDED"
    found += ", prompts shared" if row["shared"] else ", prompts not shared"
    return f"    {found}{': ' if row['why_not'] else ''}{row['why_not']}; {attention}"


def _line(name: str, row: dict[str, Any]) -> str:
    def number(key: str, form: str, width: int) -> str:
        value = row.get(key)
        return f"{'-' if value is None else format(value, form):>{width}}"

    columns = (
        ("step_seconds", ".2f", 8),
        ("tokens_per_second", ",.0f", 9),
        ("mfu", ".1%", 6),
        ("mfu_prime_rl", ".1%", 12),
        ("peak_gib", ".1f", 6),
        ("reserved_gib", ".1f", 12),
    )
    return " ".join([f"{name:34}", *(number(*column) for column in columns)])
