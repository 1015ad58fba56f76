"""One adapter of a run that may be published, with the results that are its own.

run folder, final | best | step -> Candidate

Results belong to an adapter if they name the SHA-256 of its weights; no others are ever shown beside it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perl.checkpoint import is_complete, step_of
from perl.errors import PerlError, RunFolderError
from perl.evaluation.results import RESULTS, Results, read_results
from perl.run import Run, sha256_of
from perl.saved_adapter import CONFIG, WEIGHTS

Which = Literal["final", "best"] | int
"""Which adapter of a run: the final one, the one that scored best, or that of a checkpoint's step."""


@dataclass(frozen=True)
class Candidate:
    """An adapter of a run.

    Attributes:
        run: The run.
        which: Which of its adapters.
        folder: With the adapter's config and weights.
        step: Optimizer steps after which it was saved.
        sha256: Of its weights.
        results_folder: With the results of exactly this adapter; None: it was not evaluated.
        results: These results.
    """

    run: Run
    which: Which
    folder: Path
    step: int
    sha256: str
    results_folder: Path | None
    results: Results | None


def find_candidate(run: Run, which: Which = "final") -> Candidate:
    """Finds one of a run's adapters.

    Raises:
        RunFolderError: The run has no such adapter, or trained a model without one.
    """
    if run.facts.get("method") == "full":
        hint = f"hf upload user/name {run.adapter}"
        raise RunFolderError("trained the model itself, there is no adapter", str(run.path), hint)
    if which == "final":
        folder, step, places = run.adapter, int(run.facts.get("steps", 0)), [run.path / "eval"]
    elif which == "best":
        folder, step = run.path / "best" / "adapter", _best_step(run)
        places = [run.path / "best" / "eval", run.path / "eval"]
    else:
        folder, step, places = run.checkpoints / f"checkpoint-{which}", which, []
    if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
        raise RunFolderError(f"has no {_called(which)} adapter, it is {run.status}", str(run.path), "perl train")
    if isinstance(which, int) and not is_complete(folder):
        raise RunFolderError(f"has no complete checkpoint of step {which}", str(run.path))
    digest = sha256_of(folder / WEIGHTS)
    places += sorted(path.parent for path in (run.path / "evals").glob(f"*/{RESULTS}"))
    for place in places:
        results = _results_in(place)
        if results is not None and results.subject.get("adapter_sha256") == digest:
            return Candidate(run, which, folder, step, digest, place, results)
    return Candidate(run, which, folder, step, digest, None, None)


def checkpoint_steps(run: Run) -> list[int]:
    """Steps of the run's complete checkpoints, in order."""
    return sorted(step_of(folder) for folder in run.checkpoints.glob("checkpoint-*") if is_complete(folder))


def _called(which: Which) -> str:
    return {"final": "trained", "best": "best"}.get(str(which), f"step {which}")


def _best_step(run: Run) -> int:
    try:
        return int(json.loads((run.path / "best" / "best.json").read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        raise RunFolderError("keeps no best adapter", str(run.path), "eval.every in the recipe does") from None
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(
            f"keeps no best adapter: {error}", str(run.path), "eval.every in the recipe does"
        ) from None


def _results_in(folder: Path) -> Results | None:
    if not (folder / RESULTS).is_file():
        return None
    try:
        return read_results(folder)
    except PerlError:
        return None
