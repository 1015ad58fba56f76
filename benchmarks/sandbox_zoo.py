"""Trains the sandbox zoo: adapters of six methods, three seeds each, on the quickstart's task.

Run as ``python benchmarks/sandbox_zoo.py FOLDER``. Each run is ``perl train quickstart`` with the settings below,
scored on all held-out problems, in ``FOLDER/METHOD-SEED``; one that is done is not trained again, so the same command
goes on. Ranks are small, so that the adapters of one seed fit into the package. ``perl zoo add``
makes entries of the runs.
"""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

from perl.methods.registry import METHODS

# The quickstart's learning rate, which its recipe gives for LoRA.
LORA_RATE = 1e-3
SMALL = {"peft.rank": "2", "peft.alpha": "4.0"}
# vera's rank costs a number per row; ia3 has none.
SHIPPED = {name: SMALL for name in ("lora", "pissa", "dora", "adalora")}
SHIPPED |= {"vera": {"peft.rank": "16"}, "ia3": {}}


def settings_of(method: str) -> list[str]:
    """Overrides of the quickstart for a method."""
    settings = {"peft.method": method, "peft.rank": "null", "peft.alpha": "null", **SHIPPED[method]}
    settings["train.learning_rate"] = str(LORA_RATE * METHODS[method].rate)
    settings |= {"train.report_to": "[]", "train.save_strategy": "'no'", "eval.limit": "null"}
    return [f"{key}={value}" for key, value in settings.items()]


def train(method: str, seed: int, folder: Path) -> str:
    """One run, in a process of its own; a line about it."""
    import logging
    import warnings

    import perl

    warnings.simplefilter("ignore")
    logging.getLogger("perl").setLevel(logging.ERROR)
    try:
        run = perl.train("quickstart", [*settings_of(method), f"train.seed={seed}"], folder / f"{method}-{seed}")
    except Exception as error:  # noqa: BLE001 (the others go on)
        return f"{method:12} seed {seed}: {type(error).__name__}: {error}"
    score = run.facts["eval"]["sandbox:addition"]
    return f"{method:12} seed {seed}: {score['base']:.3f} -> {score['adapter']:.3f}, {run.facts['seconds']:.0f} s"


def main() -> None:
    """Trains what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", nargs="*", default=list(SHIPPED))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        jobs = [pool.submit(train, m, seed, options.folder) for seed in options.seeds for m in options.methods]
        for number, job in enumerate(as_completed(jobs), start=1):
            print(f"{number}/{len(jobs)} {job.result()}", flush=True)


if __name__ == "__main__":
    main()
