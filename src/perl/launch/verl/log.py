"""verl's log as a run's.

verl_metrics.jsonl -> rows of metrics.jsonl

verl's ``file`` logger writes ``{"step": N, "data": {name: value}}`` a line. What both count alike gets the name that it
has in our runs, so that reports, curves and tables show it; all else keeps its own name behind ``verl/``.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.errors import RunFolderError
from perl.run.files import read_regular

PREFIX = "verl/"
NAMES: Mapping[str, str] = {
    "actor/loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl",
    "critic/score/mean": "reward",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/min": "completions/min_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "timing_s/step": "step_time",
    "timing_s/gen": "rollout/seconds",
    "timing_s/update_actor": "update/seconds",
    "timing_s/update_weights": "sync/seconds",
}
"""Name in verl's log -> name in ours, of the same quantity. ``actor/ppo_kl`` is to the policy before, and keeps its."""
_SURROGATE = "actor/pg_loss"  # the loss without its KL and entropy terms, which older versions log alone
_TOKENS = "perf/total_num_tokens"  # of a step; ours grow from step to step
_SECONDS = "step_time"


def rows_of_logs(
    paths: Sequence[Path], step: int, rewards: Mapping[str, float], steps_per_batch: int = 1
) -> list[dict[str, Any]]:
    """The steps of verl's logs up to one; of a step that was logged twice the later row.

    A step of verl is a batch of rollouts. Its row is that of the first optimizer step on them, as in our runs.

    Args:
        paths: verl's files, in order; no rows where there are none.
        step: The last that counts, of verl's.
        rewards: Name -> weight; a reward that is alone has its mean from the weighted sum, which is all that verl logs.
        steps_per_batch: Optimizer steps of one of verl's.

    Raises:
        RunFolderError: It cannot be read, or none of its lines is verl's.
    """
    logged: dict[int, dict[str, float]] = {}
    for path in paths:
        for number, data in _rows_of(path):
            logged[number] = data
    rows, tokens = [], 0.0
    for number in sorted(number for number in logged if 0 < number <= step):  # step 0 is verl's validation before
        data = logged[number]
        tokens += data.get(_TOKENS, 0.0)
        first = (number - 1) * steps_per_batch + 1
        rows.append({"step": first, **_renamed(data, rewards), **({"num_tokens": tokens} if _TOKENS in data else {})})
    return rows


def seconds_of(rows: list[dict[str, Any]]) -> float:
    """Wall seconds of all steps together, as far as they were logged."""
    return round(sum(float(row.get(_SECONDS) or 0.0) for row in rows), 3)


def _rows_of(path: Path) -> list[tuple[int, dict[str, float]]]:
    """The lines of a file."""
    try:
        text = read_regular(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"cannot be read: {error}", str(path)) from None
    lines = [line for line in text.split("\n") if line.strip()]
    rows = [row for line in lines for row in logged_in(line)]
    if lines and not rows:
        raise RunFolderError("is malformed: none of its lines is of verl's file logger", str(path))
    return rows


def logged_in(line: str) -> Iterator[tuple[int, dict[str, float]]]:
    """A line's step and its numbers; nothing of one that a kill cut short."""
    try:
        found = json.loads(line)
        step, data = found["step"], found["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(step, int) and not isinstance(step, bool) and isinstance(data, dict):
        yield step, {str(name): float(value) for name, value in data.items() if _is_number(value)}


def _renamed(data: Mapping[str, float], rewards: Mapping[str, float]) -> dict[str, float]:
    """A step's numbers by our names."""
    row = {NAMES.get(name, PREFIX + name): value for name, value in data.items() if name != _TOKENS}
    if "loss" not in row and PREFIX + _SURROGATE in row:
        row["loss"] = row.pop(PREFIX + _SURROGATE)
    if "rollout/seconds" in row:  # ours hold the policy's way to the engine
        row["rollout/seconds"] += row.get("sync/seconds", 0.0)
    if len(rewards) == 1 and "reward" in row:
        ((name, weight),) = rewards.items()
        row |= {f"rewards/{name}/mean": row["reward"] / weight} if weight else {}
    return row


def _is_number(value: Any) -> bool:  # noqa: ANN401 (JSON)
    """A finite number; orjson writes NaN as null."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 and math.isfinite(value)
