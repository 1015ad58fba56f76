"""A rank of two killed at ten moments of a run, on each strategy: what is said, how soon, and where the run ends.

run of a recipe, SIGKILL to a random rank at a moment, the same command again -> the uninterrupted run's adapter?

    python benchmarks/killed_ranks.py [--kills 10] [--seed 0] [STRATEGY...]

A moment is a progress, not a time: while the base is scored; so many steps after the run has gone on, and a random part
of a step later; while a checkpoint is written; while the saved adapter is scored. Ranks, steps and delays are random,
and others for each strategy; each rank is killed as often as the other. All strategies train the same bits, so that one
uninterrupted run is compared with all. Prints a line a kill and adds the results to ``results/killed_ranks.json``.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from result_lines import as_lines

from perl.policy.checkpoint import latest_step
from perl.recipe.sections import STRATEGIES

RESULTS = Path(__file__).parent / "results" / "killed_ranks.json"
RECIPE = """
model: {name: sandbox:base}
data: {train: sandbox:addition}
train: {prompts_per_step: 2, num_generations: 4, max_steps: 34, save_steps: 1, learning_rate: 1e-3, beta: 0.01}
rollout: {max_completion_length: 24}
eval: {limit: 100, max_completion_length: 24}
engine: {device: cpu, threads: 1}
"""
COMMAND = [sys.executable, "-m", "perl", "train", "recipe.yaml", "--processes", "2"]
RUN = Path("runs/recipe")
# After a moment is reached, the kill comes at most so many seconds later: about a step, or a part of the scoring.
LATER = {"base": 1.0, "step": 1.0, "saving": 0.02, "end": 1.0}


@dataclass(frozen=True)
class Kill:
    """One of them.

    Attributes:
        rank: Which was killed.
        moment: Of the run, a key of :data:`MOMENTS`.
        after: Seconds later.
        steps: That were trained since the command was started.
        seconds: From the kill to the end of the command.
        code: The command's exit code.
        named: Whether the error names the rank and the signal.
        step: Of the newest checkpoint then.
        said: The error.
    """

    rank: int
    moment: str
    after: float
    steps: int
    seconds: float
    code: int
    named: bool
    step: int
    said: str


def logged(run: Path) -> int:
    """Steps that the run has logged."""
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.is_file() else 0


def facts_of(run: Path) -> Mapping[str, object]:
    """What the run has recorded of itself."""
    written = run / "run.json"
    found: dict[str, object] = json.loads(written.read_text()) if written.is_file() else {}
    return found


def writes(run: Path, step: int) -> bool:
    """Whether a checkpoint of that step or a later one is begun and not complete."""
    begun = (path for path in run.glob("checkpoints/checkpoint-*") if int(path.name.rpartition("-")[2]) >= step)
    return any(not (path / "complete.json").exists() for path in begun)


MOMENTS: Mapping[str, Callable[[Path, int], bool]] = {
    "base": lambda run, _: "fingerprint" in facts_of(run) and not logged(run),
    "step": lambda run, step: logged(run) >= step,
    "saving": writes,
    "end": lambda run, _: (run / "adapter" / "adapter_config.json").is_file(),
}
"""When a moment has come, of a run folder and a step."""


def moments_of(kills: int) -> list[str]:
    """Moments of so many kills in the order of a run; few of them fall into its steps alone."""
    steps = ["saving" if number % 3 == 1 else "step" for number in range(kills)]
    return steps if kills < len(MOMENTS) else ["base", *steps[:-2], "end"]


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


def killed(command: list[str], folder: Path, moment: str, rank: int, chance: random.Random) -> Kill | None:
    """Runs the command and kills a rank; None: it was done before."""
    run = folder / RUN
    began_at = latest_step(run / "checkpoints") or 0
    # The log may be one step ahead of the checkpoint: two more means that one was trained since.
    wanted, after = began_at + chance.randint(2, 4), chance.uniform(0.0, LATER[moment])
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:  # noqa: S603 (a fixed command)
        while len(ranks := ranks_of(process.pid)) < 2 and process.poll() is None:
            time.sleep(0.05)
        while not MOMENTS[moment](run, wanted) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(after)
        if process.poll() is not None or facts_of(run).get("status") == "done":
            said = process.communicate()[1]
            if process.returncode:
                raise RuntimeError(f"failed by itself: {said}")
            return None
        os.kill(ranks[rank], 9)
        began = time.monotonic()
        steps = logged(run) - began_at
        said = process.communicate()[1]
        seconds = time.monotonic() - began
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    told = errors[-1] if errors else said[-200:]
    named = len(errors) == 1 and f"rank {rank} (pid {ranks[rank]}" in told and "SIGKILL" in told
    newest = latest_step(run / "checkpoints") or 0
    return Kill(rank, moment, round(after, 3), steps, round(seconds, 2), process.returncode, named, newest, told)


def finished(command: list[str], folder: Path) -> str:
    """The digest of the adapter that the command ends with."""
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603 (a fixed command)
    return hashlib.sha256((folder / RUN / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def new_folder(place: Path, name: str) -> Path:
    """An empty one with the recipe."""
    folder = place / name
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def tried(strategy: str, kills: int, chance: random.Random, folder: Path, straight: str) -> dict[str, object]:
    """A run that is killed so often, beside the adapter of one that is not."""
    command, found = [*COMMAND, f"engine.strategy={strategy}"], list[Kill]()
    ranks = [number % 2 for number in range(kills)]
    chance.shuffle(ranks)
    for moment, rank in zip(moments_of(kills), ranks, strict=True):
        kill = killed(command, folder, moment, rank, chance)
        if kill is None:
            break
        found.append(kill)
        when = f"{kill.moment}, {kill.steps} steps since the start"
        print(f"{strategy}: {when}: {kill.seconds:5.2f} s, exit {kill.code}: {kill.said}", flush=True)
    return {
        "kills": [asdict(kill) | {"said": re.sub(r"pid \d+", "pid N", kill.said)} for kill in found],
        "all named": all(kill.named and kill.code == 1 for kill in found),
        "of rank 0 after steps": sum(kill.rank == 0 and kill.steps > 0 for kill in found),
        "longest seconds": max((kill.seconds for kill in found), default=0.0),
        "same adapter": finished(command, folder) == straight,
    }


def main() -> None:
    """Kills, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES))
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with TemporaryDirectory() as place:
        straight = finished(COMMAND, new_folder(Path(place), "straight"))
        for strategy in asked.strategies:
            chance = random.Random(f"{strategy} {asked.seed}")  # noqa: S311 (moments, no secrets)
            results[strategy] = tried(strategy, asked.kills, chance, new_folder(Path(place), strategy), straight)
            found = {name: value for name, value in results[strategy].items() if name != "kills"}
            print(f"{strategy}: {len(results[strategy]['kills'])} kills, {found}")
    RESULTS.write_text(as_lines(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
