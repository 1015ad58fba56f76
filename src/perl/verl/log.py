"""verl's log as a run's: verl_metrics.jsonl -> rows of metrics.jsonl.

verl's ``file`` logger writes ``{"step": N, "data": {name: value}}`` a line. What both count alike gets the name that it
has in our runs (the table's ``log``), so that reports and curves show it; all else keeps its own name behind ``verl/``.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.errors import RunFolderError
from perl.verl.table import TABLE

NAMES: Mapping[str, str] = TABLE["log"]
_PREFIX = "verl/"
_SURROGATE = "actor/pg_loss"  # the loss without its KL and entropy terms, which older versions log alone
_TOKENS = "perf/total_num_tokens"  # of a step; ours grow from step to step


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
        RunFolderError: None of a file's lines is verl's.
    """
    logged: dict[int, dict[str, float]] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        found = dict(logged_in(text))
        if text.strip() and not found:
            raise RunFolderError("is malformed: none of its lines is of verl's file logger", str(path))
        logged |= found
    rows, tokens = [], 0.0
    for number in sorted(number for number in logged if 0 < number <= step):  # step 0 is verl's validation before
        data = logged[number]
        tokens += data.get(_TOKENS, 0.0)
        first = (number - 1) * steps_per_batch + 1
        rows.append({"step": first, **_renamed(data, rewards), **({"num_tokens": tokens} if _TOKENS in data else {})})
    return rows


def logged_in(text: str) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and numbers of each line; nothing of a line that a kill cut short."""
    for line in text.splitlines():
        try:
            found = json.loads(line)
            step, data = int(found["step"]), found["data"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield step, {name: float(value) for name, value in data if _is_number(value)}


def _renamed(data: Mapping[str, float], rewards: Mapping[str, float]) -> dict[str, float]:
    """A step's numbers by our names."""
    row = {NAMES.get(name, _PREFIX + name): value for name, value in data.items() if name != _TOKENS}
    if "loss" not in row and _PREFIX + _SURROGATE in row:
        row["loss"] = row.pop(_PREFIX + _SURROGATE)
    if "rollout/seconds" in row:  # ours hold the policy's way to the engine
        row["rollout/seconds"] += row.get("sync/seconds", 0.0)
    if len(rewards) == 1 and "reward" in row:
        ((name, weight),) = rewards.items()
        row |= {f"rewards/{name}/mean": row["reward"] / weight} if weight else {}
    return row


def _is_number(value: Any) -> bool:  # noqa: ANN401 (JSON)
    """A finite number; orjson writes NaN as null."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
