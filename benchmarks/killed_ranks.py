"""What a run is made of killed at random moments: what is said, how soon, what is lost, and where the run ends.

run of a recipe, SIGKILL to a part of it at a moment, the same command again -> the uninterrupted run's adapter?

    python benchmarks/killed_ranks.py [--kills 10] [--seed 0] [STRATEGY|machine|store|driver|head...]

A moment is a progress, not a time: while the base is scored; so many steps after the run has gone on, and a random part
of a step later; while a checkpoint is written; while the saved adapter is scored. Ranks, steps and delays are random,
and others for each strategy; each rank is killed as often as the other. All strategies train the same bits, so that one
uninterrupted run is compared with all. Prints a line a kill and adds the results to ``results/killed_ranks.json``.

``machine`` kills the process of a run and deletes its folder; the next one goes on by ``--resume-from``. ``store``
kills the S3 server (moto's, of this Python or of PERL_MOTO's) that keeps a run, with all that it holds, and starts it
again. ``driver`` and ``head`` kill, on a Ray cluster of this machine, the process of ``perl train`` and ``gcs_server``.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from result_lines import as_lines

from perl.hub.stores import store_at
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
ALONE = COMMAND[:-2]
OF_RAY = [*ALONE, "engine.name=ray", "engine.address=local"]
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


def step_kept(store: str) -> int:
    """The newest whole state of a run in a store."""
    return max((step for step, whole in store_at(store, "").states().items() if whole), default=0)


def until(seen: Callable[[], bool], process: "subprocess.Popen[str]", chance: random.Random) -> None:
    """Waits for a moment and a random part of a step."""
    while not seen() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(chance.uniform(0.0, LATER["step"]))


def machines(kills: int, chance: random.Random, place: Path) -> dict[str, object]:
    """A run whose machine is lost so often, beside one that is not."""
    store, found, straight = (
        str(place / "store"),
        list[dict[str, object]](),
        finished(ALONE, new_folder(place, "whole")),
    )
    for number in range(kills + 1):
        folder = new_folder(place, f"machine-{number}")
        command = [*ALONE, f"engine.storage={store}", *(["--resume-from", store] if number else [])]
        if number == kills:
            return {"kills": found, "same adapter": finished(command, folder) == straight}
        wanted = step_kept(store) + chance.randint(2, 4)
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
            until(lambda: logged(folder / RUN) >= wanted, process, chance)  # noqa: B023 (called here)
            process.kill()
            said = [line for line in process.communicate()[1].splitlines() if "was brought from" in line]
        trained = logged(folder / RUN)
        shutil.rmtree(folder)
        found.append({"trained": trained, "kept": step_kept(store), "said": [line.split(" of ")[0] for line in said]})
        print(f"machine: {found[-1]}", flush=True)
    raise AssertionError


def stores(kills: int, chance: random.Random, place: Path) -> dict[str, object]:
    """A run whose store loses all that it holds so often, each time for some steps."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = [os.environ.get("PERL_MOTO", sys.executable), "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    url, store = f"http://127.0.0.1:{port}", "s3://bucket/run"
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "nobody")
    os.environ.update(keys, AWS_ENDPOINT_URL=url, NO_PROXY="127.0.0.1", AWS_REGION="us-east-1")

    def served() -> "subprocess.Popen[bytes]":
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running = subprocess.Popen(server, env={**os.environ, "PYTHONPATH": ""}, **pipes)  # noqa: S603
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                httpx2.put(f"{url}/bucket").raise_for_status()
                return running
            time.sleep(0.1)

    straight, folder = finished(ALONE, new_folder(place, "straight-run")), new_folder(place, "stored")
    running, downs = served(), list[tuple[int, int]]()
    command = [*ALONE, f"engine.storage={store}"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        lines: list[str] = []
        reader.start()
        for _ in range(kills):
            began = logged(folder / RUN) + chance.randint(2, 4)
            until(lambda: logged(folder / RUN) >= began, process, chance)  # noqa: B023
            running.kill()
            running.wait()
            ended = logged(folder / RUN) + chance.randint(2, 3)
            until(lambda: logged(folder / RUN) >= ended, process, chance)  # noqa: B023
            running = served()
            downs.append((began, logged(folder / RUN)))
        code = process.wait()
        reader.join()
    adapter = hashlib.sha256((folder / RUN / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
    fresh = finished([*ALONE, "--resume-from", store], new_folder(place, "fresh"))
    running.kill()
    told = [line for line in lines if "is not kept there" in line]
    return {
        "down from step to step": downs,
        "exit code": code,
        "lines": len(told),
        "said": re.sub(r"127.0.0.1:\d+", "HOST", told[0].strip()) if told else "",
        "at the end": [line.strip() for line in lines if line.startswith("kept in")],
        "same adapter": adapter == straight,
        "same adapter from the store": fresh == straight,
    }


def clusters(victim: str, kills: int, chance: random.Random, place: Path) -> dict[str, object]:
    """A run on Ray whose driver, or whose cluster's head, is killed so often."""
    straight, folder = finished(ALONE, new_folder(place, f"straight-{victim}")), new_folder(place, victim)
    found = list[dict[str, object]]()
    for _ in range(kills):
        began_at = latest_step(folder / RUN / "checkpoints")
        with subprocess.Popen(OF_RAY, cwd=folder, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
            wanted = began_at + chance.randint(2, 4)
            until(lambda: logged(folder / RUN) >= wanted, process, chance)  # noqa: B023
            pids = [process.pid] if victim == "driver" else heads_of(process.pid)
            began = time.monotonic()
            os.kill(pids[0], 9)
            said = process.communicate()[1]
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        seconds, newest = time.monotonic() - began, latest_step(folder / RUN / "checkpoints")
        found.append({"trained": logged(folder / RUN), "kept": newest, "seconds": round(seconds, 1),
                      "code": process.returncode, "said": errors})  # fmt: skip
        print(f"{victim}: {found[-1]}", flush=True)
    return {"kills": found, "same adapter": finished(OF_RAY, folder) == straight}


def heads_of(driver: int) -> list[int]:
    """The processes ``gcs_server`` that a driver has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"gcs_server" in (entry / "cmdline").read_bytes().split(b"\0")[0]:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(entry.name)] if parent == driver else []
    return found


OTHERS: Mapping[str, Callable[[int, random.Random, Path], dict[str, object]]] = {
    "machine": machines,
    "store": stores,
    "driver": partial(clusters, "driver"),
    "head": partial(clusters, "head"),
}


def main() -> None:
    """Kills, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES))
    asked = parser.parse_args()
    results = dict[str, Any]()
    with TemporaryDirectory() as place:
        strategies = [name for name in asked.strategies if name not in OTHERS]
        straight = finished(COMMAND, new_folder(Path(place), "straight")) if strategies else ""
        for strategy in asked.strategies:
            chance = random.Random(f"{strategy} {asked.seed}")  # noqa: S311 (moments, no secrets)
            if strategy in OTHERS:
                results[strategy] = OTHERS[strategy](asked.kills, chance, Path(place))
                print(f"{strategy}: {results[strategy]}")
                continue
            results[strategy] = tried(strategy, asked.kills, chance, new_folder(Path(place), strategy), straight)
            found = {name: value for name, value in results[strategy].items() if name != "kills"}
            print(f"{strategy}: {len(results[strategy]['kills'])} kills, {found}")
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(as_lines(before | results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
