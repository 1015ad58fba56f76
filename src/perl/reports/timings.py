"""Where the seconds of a step went.

curves of a run -> seconds of each stage, step by step
"""

import statistics
from collections.abc import Mapping

from perl.reports.curves import Curve

SYNC, ROLLOUTS, UPDATE, REST = (
    "policy to the engine",
    "rollouts",
    "forward and backward passes",
    "verdicts, rewards, log-probs, the rest",
)


def stages_of(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Seconds of each stage that is known; together they are the step's.

    Args:
        curves: Of a run, whole; ``rollout/seconds`` holds ``sync/seconds``.
    """
    whole = curves.get("step_time")
    if whole is None:
        return {}
    syncs, rollouts, updates = (_by_step(curves, f"{name}/seconds") for name in ("sync", "rollout", "update"))
    stages: dict[str, list[float]] = {SYNC: [], ROLLOUTS: [], UPDATE: [], REST: []}
    for step, seconds in zip(whole.steps, whole.values, strict=True):
        sync = min(syncs.get(step, 0.0), seconds)
        rollout = max(0.0, min(rollouts.get(step, 0.0), seconds) - sync)
        update = min(updates.get(step, 0.0), max(0.0, seconds - sync - rollout))
        parts = (sync, rollout, update, max(0.0, seconds - sync - rollout - update))
        for name, part in zip(stages, parts, strict=True):
            stages[name].append(part)
    if not (rollouts or updates):
        stages = {"whole step": list(whole.values)}
    return {name: Curve(whole.steps, tuple(values)) for name, values in stages.items() if any(values)}


def means_of(stages: Mapping[str, Curve]) -> dict[str, float]:
    """Seconds of each stage in the mean step; the first, which opens engines, does not count if there are others."""
    return {
        name: statistics.fmean(curve.values[1:] if len(curve.values) > 1 else curve.values)
        for name, curve in stages.items()
    }


def _by_step(curves: Mapping[str, Curve], name: str) -> Mapping[int, float]:
    curve = curves.get(name)
    return dict(zip(curve.steps, curve.values, strict=True)) if curve is not None else {}
