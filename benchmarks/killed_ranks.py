"""A rank of two killed at ten random times, on each strategy: what is said, how soon, and where the run ends.

run of a recipe, SIGKILL to a random rank at a random moment, the same command again -> the uninterrupted run's adapter?

    python benchmarks/killed_ranks.py [--kills 10] [--seed 0] [STRATEGY...]

Prints a line a kill and adds the results to ``results/killed_ranks.json``.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from perl.recipe.sections import STRATEGIES

RESULTS = Path(__file__).parent / "results" / "killed_ranks.json"
RECIPE = """
model: {name: sandbox:base}
data: {train: sandbox:addition}
train: {prompts_per_step: 2, num_generations: 4, max_steps: 60, save_steps: 1, learning_rate: 1e-3, beta: 0.01}
rollout: {max_completion_length: 24}
eval: {enabled: false}
engine: {device: cpu, threads: 1}
"""
COMMAND = [sys.executable, "-m", "perl", "train", "recipe.yaml", "--processes", "2"]
# Seconds after the ranks have started within which one is killed.
LATEST = 35.0


@dataclass(frozen=True)
class Kill:
    """One of them.

    Attributes:
        rank: Which was killed.
        after: Seconds after it was started.
        seconds: From the kill to the end of the command.
        code: The command's exit code.
        named: Whether the error names the rank and the signal.
        step: Of the newest checkpoint then.
        said: The error.
    """

    rank: int
    after: float
    seconds: float
    code: int
    named: bool
    step: int
    said: str


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of the processes that a launcher has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdigit() else 0
            variables = (entry / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:  # it has ended
            continue
        found |= {int(v[5:]): int(entry.name) for v in variables if v.startswith(b"RANK=")}
    return found


def killed(command: list[str], folder: Path, chance: random.Random) -> Kill | None:
    """Runs the command and kills a rank; None: it was done before."""
    rank, after = chance.randrange(2), chance.uniform(0.0, LATEST)
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:  # noqa: S603 (a fixed command)
        while len(ranks_of(process.pid)) < 2 and process.poll() is None:
            time.sleep(0.05)
        time.sleep(after)
        victim = ranks_of(process.pid).get(rank)
        if victim is None or process.poll() is not None:
            process.wait()
            return None
        os.kill(victim, 9)
        began = time.monotonic()
        said = process.communicate()[1]
        seconds = time.monotonic() - began
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    told = errors[-1] if errors else said[-200:]
    named = len(errors) == 1 and f"rank {rank} (pid {victim}" in told and "SIGKILL" in told
    steps = [
        int(path.parent.name.rpartition("-")[2]) for path in folder.glob("runs/recipe/checkpoints/*/complete.json")
    ]
    return Kill(rank, round(after, 1), round(seconds, 2), process.returncode, named, max(steps, default=0), told)


def finished(command: list[str], folder: Path) -> str:
    """The digest of the adapter that the command ends with."""
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603 (a fixed command)
    return hashlib.sha256((folder / "runs/recipe/adapter/adapter_model.safetensors").read_bytes()).hexdigest()


def tried(strategy: str, kills: int, chance: random.Random, place: Path) -> dict[str, object]:
    """An uninterrupted run, and one that is killed so often."""
    command, digests, found = [*COMMAND, f"engine.strategy={strategy}"], [], list[Kill]()
    for name in ("straight", "killed"):
        folder = place / f"{strategy}-{name}"
        folder.mkdir()
        (folder / "recipe.yaml").write_text(RECIPE)
        while name == "killed" and len(found) < kills:
            kill = killed(command, folder, chance)
            if kill is None:
                break
            found.append(kill)
            print(
                f"{strategy}: after {kill.after:4.1f} s, {kill.seconds:5.2f} s, exit {kill.code}: {kill.said}",
                flush=True,
            )
        digests.append(finished(command, folder))
    return {
        "kills": [asdict(kill) | {"said": re.sub(r"pid \d+", "pid N", kill.said)} for kill in found],
        "all named": all(kill.named and kill.code == 1 for kill in found),
        "longest seconds": max(kill.seconds for kill in found),
        "same adapter": digests[0] == digests[1],
    }


def main() -> None:
    """Kills, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES))
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for strategy in asked.strategies:
        with TemporaryDirectory() as place:
            chance = random.Random(asked.seed)  # noqa: S311 (moments, no secrets)
            results[strategy] = tried(strategy, asked.kills, chance, Path(place))
        found = {name: value for name, value in results[strategy].items() if name != "kills"}
        print(f"{strategy}: {len(results[strategy]['kills'])} kills, {found}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
