"""Finished runs with scores at the end, as a study writes them, without a training."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy

from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import Results
from perl.recipe import load_recipe
from tests.evaluations import results, task_result
from tests.reports.written import metrics_of, write_rows

BASE = ["1000", "0000", "1100", "0101"] * 10


def marks(chance: float, seed: int, problems: int = 40, k: int = 4) -> list[str]:
    """Which completions of each problem are right, whose chances are around one."""
    generator = numpy.random.default_rng(seed)
    chances = numpy.clip(chance + generator.normal(0, 0.2, problems), 0, 1)
    return ["".join(map(str, row)) for row in generator.binomial(1, chances[:, None], (problems, k))]


def write_finished(
    folder: Path,
    adapter: Sequence[str] | None,
    *,
    seed: int = 0,
    method: str = "lora",
    rate: float | None = None,
    reward: float = 0.8,
    protocol: Protocol | None = None,
    changes: dict | None = None,
    **facts: object,
) -> Path:
    """A run's folder.

    Args:
        folder: Made anew.
        adapter: Which completions are right at the end, ``"1101"`` a problem; None: it was not scored.
        seed: Of the training.
        method: Of the recipe.
        rate: Learning rate; None: the recipe leaves it out.
        reward: That all steps have, but for 0.01 times the step.
        protocol: Of the evaluation.
        changes: Of the task's result.
        facts: Of ``run.json``.
    """
    folder.mkdir(parents=True)
    train = {"max_steps": 4, "seed": seed, "output_dir": str(folder)} | (
        {} if rate is None else {"learning_rate": rate}
    )
    recipe = {"model": {"name": "sandbox:base"}, "data": {"train": "sandbox:addition"}, "rewards": {"accuracy": 1.0}}
    (folder / "recipe.yaml").write_text(load_recipe({**recipe, "peft": {"method": method}, "train": train}).to_yaml())
    rows = [metrics_of(step, 4, _Still(), reward=reward + 0.01 * step) for step in range(1, 5)]
    write_rows(folder / "metrics.jsonl", rows)
    known = {"status": "done", "steps": 4, "method": method, "seed": seed, "base": "sandbox:base"}
    known |= {"trainable_parameters": 1536, "seconds": 12.5, "rewards": {"accuracy": 1.0}}
    if adapter is not None:
        sha = hashlib.sha256(str(folder).encode()).hexdigest()
        scored = evaluation(adapter, sha, protocol, **(changes or {}))
        (folder / "eval").mkdir()
        scored.write(folder / "eval")
        known["fingerprint"] = {"base": "b" * 64, "adapter": sha}
        known["eval"] = {"sums": {"adapter": scored.tasks[0].score.accuracy}}
    (folder / "run.json").write_text(json.dumps(known | facts))
    return folder


def evaluation(adapter: Sequence[str], sha: str, protocol: Protocol | None = None, **changes: object) -> Results:
    """Results of an adapter beside the base."""
    base = [row[: len(adapter[0])].ljust(len(adapter[0]), "0") for row in BASE[: len(adapter)]]
    return results(task_result("sums", base, adapter, **changes), protocol=protocol, adapter_sha256=sha)


class _Still:
    """Takes the place of random numbers."""

    def random(self) -> float:
        return 0.5
