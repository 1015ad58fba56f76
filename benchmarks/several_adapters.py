"""Three adapters in one evaluation against three evaluations of one, with and without the base that was kept.

Run as ``python benchmarks/several_adapters.py``. Three adapters are trained for a few steps on the sandbox's base; each
way is a command or three in processes of their own, all ways one after the other in each round, so that other load
meets all alike. Prints seconds (the median of the rounds) and completions that were drawn, and writes
``results/several_adapters.json``.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1")

import perl
from perl.evaluation.scoring.results import SAMPLES
from perl.run.folder import installed_versions
from perl.run.tables import plain_table

RESULTS = Path(__file__).parent / "results" / "several_adapters.json"
TASKS, LIMIT, K = "sandbox:addition,sandbox:chain", 100, 4
WAYS = ("three calls, each draws the base", "three calls, the base is kept", "one call")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = [_adapter(folder, seed) for seed in range(3)]
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        drawn: dict[str, int] = {}
        for _ in range(rounds):
            for way in WAYS:
                took, drawn[way] = _measured(way, adapters, folder)
                seconds[way].append(took)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    first = medians[WAYS[0]]
    rows = [[way, f"{medians[way]:.1f}", f"{medians[way] / first:.2f}", f"{drawn[way]:,}"] for way in WAYS]
    print("\n".join(plain_table([["way", "s", "ratio", "completions drawn"], *rows])))
    facts = {"seconds": seconds, "drawn": drawn, "tasks": TASKS, "limit": LIMIT, "k": K}
    RESULTS.write_text(as_lines({**facts, "versions": installed_versions()}) + "\n", encoding="utf-8")


def _adapter(folder: Path, seed: int) -> Path:
    """A run of the quickstart, cut short."""
    settings = ["train.max_steps=4", "eval.enabled=false", f"train.seed={seed}"]
    return perl.train("quickstart", settings, folder / f"run-{seed}").path


def _measured(way: str, adapters: list[Path], folder: Path) -> tuple[float, int]:
    """Seconds and completions that were drawn; the base's count once where they are copies."""
    out, cache = folder / "out", folder / "cache"
    for place in (out, cache):
        shutil.rmtree(place, ignore_errors=True)
    groups = [adapters] if way == WAYS[2] else [[adapter] for adapter in adapters]
    started = time.monotonic()
    for group in groups:
        named = [f"--adapter={adapter}" for adapter in group]
        where = out if len(group) > 1 else out / group[0].name
        usual = ["--tasks", TASKS, "--limit", str(LIMIT), "--k", str(K), "--max-new-tokens", "64", "--no-lighteval"]
        kept = ["--no-base-cache"] if way == WAYS[0] else []
        command = [sys.executable, "-m", "perl", "eval", *named, *usual, *kept, "--quiet", "-o", str(where)]
        environment = {**os.environ, "PERL_CACHE": str(cache)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)  # noqa: S603
    took = time.monotonic() - started
    lines = [line for file in sorted(out.glob(f"*/{SAMPLES}")) for line in file.read_text().splitlines()]
    return took, len(lines if way == WAYS[0] else set(lines))


if __name__ == "__main__":
    main()
