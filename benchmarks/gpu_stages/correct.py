"""Whether the numbers are right on this device: attention, passes, a step beside TRL's, every PEFT method.

Setting -> a row for each check: how far off, how far it may be, "ok"

Everything is compared with something that shares no code with it: a softmax in float64, plain transformers in float32,
TRL's trainer.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from step_cases import Case, Rollout, Scale, cpu_scale, draw_rollouts
from training_step import adapter_of, difference, make_trainer, take_turn

from gpu_stages.attention_cases import attention_cases
from gpu_stages.doctor import DTYPES, HEAD_SIZES
from gpu_stages.methods import method_cases
from gpu_stages.pass_cases import pass_cases
from gpu_stages.setting import Row, Setting

STEP = Case("check", (4, 60), (1, 400), lognormal=(80.0, 0.9), dead=0.25, vocabulary=4096)
SHORT_STEP = Case("check", (2, 8), (1, 24), lognormal=(8.0, 0.9), dead=0.25, vocabulary=64)
STEP_TOLERANCE = 1e-3  # of the update's norm, in float32
# In bfloat16: times what rounding makes of TRL's, and a spacing.
TIMES_TRL, FLOOR = 1.5, 2**-7
Update = dict[str, torch.Tensor]


def measure(setting: Setting) -> Iterator[Row]:
    """Attention first, which all else stands on; methods last."""
    yield from setting.each({**attention_cases(setting), **pass_cases(setting), **step_cases(setting)})
    yield from method_cases(setting)


def table(rows: list[Row]) -> str:
    """Attention by type and head size, then a line a check."""
    attention = {tuple(row["case"].split()[1:]): row for row in rows if row["case"].startswith("attention ")}
    lines = ["attention, largest deviation over heads and layouts (SDPA's own): output and gradients"]
    for dtype in (*DTYPES, "autocast"):
        cells = []
        for size in HEAD_SIZES:
            own = [row for key, row in attention.items() if key[:2] == (dtype, str(size))]
            if own:
                worst, sdpa = max(row["difference"] for row in own), max(row["sdpa"] for row in own)
                good = "" if all(row["ok"] for row in own) else " FAILED"
                cells.append(f"{size}: {worst:.1e} ({sdpa:.1e}){good}")
        lines.append(f"  {dtype:9} " + "  ".join(cells))
    others = [row for row in rows if not row["case"].startswith("attention ")]
    lines.append(f"\n{'check':54}{'difference':>11}{'beside':>10}{'tolerance':>10}")
    lines += [_line(row) for row in others]
    failed = [row["case"] for row in rows if row.get("ok") is False]
    return "\n".join([*lines, f"failed: {', '.join(failed)}" if failed else "all checks hold"])


def _line(row: Row) -> str:
    """Of a pass the gradient too; of a method how far it has moved."""
    beside = row.get("padded", row.get("trl", row.get("moved")))
    shown = f"{row['case']:54}{row['difference']:>11.1e}{beside:>10.1e}{row['tolerance']:>10.1e}"
    if "gradient" in row:
        shown += f"   gradient {row['gradient']:.1e} {row['padded_gradient']:.1e} {row['gradient_tolerance']:.1e}"
    return shown + ("" if row["ok"] else "  FAILED")


def step_cases(setting: Setting) -> dict[str, Callable[[], Row]]:
    """One optimizer step of both trainers on the same rollouts."""
    return {
        "step beside TRL's, float32": partial(compare_step, setting, bf16=False),
        "step beside TRL's, bfloat16": partial(compare_step, setting, bf16=True),
    }


def compare_step(setting: Setting, *, bf16: bool) -> Row:
    """How far our update is from TRL's.

    In bfloat16 both are held to TRL's in float32 with the same weights, since rounding alone takes them apart; in
    float32 TRL's is held to its own with smaller micro-batches.
    """
    case, scale = (SHORT_STEP if setting.tiny else STEP), _scale(setting, bf16=bf16)
    rollouts = draw_rollouts(case, scale.groups)
    expected, start = _update("TRL", case, scale, rollouts, in_float32=True)
    other = scale if bf16 else replace(scale, rows=scale.rows // 2)
    theirs = difference(_update("TRL", case, other, rollouts, start=start)[0], expected)
    ours = difference(_update("perl", case, scale, rollouts, start=start)[0], expected)
    tolerance = TIMES_TRL * theirs + FLOOR if bf16 else STEP_TOLERANCE
    return {"difference": ours, "trl": theirs, "tolerance": tolerance, "ok": ours <= tolerance < math.inf}


def _scale(setting: Setting, *, bf16: bool) -> Scale:
    """A small Qwen3 in the type, in which TRL recomputes activations as it does by default."""
    scale = cpu_scale(64 if setting.tiny else 512, quick=setting.tiny)
    arguments: dict[str, Any] = {"use_cpu": setting.device.type == "cpu", "bf16": bf16}
    return replace(scale, groups=4, arguments=arguments, bf16=bf16)


def _update(
    name: str,
    case: Case,
    scale: Scale,
    rollouts: list[Rollout],
    *,
    start: Update | None = None,
    in_float32: bool = False,
) -> tuple[Update, Update]:
    """A trainer's update of the adapter, and what it began with, on the CPU."""
    if in_float32:
        scale = replace(scale, arguments={**scale.arguments, "bf16": False})
    with tempfile.TemporaryDirectory() as folder:
        trainer, meter = make_trainer(name, case, scale, rollouts, folder)
        if in_float32:
            trainer.model.float()
        if start is None:
            start = {name: p.detach().cpu().clone() for name, p in adapter_of(trainer).items()}
        update = take_turn(trainer, meter, start)
        return {name: p.float().cpu() for name, p in update.items()}, start
