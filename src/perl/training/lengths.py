"""How long completions are: assumed before there is a run, measured after one.

plan, a number or an earlier run -> Lengths
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from perl.errors import PerlError
from perl.training.plan import Plan

# Of an earlier run's steps the last ones count: completions grow or shrink while it trains.
_LAST_STEPS = 50
_LENGTH, _LONGEST, _TRAINED = "completions/mean_length", "completions/max_length", "rows/trained_fraction"


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and completions.

    Attributes:
        prompt: On average.
        completion: On average.
        longest: Of the longest completion of a step.
        live: Share of the completions that have a gradient.
        source: Where the numbers are from, for a person to read.
        seconds: That a step of the earlier run took; None without one.
    """

    prompt: int
    completion: int
    longest: int
    live: float
    source: str
    seconds: float | None = None


def lengths_of(plan: Plan, *, completion: int | None = None, run: str | None = None) -> Lengths:
    """What a plan reckons with.

    Args:
        plan: Of the run.
        completion: Tokens of a completion on average; None: half of the most.
        run: Folder of an earlier run, whose lengths are taken.

    Raises:
        PerlError: The run has no metrics, or the number is more than a completion may have.
    """
    prompt, most = round(plan.mean_prompt), int(plan.arguments.max_completion_length or 1)
    if completion is not None and not 1 <= completion <= most:
        raise PerlError(f"{completion} tokens", "--completion-tokens", f"1 to {most}, rollout.max_completion_length")
    if run is not None:
        return _measured(Path(run), prompt, completion)
    if completion is not None:
        return Lengths(prompt, completion, most, 1.0, "as given; the longest as long as allowed")
    return Lengths(prompt, max(most // 2, 1), most, 1.0, "assumed: half of the most; the longest as long as allowed")


def _measured(run: Path, prompt: int, completion: int | None) -> Lengths:
    """Of the last steps of a run."""
    rows = [row for row in _metrics(run) if _LENGTH in row][-_LAST_STEPS:]
    if not rows:
        raise PerlError("no step of this run has been logged", str(run / "metrics.jsonl"))
    mean, longest = (round(fmean(row[name] for row in rows)) for name in (_LENGTH, _LONGEST))
    seconds = [row["step_time"] for row in rows if "step_time" in row]
    return Lengths(
        prompt,
        completion or max(mean, 1),
        max(longest, completion or mean, 1),
        fmean(row.get(_TRAINED, 1.0) for row in rows),
        f"measured in {run}, the last {len(rows)} steps",
        fmean(seconds) if seconds else None,
    )


def _metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError:
        raise PerlError("not a run folder", str(run), "the OUTPUT of an earlier `perl train`") from None
    except ValueError:
        raise PerlError("is damaged", str(path)) from None
