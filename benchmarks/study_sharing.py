"""What a study saves by sharing: its cells, against the same commands one after the other and side by side.

Run as ``python benchmarks/study_sharing.py``, with ``--base FOLDER`` for a larger base. Each way trains the same cells
to the same adapters, which is checked. Prints seconds, processor seconds and the peak of memory, in which a page that
several processes share counts once, and writes ``results/study_sharing.json``, a row of it for each base.
"""

import argparse
import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from perl.run.folder import installed_versions, sha256_of
from perl.run.tables import plain_table
from perl.training.studies.cells import SCORES, cells_of
from perl.training.studies.written_plan import Study, load_study

_RESULTS = Path(__file__).parent / "results" / "study_sharing.json"
_LOOK_SECONDS = 0.25


class PeakOfMemory(threading.Thread):
    """The most memory that a process and all below it had at a time.

    Attributes:
        peak: Bytes; of a page that n processes share, each has 1/n (PSS).
    """

    def __init__(self, mark: str) -> None:
        """Looks at processes whose environment has the mark."""
        super().__init__(daemon=True)
        self.peak, self._mark, self._over = 0, mark.encode(), threading.Event()

    def run(self) -> None:
        """Looks now and then."""
        while not self._over.wait(_LOOK_SECONDS):
            total = 0
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    if self._mark in (place / "environ").read_bytes():
                        pss = (place / "smaps_rollup").read_text().partition("Pss:")[2].split()[0]
                        total += int(pss) * 1024
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        """Looks no more."""
        self._over.set()
        self.join()


def measured(name: str, work: Callable[[dict[str, str]], None]) -> dict[str, float]:
    """Seconds, processor seconds and bytes of what a function starts."""
    mark = f"PERL_BENCHMARK={name}-{os.getpid()}"
    key, _, value = mark.partition("=")
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    watching = PeakOfMemory(mark)
    watching.start()
    work({**os.environ, key: value, "OMP_NUM_THREADS": "1"})
    watching.stop()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.perf_counter() - started, 1), "cpu": round(cpu, 1), "peak": watching.peak}


def side_by_side(commands: list[list[str]], at_once: int, environment: dict[str, str], log: Path) -> None:
    """Runs commands, so many at a time."""
    waiting, running = list(commands), list[subprocess.Popen[bytes]]()
    with log.open("ab") as file:
        while waiting or running:
            while waiting and len(running) < at_once:
                command = waiting.pop(0)
                running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))  # noqa: S603
            ended = next((one for one in running if one.poll() is not None), None)
            if ended is None:
                time.sleep(0.05)
                continue
            if ended.returncode:
                raise SystemExit(f"a cell failed: {shlex.join(map(str, ended.args))}\n{log.read_text()[-2000:]}")
            running.remove(ended)


def commands_of(study: Study, folder: Path) -> list[list[str]]:
    """The command of each cell, into a folder."""
    made = []
    for cell in cells_of(study.candidates, study.file.seeds.score, SCORES):
        command = [sys.executable, "-m", "perl", "train", study.recipe, *study.every, *cell.overrides]
        made.append([*command, "-o", str(folder / cell.name)])
    return made


def adapters(folder: Path) -> dict[str, str]:
    """Hash of each cell's weights."""
    return {path.parent.parent.name: sha256_of(path) for path in folder.glob("*/adapter/adapter_model.safetensors")}


def run_all(study: Study, file: Path, work: Path, at_once: int) -> dict[str, dict[str, float]]:
    """Measures the three ways, which give the same adapters."""
    rows, first = {}, dict[str, str]()
    log, shared = work / "log", work / "shared"

    def in_a_study(environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "perl", "study", str(file), "-o", str(shared), "-q"]
        side_by_side([command], 1, environment, log)

    ways = {
        f"perl study, {at_once} at once": (in_a_study, shared / "cells" / SCORES),
        "one after the other": (lambda e: side_by_side(commands_of(study, work / "one"), 1, e, log), work / "one"),
        f"{at_once} side by side": (
            lambda e: side_by_side(commands_of(study, work / "two"), at_once, e, log),
            work / "two",
        ),
    }
    for name, (way, folder) in ways.items():
        rows[name] = measured(name.replace(" ", "-"), way)
        first = first or adapters(folder)
        if len(first) != len(study.candidates) or adapters(folder) != first:
            raise SystemExit(f"{name}: {len(adapters(folder))} adapters, which are not the {len(first)} of the study")
    return rows


def main() -> None:
    """Measures, compares, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--base", help="another base than the sandbox's, which has 3.2 MB")
    asked = parser.parse_args()
    content = {
        "recipe": "quickstart",
        "overrides": {"train.max_steps": asked.steps, "eval.limit": 64, "eval.k": 1}
        | ({"model.name": asked.base, "rollout.max_completion_length": 16} if asked.base else {}),
        "grid": {"train.learning_rate": [round(1e-3 * (1 + number), 6) for number in range(asked.cells)]},
        "tune": [],
        "seeds": {"score": [0]},
        "at_once": asked.at_once,
    }
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "sharing.yaml"
        file.write_text(yaml.safe_dump(content))
        rows = run_all(load_study(file), file, Path(name), asked.at_once)
    head = ["", "s", "processor s", "peak MiB"]
    cells = [[n, f"{r['seconds']:.0f}", f"{r['cpu']:.0f}", f"{r['peak'] / 2**20:,.0f}"] for n, r in rows.items()]
    print("\n".join(plain_table([head, *cells])))
    base = Path(asked.base).name if asked.base else "sandbox:base"
    sizes = {"cells": asked.cells, "at_once": asked.at_once, "steps": asked.steps}
    found = {**sizes, "ways": rows, "equal_adapters": asked.cells, "versions": installed_versions()}
    before = json.loads(_RESULTS.read_text()) if _RESULTS.is_file() else {}
    _RESULTS.write_text(json.dumps({**before, base: found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
